"""`tff-pdp audit budgets` on small runs: images of 12 x 12 pixels on a background of zeros, in three silos."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.written_clients import write_clients
from tests.tiers import parameters
from tests.training.stopping import stop_before
from tff_pdp.algorithms.projection.groups import liberal_by_norm
from tff_pdp.audit import budgets as audits
from tff_pdp.audit.budgets import audit_budgets, audit_text
from tff_pdp.audit.uploads import check_readable, first_uploads
from tff_pdp.cli import AUDITS
from tff_pdp.command_line import main
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.train import train

SHAPE, SIZE = (12, 12, 1), 300
EPSILONS = {"a": 0.5, "b": 2.0, "c": 10.0}
BUDGETS = {"kind": "by_silo", "silos": EPSILONS, "delta": 1e-4}
SETTINGS = {
    "data__input_shape": list(SHAPE),
    "training__rounds": 2,
    "training__checkpoint_every": 1,
    "training__test_only_seed": None,
    "privacy__budgets": BUDGETS,
    "tuning": {},
}
STEPS = {"learning_rate": 0.1, "local_steps": 8}


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    """A client dataset: every image has a frame of zeros, two pixels wide."""
    generator = np.random.default_rng(5)
    extents = []
    for silo in EPSILONS:
        for split, size in (("train", SIZE), ("validation", 3), ("test", 3)):
            x = np.zeros((size, *SHAPE), np.float32)
            x[:, 2:-2, 2:-2] = generator.uniform(size=(size, 8, 8, 1))
            extents.append((silo, split, 0, x.reshape(size, -1), np.arange(size) % 10))
    folder = tmp_path_factory.mktemp("framed") / "clients"
    return write_clients(folder, FeatureSpec.of(SHAPE, 10), extents)


@pytest.fixture
def build(experiment, silos, tmp_path):
    """A function that builds an experiment with one method on these silos."""

    def build_one(name="run", algorithm="fed_avg", algorithms=None, **overrides):
        (tmp_path / name).mkdir(exist_ok=True)
        if not (tmp_path / name / "clients").exists():
            (tmp_path / name / "clients").symlink_to(silos)
        given = {"algorithms": algorithms or {algorithm: STEPS}, "export__algorithm": algorithm}
        return experiment(name, **{**SETTINGS, **given, **overrides})

    return build_one


@pytest.fixture
def trained(build):
    """A function that trains one method for one round and returns the experiment and the last state."""

    def run(algorithm="fed_avg", **overrides):
        config = build(algorithm=algorithm, training__rounds=1, **overrides)
        return config, train(config, algorithm, progress=False)

    return run


def refusal(config, algorithm="fed_avg"):
    with pytest.raises(ConfigError) as caught:
        audit_budgets(config, algorithm)
    return str(caught.value)


@pytest.mark.parametrize("algorithm", parameters(["fed_avg", "mocha", "pfa"], test=["fed_avg", "pfa"]))
def test_budgets_are_read_from_the_uploads_of_the_run(trained, monkeypatch, algorithm):
    config, state = trained(algorithm)
    folder = config.algorithm_folder(algorithm)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seen = {}

    def watched(*given):
        seen.update(first_uploads(*given))
        return seen

    monkeypatch.setattr(audits, "first_uploads", watched)
    content = audit_budgets(config, algorithm)
    # Nothing is charged or written.
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    check_readings(content)
    # The server's step of the run, computed anew from the uploads.
    after = state.server_state["algorithm"]
    initial = build_method(config, algorithm).model.init(0)
    changes = {name: np.stack([upload.change[name] for upload in seen.values()]) for name in initial}
    if algorithm == "pfa":
        # The warm start moves nothing, and groups silos by their uploads.
        np.testing.assert_array_equal(after["is_liberal"], liberal_by_norm(changes, np.ones(len(seen))))
        return
    for name, start in initial.items():
        if algorithm == "fed_avg":
            np.testing.assert_allclose(after["weights"][name] - start, changes[name].mean(axis=0), rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(after["rows"][name], changes[name] + start)


def check_readings(content):
    rows = {row["silo"]: row for row in content["silos"]}
    assert list(rows) == list(EPSILONS)
    for silo, row in rows.items():
        assert row["epsilon_target"] == EPSILONS[silo]
        assert 0.95 * EPSILONS[silo] < row["epsilon"] <= EPSILONS[silo]
        # 80 pixels of a frame for ten classes: a standard error of 2.5 %.
        assert (row["estimator"], row["num_values"]) == ("quiet", 800)
        assert row["noise_multiplier_read"] == pytest.approx(row["noise_multiplier"], rel=0.1)
        assert row["epsilon_read"] == pytest.approx(row["epsilon"], rel=0.3)
        assert row["epsilon_error"] == pytest.approx(row["epsilon_read"] / row["epsilon"] - 1)
    assert content["gradients_in_upload"] == dict.fromkeys(EPSILONS, 8)
    assert content["largest_errors"] == {
        "noise_multiplier": max(abs(row["noise_multiplier_error"]) for row in rows.values()),
        "epsilon": max(abs(row["epsilon_error"]) for row in rows.values()),
    }
    text = audit_text(content)
    assert "budgets are inferable" in text and "largest error of z: " in text
    assert [line.split()[0] for line in text.splitlines()[1:4]] == list(EPSILONS)


def test_a_run_that_failed_after_its_first_round_can_be_audited(build, monkeypatch):
    # `auto` would choose stacks now; the run's choice holds.
    config = build(training__client_parallelism="auto")
    monkeypatch.setattr(LoadedProgram, "compare", lambda *_: {"loop": 0.5, "vectorized": 1.0})
    with monkeypatch.context() as patch:
        stop_before(patch, 2)
        with pytest.raises(RuntimeError):
            train(config, "fed_avg", progress=False)
    assert set(read_charges(config.algorithm_folder("fed_avg")).choices.values()) == {"loop"}
    monkeypatch.setattr(LoadedProgram, "compare", lambda *_: pytest.fail("the choice is on record"))
    content = audit_budgets(config, "fed_avg", frame=0)
    assert {row["estimator"] for row in content["silos"]} == {"median"}
    strict = content["silos"][0]
    assert strict["noise_multiplier_read"] == pytest.approx(strict["noise_multiplier"], rel=0.15)


def test_a_silo_without_budget_a_silo_that_left_and_other_arithmetic(trained, build, monkeypatch):
    budgets = {**BUDGETS, "silos": {"a": 0.5, "b": 1e-3, "c": math.inf}}
    given = {"privacy__budgets": budgets, "privacy__noise_multiplier": 6.0}
    config, _ = trained(**given)
    content = audit_budgets(config, "fed_avg")
    assert content["absent"] == ["b"]
    assert "no upload in round 1: b" in audit_text(content)
    json.dumps(content, allow_nan=False)
    with monkeypatch.context() as patch:
        patch.setattr(audits, "arithmetic_here", lambda *_: {"processor": "another"})
        assert "different here: " in refusal(config) and "processor" in refusal(config)
    charges = read_charges(config.algorithm_folder("fed_avg"))
    later = dataclasses.replace(charges, attempt=dataclasses.replace(charges.attempt, number=1, first_round=2))
    with monkeypatch.context() as patch:
        patch.setattr(audits, "read_charges", lambda _: later)
        assert "goes on in attempt 2, from round 2" in refusal(config)
    assert "with other settings" in refusal(build(training__rounds=3, **given))


def test_what_cannot_be_read_is_refused(build, trained):
    assert "holds no run with a first round" in refusal(build())
    assert "is not in this experiment" in refusal(build(), "mocha")
    config, _ = trained("local_only")
    assert "nothing leaves a silo" in refusal(config, "local_only")


def test_methods_and_plans_without_budgets_to_read():
    ifca, _ = build_algorithm("ifca", {}, num_clients=3, rounds=2)
    with pytest.raises(ConfigError, match="private selection of a cluster"):
        check_readable(SimpleNamespace(algorithm=ifca, first_phase=None))
    with pytest.raises(ConfigError, match="made of synthetic data"):
        check_readable(SimpleNamespace(algorithm=ifca, first_phase="rounds on synthetic data"))
    plan = SimpleNamespace(samples_clients=False, budgets={"a": 1.0}, sampler="poisson", search=None)
    audits.check_plan(plan)
    for change, reason in (
        ({"samples_clients": True}, "one budget for all users"),
        ({"budgets": {}}, "has no budgets"),
        ({"sampler": "paper_shuffled"}, "must be poisson"),
    ):
        with pytest.raises(ConfigError, match=reason):
            audits.check_plan(SimpleNamespace(**{**vars(plan), **change}))


def test_the_command_needs_a_method(capsys):
    assert main(AUDITS, ["budgets", "--config", "demo"]) == 2
    assert "--algorithm is missing; this experiment has: local_only, fed_avg, mr_mtl" in capsys.readouterr().err
