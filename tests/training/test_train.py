import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import ELEMENTARY, network_roundings, probable_gamma
from tests.tiers import parameters
from tests.training.stopping import stop_before
from tff_pdp.engines.inprocess import engine as engines
from tff_pdp.engines.inprocess.execution import LoadedProgram
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training import spending
from tff_pdp.training import train as training
from tff_pdp.training.record.charges import read_charges
from tff_pdp.training.run_folder import read_metrics
from tff_pdp.training.train import train


def leaves(state):
    return [np.asarray(leaf) for leaf in tf.nest.flatten((state.server_state, list(state.client_states)))]


def assert_same_run(first, second):
    assert first.round_number == second.round_number
    assert first.client_ids == second.client_ids
    assert first.ledger.to_json() == second.ledger.to_json()
    for one, other in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_spends_within_every_budget_and_writes_its_metrics(experiment):
    config = experiment()
    state = train(config, "mr_mtl", progress=False)
    for client_id, budget in state.ledger.budgets.items():
        assert 0.9 * budget.epsilon < state.ledger.epsilon(client_id).best <= budget.epsilon
    rows = read_metrics(config.algorithm_folder("mr_mtl"))
    assert [row["round"] for row in rows] == [3, 6]
    assert all(0 <= row["nonprivate"]["mean"] <= 1 for row in rows)
    assert {(row["metric"], row["higher_is_better"]) for row in rows} == {("accuracy", True)}


@pytest.mark.parametrize(
    ("name", "engine", "parallelism"),
    parameters(
        [("fed_avg", "inprocess", "loop"), ("mr_mtl", "inprocess", "vectorized"), ("mr_mtl", "native", "auto")],
        test=[("mr_mtl", "inprocess", "vectorized"), ("mr_mtl", "native", "auto")],
    ),
)
def test_a_run_that_failed_midway_resumes_to_the_same_bits(experiment, monkeypatch, name, engine, parallelism):
    settings = {"training__engine": engine, "training__client_parallelism": parallelism}
    whole = train(experiment("whole", **settings), name, progress=False)
    config = experiment("stopped", **settings)
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(RuntimeError):
            train(config, name, progress=False)
    resumed = train(config, name, resume=True, progress=False)
    assert_same_run(whole, resumed)
    assert [row["round"] for row in read_metrics(config.algorithm_folder(name))] == [3, 6]


def test_a_resumed_run_goes_on_with_what_was_chosen_whatever_is_faster_now(experiment, monkeypatch):
    """Clients one by one and clients in stacks round differently: a change of mind would change the bits."""

    def choose(mode):
        times = {"loop": 1.0, "vectorized": 1.0, mode: 0.5}
        monkeypatch.setattr(LoadedProgram, "compare", lambda *arguments: times)

    choose("loop")
    settings = {"training__engine": "inprocess", "training__client_parallelism": "auto"}
    whole = train(experiment("whole", **settings), "mr_mtl", progress=False)
    config = experiment("stopped", **settings)
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(RuntimeError):
            train(config, "mr_mtl", progress=False)
    folder = config.algorithm_folder("mr_mtl")
    assert set(read_charges(folder).choices.values()) == {"loop"}
    choose("vectorized")
    assert_same_run(whole, train(config, "mr_mtl", resume=True, progress=False))
    train(config, "mr_mtl", overwrite=True, progress=False)
    assert set(read_charges(folder).choices.values()) == {"vectorized"}


def test_a_resumed_run_goes_on_with_the_device_that_was_chosen(experiment, monkeypatch):
    """A second name of the CPU stands in for a GPU whose evidence is complete."""
    another = ("/device:CPU:0",)
    monkeypatch.setattr(engines, "find_places", lambda name: [engines.CPU, another])
    monkeypatch.setattr(spending, "gpu_arithmetic", lambda: {"trial": "0123"})
    # Both modes on the CPU, then both on the stand-in.
    times = itertools.cycle([2.0, 2.0, 1.0, 1.0])
    monkeypatch.setattr(LoadedProgram, "time", lambda *arguments: next(times))
    monkeypatch.setattr(LoadedProgram, "compare", lambda *arguments: {"loop": 1.0})
    # An engine with `auto` is this test's own.
    settings = {"training__device": "auto", "training__client_parallelism": "auto"}
    config = experiment("stopped", **settings, training__checkpoint_every=2, privacy__noise_multiplier=30.0)
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(RuntimeError, match="the power went out"):
            train(config, "fed_avg", progress=False)
    folder = config.algorithm_folder("fed_avg")
    charges = read_charges(folder)
    assert charges.choices["device"] == "gpu"
    assert json.loads((folder / "config.json").read_text())["training"]["device"] == "auto"
    arithmetic = charges.attempt.arithmetic[charges.through_round]
    assert (arithmetic["device"], arithmetic["gpu trial"]) == ("auto", "0123")
    times = itertools.cycle([1.0, 1.0, 2.0, 2.0])
    assert train(config, "fed_avg", resume=True, progress=False).run_key.attempt == 0
    assert read_charges(folder).choices == charges.choices


