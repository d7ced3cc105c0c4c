"""tff_pdp: personalised, differentially private federated learning on TensorFlow Federated.

An experiment as an object, with results as pandas frames (docs/python_api.md):

    import tff_pdp as tp
    experiment = tp.Experiment.from_yaml("my.yaml", {"training.rounds": 50})    # or tp.Experiment(title=..., data=...)
    experiment.prepare()
    experiment.train()
    experiment.evaluate()
    experiment.predict(x, "silo_03")
    experiment.spent()

The functions below it, in order of use (`serving.server` serves an export, `serving.client` queries the server):

    config = tff_pdp.load_experiment("my.yaml", {"training.rounds": 50})
    tff_pdp.prepare(config)             raw data to a client dataset
    tff_pdp.train(config, "mr_mtl")     a personal model for each client, and a ledger of the budget spent
    tff_pdp.tune(config, "mr_mtl")      instead of `train`: also searches hyper-parameters privately
    tff_pdp.evaluate(config)            test metrics, in report.html and summary.json
    tff_pdp.export(config)              all personal models as one SavedModel
    tff_pdp.personalize(config, examples, options=tff_pdp.FitOptions(steps=50))    clients added to the export
    tff_pdp.verify(Path(config.output))    checks that no file has changed since it was written; computes epsilon

Each name of `__all__` is imported when it is first used: `import tff_pdp` alone does not import TensorFlow. Errors that
a caller can mend are raised as `UserError`.

errors: exceptions whose messages are meant for users
files: functions that write a file completely or not at all
digests: digests of files, and JSON with a digest of itself
lock: a lock that gives a folder one writer at a time
journal: append-only files whose lines are chained by hashes
settings: conversion of YAML to typed values, with errors that name the key
kinds: finds the class or function that a section's `kind` names, and the settings of that class or function
command_line: commands made of settings classes: options, help, exit status
_tff: the names of TFF that tff_pdp uses
data: a client dataset on disk
generators: random generators inside graphs
models: pure functions over named weights
algorithms: the methods and their parts
privacy: accounting, mechanisms, plans
processes: TFF computations, made from algorithm, model and privacy plan
engines: how a TFF computation is executed
reports: `report.html` and `summary.json`
trackers: what a training shows of itself to TensorBoard, MLflow and others
registry: all runs on this computer, with the records that they use
experiment: from a file of settings to a method ready to run
training: rounds of charging the ledger, training and saving checkpoints
personal_models: from a trained method to served models
verification: off-line checks of what lies on disk
audit: what an observer can infer beyond the guarantee
reproduce: published experiments, compared with the published figures
commands: the class of each command
api: the Python API, an experiment as an object
cli: the command `tff-pdp`, with all commands
testing: tests for algorithms, models, data and privacy plans that other packages define
"""

import os
import sys
import warnings

# TensorFlow reads these once, when it is first imported; every module of this package is imported after this line. A
# value that the user has set stays. Guarantees assume that a row's bits do not depend on the other rows of a matrix
# (docs/privacy.md). Eigen's products of stacks, which TensorFlow takes on many processors unless oneDNN is asked for,
# break that, and so do operations that are divided among threads. Clients are computed side by side instead.
_FOR_ROWS = {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
if "tensorflow" in sys.modules and any(name not in os.environ for name in _FOR_ROWS):
    warnings.warn(
        "TensorFlow was imported before tff_pdp, without settings that privacy guarantees need. Import tff_pdp first, "
        f"or set {' and '.join(f'{name}={value}' for name, value in _FOR_ROWS.items())} before Python starts.",
        stacklevel=2,
    )
# 3 silences notes about CPU features and absent GPUs; failures are Python exceptions and are not affected. CUDA 11.8
# loads all kernels at the start unless told otherwise; for a card newer than TensorFlow's machine code, CUDA compiles
# them first.
for _name, _value in (_FOR_ROWS | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_MODULE_LOADING": "LAZY"}).items():
    os.environ.setdefault(_name, _value)

__version__ = "0.1.0"

# `__init__.pyi` tells type checkers the same.
_PLACES = {
    "Experiment": "api.experiment:Experiment",
    "ExperimentConfig": "experiment.config:ExperimentConfig",
    "FitOptions": "personal_models.new_clients.options:FitOptions",
    "UserError": "errors:UserError",
    "evaluate": "training.evaluate:evaluate_experiment",
    "export": "personal_models.export:export_experiment",
    "load_experiment": "experiment.config:load_experiment",
    "personalize": "personal_models.new_clients.personalize:personalize",
    "prepare": "experiment.prepare:prepare_clients",
    "train": "training.train:train",
    "tune": "training.search.tune:tune",
    "verify": "verification.experiment:verify",
}
__all__ = [*_PLACES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, own = _PLACES[name].partition(":")
    found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), own)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
