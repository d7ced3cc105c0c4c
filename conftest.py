"""Gives the examples in docstrings of the Python API one small experiment, so that each example is short."""

import contextlib
from types import SimpleNamespace

import pytest
from _pytest.doctest import DoctestItem

# Modules of the names that `tff_pdp` exports, with examples that need an experiment.
_PUBLIC = (
    "tff_pdp.api.experiment",
    "tff_pdp.experiment.prepare",
    "tff_pdp.personal_models.export",
    "tff_pdp.personal_models.new_clients.personalize",
    "tff_pdp.training.evaluate",
    "tff_pdp.training.search.tune",
    "tff_pdp.training.train",
    "tff_pdp.verification.experiment",
)
_NUM_SILOS = 4


@pytest.fixture(scope="session")
def example_of_the_api(tmp_path_factory):
    """A trained experiment on scikit-learn's digits in four silos, and a state folder of its own.

    Its registry and its cache are in that folder, so that examples are no part of what anybody's records have cost.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    import tff_pdp

    folder = tmp_path_factory.mktemp("example")
    images, labels = load_digits(return_X_y=True)
    silos = {f"silo_{silo}": slice(silo, None, _NUM_SILOS) for silo in range(_NUM_SILOS)}
    arrays = {f"{name}/x": images[rows] / 16 for name, rows in silos.items()}
    digits = folder / "digits.npz"
    np.savez(digits, **arrays, **{f"{name}/y": labels[rows] for name, rows in silos.items()})
    newcomer = folder / "newcomer.npz"
    np.savez(newcomer, x=images[::9] / 16, y=labels[::9])
    own = SimpleNamespace(folder=folder, digits=str(digits), newcomer=newcomer, computations={})
    with _own_state(own.folder):
        own.experiment = tff_pdp.Experiment(
            title="Four silos of digits",
            output=folder / "run",
            data={"kind": "silo_files", "input": digits, "input_shape": [64], "num_classes": 10},
            model={"kind": "linear"},
            privacy={
                "kind": "silo_example",
                "clip_norm": 1.0,
                "batch_size": 32,
                "budgets": {"kind": "one_for_all", "epsilon": 3.0, "delta": 1e-4},
            },
            training={"rounds": 4, "client_parallelism": "loop"},
            algorithms={"local_only": {"learning_rate": 0.3}, "mr_mtl": {"learning_rate": 0.3, "prox_weight": 0.3}},
            export={"algorithm": "mr_mtl", "model_name": "digits"},
        )
        own.experiment.prepare()
        own.experiment.train(progress=False)
    return own


@pytest.fixture(scope="session")
def process_of_examples():
    """The process that verifies exports of examples: each process would import TensorFlow anew."""
    from serving.verify.fresh_process import FreshProcess

    with FreshProcess() as process:
        yield process


@contextlib.contextmanager
def _own_state(folder):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(folder / name))
        yield


@pytest.fixture(autouse=True)
def examples_have_an_experiment(request, doctest_namespace):
    """Gives those examples the names `experiment`, `config`, `folder` (a free one), `digits` and `newcomer` (files)."""
    node = request.node
    if not (isinstance(node, DoctestItem) and node.dtest.globs["__name__"].startswith(_PUBLIC)):
        yield
        return
    from tff_pdp.experiment.build import keep_computations
    from tff_pdp.personal_models import export
    from tff_pdp.personal_models.new_clients import version

    own = request.getfixturevalue("example_of_the_api")
    process = request.getfixturevalue("process_of_examples")
    doctest_namespace.update(
        experiment=own.experiment,
        config=own.experiment.config,
        folder=str(own.folder / "another"),
        digits=own.digits,
        newcomer=own.newcomer,
    )
    with _own_state(own.folder), keep_computations(own.computations), pytest.MonkeyPatch.context() as patch:
        for module in (export, version):
            patch.setattr(module, "FreshProcess", lambda: contextlib.nullcontext(process))
        yield
