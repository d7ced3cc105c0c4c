"""tff_pdp: personalised, differentially private federated learning on TensorFlow Federated.

errors: the error family that users read
files: whole files or none
digests: digests of files, and JSON that carries its own
lock: one writer for each folder
journal: lines on disk, each chained to all before it
settings: mappings of YAML into dataclasses and numbers
_tff: the one door to TFF
data: a client dataset on disk
models: pure functions over named weights
algorithms: what methods are made of
privacy: accounting, mechanisms, plans
processes: algorithm + model + plan to TFF computations
engines: how a TFF computation is executed
reports: what readers see
registry: all runs on the same records, over all folders
experiment: from a file of settings to a method ready to run
training: rounds of ledger, next, checkpoint
personal_models: from a trained method to served models
verification: what lies on disk, checked off line
reproduce: published experiments beside their figures
commands: what each command does
cli: the command `tff-pdp`, with all commands
"""

import os

# TensorFlow reads this once, when it is first imported; every module of this package is imported after this line.
# 3 silences notes about CPU features and absent GPUs; failures are Python exceptions and are not affected.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

__version__ = "0.1.0"
