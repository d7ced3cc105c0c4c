"""A model and a method from outside of the package: trained by `module:name`, on record, and named in the claim."""

import hashlib
import json
import sys

import pytest

from tff_pdp.experiment.build import build_method
from tff_pdp.training.train import train

LAB = """
import dataclasses

from tff_pdp.algorithms.whole_models.finetune import build_local_only
from tff_pdp.models.dense import build_linear


def build_alone():
    return dataclasses.replace(build_local_only(), title="Alone")


def build_tiny(input_shape, num_classes, *, input_scale: float = 1.0):
    return build_linear(input_shape, num_classes, input_scale=input_scale)
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    file = tmp_path / "my_lab.py"
    file.write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("my_lab", None)


def described(experiment, **overrides):
    alone = {"kind": "my_lab:build_alone", "learning_rate": 0.3, "local_steps": 1}
    model = {"kind": "my_lab:build_tiny", "input_scale": 0.5}
    return experiment(**{"model": model, "algorithms": {"alone": alone}, "export__algorithm": "alone", **overrides})


def test_what_comes_from_outside_is_trained_recorded_and_named(experiment, lab):
    config = described(experiment, training__rounds=2)
    origin = f", SHA-256 {hashlib.sha256(LAB.encode()).hexdigest()[:16]}"
    expected = {"model": f"my_lab:build_tiny{origin}", "algorithms.alone": f"my_lab:build_alone{origin}"}
    assert config.outside("alone") == expected
    assert train(config, "alone", progress=False).round_number == 2
    assert json.loads((config.algorithm_folder("alone") / "config.json").read_text())["outside"] == expected
    reason = build_method(config, "alone").plan.claim_reason
    for section, place in expected.items():
        assert f"{section} is defined outside of tff_pdp ({place})" in reason


def test_another_file_is_another_experiment(experiment, lab):
    config = described(experiment)
    before = config.hash("alone", "data")
    lab.write_text(LAB + "\n# Changed.\n")
    assert config.hash("alone", "data") != before


def test_what_is_our_own_is_not_named(experiment):
    config = experiment()
    assert config.outside("mr_mtl") == {}
    assert "outside" not in build_method(config, "mr_mtl").plan.claim_reason