@pytest.mark.parametrize("evidence", [{"trial": "4567"}, None], ids=str)
def test_rounds_on_a_gpu_whose_bits_may_differ_are_drawn_anew(experiment, monkeypatch, evidence):
    monkeypatch.setattr(engines, "find_places", lambda name: [("/device:CPU:0",)])
    monkeypatch.setattr(spending, "gpu_arithmetic", lambda: {"trial": "0123"})
    monkeypatch.setattr(LoadedProgram, "compare", lambda *arguments: {"loop": 1.0})
    settings = {"training__device": "gpu", "training__client_parallelism": "auto"}
    config = experiment("stopped", **settings, training__checkpoint_every=2, privacy__noise_multiplier=30.0)
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(RuntimeError):
            train(config, "fed_avg", progress=False)
    monkeypatch.setattr(spending, "gpu_arithmetic", lambda: evidence)
    assert train(config, "fed_avg", resume=True, progress=False).run_key.attempt == 1


@pytest.mark.parametrize("name", parameters(["fed_avg", "local_only"], test=["fed_avg"]))
def test_engines_draw_the_same_and_differ_in_rounding_alone(experiment, name):
    settings = [("native", "auto"), ("inprocess", "loop"), ("inprocess", "vectorized")]
    configs = [
        experiment("_".join(pair), training__engine=pair[0], training__client_parallelism=pair[1]) for pair in settings
    ]
    native, *others = (train(config, name, progress=False) for config in configs)
    bound = 2 * probable_gamma(_roundings(training.build_method(configs[0], name), native.round_number))
    for other in others:
        assert other.client_ids == native.client_ids
        for one, same in zip(leaves(other), leaves(native), strict=True):
            assert one.dtype == same.dtype
            # Relative to the largest of a kind: what is rounded of one weight reaches the others by the losses.
            atol = bound * np.abs(same).max() if same.dtype.kind == "f" and same.size else 0
            np.testing.assert_allclose(one, same, rtol=0, atol=atol)


def _roundings(method, rounds):
    """Counts those in a row from the first weights to those after some rounds of one step each.

    In a step these are both passes through the model, the norm of an example's gradient, the batch's sum, its noise (a
    logarithm, a root and a cosine) and the update; then come a sum over clients and the server's own update.
    """
    weights = method.model.init(0)
    clients = method.clients
    largest = max(clients.num_examples(client_id, "train") for client_id in clients.client_ids)
    a_step = network_roundings(weights, largest) + method.model.num_parameters() + 3 * ELEMENTARY + 8
    return rounds * (a_step + 2 * len(clients.client_ids))


