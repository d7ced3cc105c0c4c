"""tff_pdp: personalised, differentially private federated learning on TensorFlow Federated.

errors: the error family that users read
files: whole files or none
digests: digests of files, and JSON that carries its own
lock: one writer for each folder
journal: lines on disk, each chained to all before it
settings: YAML into typed values; errors that name the key
kinds: what a section's `kind` names; settings of functions
command_line: commands made of settings classes: options, help, exit status
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
import sys
import warnings

# TensorFlow reads these once, when it is first imported; every module of this package is imported after this line. What
# a user has set stays. Guarantees take for granted that a row's bits do not depend on the other rows of a matrix
# (docs/privacy.md). Eigen's products of stacks, which TensorFlow takes on many processors unless oneDNN is asked for,
# break that, and so do operations that are divided among threads. Clients are computed side by side instead.
_FOR_ROWS = {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
if "tensorflow" in sys.modules and any(name not in os.environ for name in _FOR_ROWS):
    warnings.warn(
        "TensorFlow was imported before tff_pdp, and has read settings that guarantees rely on. Import tff_pdp first, "
        f"or set {' and '.join(f'{name}={value}' for name, value in _FOR_ROWS.items())} before Python starts.",
        stacklevel=2,
    )
# 3 silences notes about CPU features and absent GPUs; failures are Python exceptions and are not affected.
for _name, _value in (_FOR_ROWS | {"TF_CPP_MIN_LOG_LEVEL": "3"}).items():
    os.environ.setdefault(_name, _value)

__version__ = "0.1.0"
