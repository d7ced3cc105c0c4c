"""Noised training that may use a GPU has deterministic operations; other training has not."""

import pytest

from tff_pdp.errors import DataError
from tff_pdp.experiment import build
from tff_pdp.experiment.config import load_experiment


@pytest.fixture
def switched(monkeypatch):
    """Counts calls that make operations deterministic, on a machine with a GPU."""
    calls = []
    monkeypatch.setattr(build, "gpus", lambda: ["a card"])
    monkeypatch.setattr(build, "use_deterministic_operations", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize("device", ["auto", "gpu", "gpu:0"])
def test_noised_training_that_may_use_a_gpu_has_them(switched, device):
    build.choose_operations(load_experiment("demo", {"training.device": device}))
    assert switched


@pytest.mark.parametrize(
    "settings",
    [
        {"training.device": "cpu"},
        {"training.deterministic_operations": False},
        {"training.engine": "native"},
        {"privacy": {"kind": "none", "unit": "silo", "batch_size": 8}},
    ],
    ids=str,
)
def test_other_training_has_not(switched, settings):
    build.choose_operations(load_experiment("demo", settings))
    assert not switched


def test_neither_has_a_machine_without_a_gpu(switched, monkeypatch):
    monkeypatch.setattr(build, "gpus", list)
    build.choose_operations(load_experiment("demo", {}))
    assert not switched


def test_they_are_chosen_before_the_method_is_built(switched, tmp_path):
    config = load_experiment("demo", {"output": str(tmp_path)})
    with pytest.raises(DataError):
        build.build_method(config, next(iter(config.algorithms)))
    assert switched