@pytest.mark.timeout(300)
def test_a_killed_process_resumes_to_the_same_bits(experiment, tmp_path):
    settings = {"training__rounds": 400, "training__evaluate_every": 400}
    whole = train(experiment("whole", **settings), "mr_mtl", progress=False)
    config = experiment("killed", **settings)
    path = tmp_path / "killed.yaml"
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "tff_pdp.cli", "train", "--config", str(path), "--algorithm", "mr_mtl"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = config.algorithm_folder("mr_mtl") / "checkpoints"
    deadline = time.monotonic() + 120
    while not any(folder.glob("round_0000[1-9]*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    stopped_at = checkpoints.load_latest(folder).round_number
    assert 0 < stopped_at < 400, "the process was not killed in the middle of training"
    assert_same_run(whole, train(config, "mr_mtl", resume=True, progress=False))


def test_without_a_test_seed_two_runs_draw_different_noise(experiment):
    first, second = (
        train(experiment(name, training__test_only_seed=None), "fed_avg", progress=False) for name in ("one", "two")
    )
    assert not first.run_key.is_test_only
    assert any(not np.array_equal(one, other) for one, other in zip(leaves(first), leaves(second), strict=True))


def test_an_existing_run_is_not_touched_unless_asked(experiment):
    config = experiment()
    done = train(config, "local_only", progress=False)
    with pytest.raises(ConfigError, match="--resume or --overwrite"):
        train(config, "local_only", progress=False)
    assert_same_run(done, train(config, "local_only", resume=True, progress=False))
    with pytest.raises(ConfigError, match="other settings"):
        train(experiment(privacy__clip_norm=2.0), "local_only", resume=True, progress=False)
    assert_same_run(done, train(config, "local_only", overwrite=True, progress=False))


def test_a_wrong_name_does_not_cost_the_run_it_would_replace(experiment):
    config = experiment()
    done = train(config, "local_only", progress=False)
    with pytest.raises(ConfigError):
        train(config, "clients", overwrite=True, progress=False)
    budgets = {"kind": "by_silo", "silos": {"nobody": 4.0}, "default_epsilon": 4.0, "delta": 1e-4}
    with pytest.raises(ConfigError, match=r"privacy\.budgets\.silos\.nobody names no silo"):
        train(experiment(privacy__budgets=budgets), "local_only", overwrite=True, progress=False)
    assert_same_run(done, train(config, "local_only", resume=True, progress=False))
    assert config.clients_folder.exists()


def test_a_half_written_line_of_metrics_does_not_stop_a_resume(experiment):
    config = experiment()
    train(config, "local_only", progress=False)
    with open(config.algorithm_folder("local_only") / "metrics.jsonl", "a") as file:
        file.write('{"round": 9, "spl')
    train(config, "local_only", resume=True, progress=False)
    assert [row["round"] for row in read_metrics(config.algorithm_folder("local_only"))] == [3, 6]


def test_what_a_killed_command_left_goes_with_the_next_one(experiment):
    config = experiment()
    train(config, "local_only", progress=False)
    folder = config.algorithm_folder("local_only")
    before = sorted(folder.rglob("*"))
    for name in ("round_000004.tmp", "round_000002.removed"):
        (folder / "checkpoints" / f".{name}").mkdir()
        (folder / "checkpoints" / f".{name}" / "run_key.json").write_text("{}")
    for name in ("metrics.jsonl", "config.json"):
        (folder / f"{name}.{'0a' * 16}").touch()
    train(config, "local_only", resume=True, progress=False)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True, "fast"])
def test_a_learning_rate_that_is_none_is_refused(experiment, value):
    with pytest.raises(ConfigError, match=r"algorithms.fed_avg.learning_rate"):
        train(
            experiment(algorithms={"fed_avg": {"learning_rate": value}}, export__algorithm="fed_avg"),
            "fed_avg",
            progress=False,
        )


def test_a_round_beyond_the_budget_is_refused_before_it_runs(experiment, monkeypatch):
    config = experiment()
    method = training.build_method(config, "local_only")
    state = train(config, "local_only", progress=False)

    def must_not_run(*arguments):
        raise AssertionError("the round ran")

    refused = dataclasses.replace(method, process=dataclasses.replace(method.process, next=must_not_run))
    with pytest.raises(BudgetError, match="overspend"):
        training.run_round(refused, state, 7, [])


def test_unknown_names_are_listed_with_the_known_ones(experiment):
    with pytest.raises(ConfigError, match="fed_avg"):
        train(experiment(), "fedavg", progress=False)
    with pytest.raises(
        ConfigError, match=r"model.kind: unknown kind 'transformer'; known: cnn, lenet, linear, linear_regression"
    ):
        train(experiment(model__kind="transformer"), "fed_avg", progress=False)
    with pytest.raises(
        ConfigError, match=r"unknown key algorithms.fed_avg.momentum; known: learning_rate, local_steps"
    ):
        train(
            experiment(algorithms={"fed_avg": {"momentum": 0.9}}, export__algorithm="fed_avg"),
            "fed_avg",
            progress=False,
        )
    with pytest.raises(ConfigError, match="engine"):
        train(experiment(training__engine="warp"), "fed_avg", progress=False)
