"""From a file of settings to a method ready to run.

config: all sections of an experiment, folders, digest
kinds: names of algorithms, models, plans, sources; one line each
run_key: the secret of a run's randomness
hparams: hyper-parameters of every client; candidates of a search
before_training: statistics that silos release first, stored and reused
reference: all keys of a configuration, as JSON Schema and as docs/configuration.md
examples: clients' examples of a split, padded to few sizes
method: `Method`: one method, ready to run
build: from a configuration to the values a run works with
prepare: raw data to a client dataset; starts the Beam job
"""
