"""Experiments of the Python API on three silos of digits."""

import pytest

import tff_pdp as tp

MR_MTL = {"learning_rate": 0.3, "local_steps": 1, "prox_weight": 0.3}


@pytest.fixture
def build(experiment):
    """A function that makes an experiment of MR-MTL alone, with a secret key, under this test's own folder."""

    def build(**overrides):
        settings = {"training__test_only_seed": None, "algorithms": {"mr_mtl": MR_MTL}, "training__rounds": 2}
        return tp.Experiment(**experiment(**{**settings, **overrides}).to_dict())

    return build


@pytest.fixture(scope="module")
def trained(client_folder, tmp_path_factory):
    """A trained experiment with two methods, for tests that change nothing."""
    output = tmp_path_factory.mktemp("trained")
    (output / "clients").symlink_to(client_folder)
    made = tp.Experiment.from_yaml(
        "demo",
        {
            "output": output,
            "data.input": client_folder.parent / "leaf",
            # One for all tests of the module: each test has a state folder of its own.
            "privacy.registry": output / "registry",
            "training.rounds": 3,
            "training.evaluate_every": 1,
            "training.client_parallelism": "loop",
            "algorithms": {"local_only": {"learning_rate": 0.3}, "mr_mtl": MR_MTL},
        },
    )
    made.train(progress=False)
    return made
