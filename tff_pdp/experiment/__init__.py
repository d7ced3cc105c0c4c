"""Turns a file of settings into a method that is ready to run.

config: an experiment's sections, its folders and its digest
kinds: names of algorithms, models, plans, sources; one line each
run_key: the secret of a run's randomness
hparams: hyper-parameters of every client; candidates of a search
before_training: statistics that silos release first, stored and reused
reference: all keys of a configuration, as JSON Schema and as docs/configuration.md
examples: clients' examples of a split, padded to few sizes
method: `Method`: one method, ready to run
build: makes the values that a run works with from a configuration
prepare: makes a client dataset from raw data, with the Beam job
"""
