"""Turns a file of settings into a method that is ready to run.

config: an experiment's sections, its folders and its digest
kinds: lists the names of algorithms, models, privacy plans and kinds of raw data
run_key: the secret key from which a run's randomness is derived
hparams: hyper-parameters of every client; candidates of a search
synthetic_data: silos' synthetic data, made once, stored, and read as examples
before_training: statistics and synthetic data that silos release first, stored and reused
reference: all keys of a configuration, as JSON Schema and as docs/configuration.md
examples: clients' examples of a split, padded to a few sizes
method: `Method`: one method, ready to run
at_workers: the same method, whose examples and parameters workers make for themselves
model: builds the model, with its loss and its metric
build: builds methods, engine and clients from a configuration
prepare: makes a client dataset from raw data, with the Beam job
"""
