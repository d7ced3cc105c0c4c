import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.runtime import checkpoint as checkpoints
from tff_pdp.runtime import train as training
from tff_pdp.runtime.train import read_metrics, train


def leaves(state):
    return [np.asarray(leaf) for leaf in tf.nest.flatten((state.server_state, dict(state.client_states)))]


def assert_same_run(first, second):
    assert first.round_number == second.round_number
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
    assert all(0 <= row["mean_accuracy"] <= 1 for row in rows)


@pytest.mark.parametrize("name", ["fed_avg", "mr_mtl"])
def test_a_run_that_failed_midway_resumes_to_the_same_bits(experiment, monkeypatch, name):
    whole = train(experiment("whole"), name, progress=False)
    real_round = training.run_round

    def failing_round(method, state, round_number, data):
        if round_number == 4:
            raise RuntimeError("the power went out")
        return real_round(method, state, round_number, data)

    config = experiment("stopped")
    monkeypatch.setattr(training, "run_round", failing_round)
    with pytest.raises(RuntimeError):
        train(config, name, progress=False)
    monkeypatch.setattr(training, "run_round", real_round)
    resumed = train(config, name, resume=True, progress=False)
    assert_same_run(whole, resumed)
    assert [row["round"] for row in read_metrics(config.algorithm_folder(name))] == [3, 6]


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
    with pytest.raises(ConfigError):
        train(experiment(privacy__budgets={}), "local_only", overwrite=True, progress=False)
    assert_same_run(done, train(config, "local_only", resume=True, progress=False))
    assert config.clients_folder.exists()


def test_a_half_written_line_of_metrics_does_not_stop_a_resume(experiment):
    config = experiment()
    train(config, "local_only", progress=False)
    with open(config.algorithm_folder("local_only") / "metrics.jsonl", "a") as file:
        file.write('{"round": 9, "spl')
    train(config, "local_only", resume=True, progress=False)
    assert [row["round"] for row in read_metrics(config.algorithm_folder("local_only"))] == [3, 6]


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
    with pytest.raises(ConfigError, match=r"model.name: 'transformer' is not known; known: linear, mlp"):
        train(experiment(model__name="transformer"), "fed_avg", progress=False)
    with pytest.raises(ConfigError, match=r"unknown key 'algorithms.fed_avg.momentum'"):
        train(
            experiment(algorithms={"fed_avg": {"momentum": 0.9}}, export__algorithm="fed_avg"),
            "fed_avg",
            progress=False,
        )
    with pytest.raises(ConfigError, match="engine"):
        train(experiment(training__engine="warp"), "fed_avg", progress=False)
