"""Trackers: the values that they write, and the facts that they are told."""

import importlib.util
import sys
import types

import pytest
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.trackers.base import RoundReport, RunFacts, require_package
from tff_pdp.trackers.mlflow import build_mlflow
from tff_pdp.trackers.tensorboard import build_tensorboard
from tff_pdp.trackers.wandb import build_wandb


def report(number, epsilon=0.5, **figures):
    nonprivate = {"mean": 0.5 + number / 100, "loss": 2.0, "spread": 0.125, "worst": float("nan"), **figures}
    return RoundReport(number, 0.25, epsilon, 1e-5, {"uplink_bytes": 400}, "accuracy", True, nonprivate)


@pytest.fixture
def run(tmp_path):
    return RunFacts("mr_mtl", "Digits", tmp_path / "demo" / "mr_mtl", "0f" * 16, 10, {"training": {"rounds": 10}})


SCALARS = {
    "epsilon_at_most": 0.5,
    "uplink_bytes": 400.0,
    "nonprivate/seconds_per_round": 0.25,
    "nonprivate/mean_accuracy": 0.55,
    "nonprivate/loss": 2.0,
    "nonprivate/spread_accuracy": 0.125,
}


def test_scalars_are_finite_numbers_and_names_say_what_is_not_private():
    assert report(5, worst_client="north").scalars() == SCALARS
    assert report(5, worst=0.25).scalars() == {**SCALARS, "nonprivate/worst_accuracy": 0.25}


def test_without_a_claim_and_without_figures_little_is_left():
    bare = RoundReport(5, 0.25, None, 0.0, {}, "accuracy", True, None)
    assert bare.scalars() == {"nonprivate/seconds_per_round": 0.25}


@pytest.mark.parametrize("place", ["", "elsewhere"])
def test_tensorboard_reads_settings_and_every_scalar_of_every_round(run, tmp_path, place):
    tracker = build_tensorboard(folder=str(tmp_path / place) if place else "")
    tracker.began(run)
    tracker.round_done(report(5))
    folder = tmp_path / place / "mr_mtl" if place else tmp_path / "demo" / "tensorboard" / "mr_mtl"
    (file,) = folder.iterdir()
    # While the training goes on.
    assert found_in(file)[("nonprivate/mean_accuracy", 5)] == pytest.approx(0.55)
    tracker.round_done(report(10))
    tracker.ended(run)
    values = found_in(file)
    assert "rounds" in values.pop(("settings", 0))
    expected = {(name, step): value for step in (5, 10) for name, value in SCALARS.items()}
    expected[("nonprivate/mean_accuracy", 10)] = 0.6
    assert values == pytest.approx(expected)


def found_in(file):
    """The values of an event file, by tag and step."""
    found = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            array = tf.make_ndarray(value.tensor)
            found[value.tag, event.step] = array.item().decode() if array.dtype == object else float(array)
    return found


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kind mlflow needs the package mlflow, which is not.*requirements-mlflow"):
        build_mlflow()
    with pytest.raises(ConfigError, match=r"kind wandb needs the package wandb.*run `pip install wandb"):
        build_wandb(project="digits")
    with pytest.raises(ConfigError, match="no_such_package"):
        require_package("own", "no_such_package", "pip install it")


class Recorded:
    """A stand-in for a package: remembers calls, with their arguments."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append((name, arguments, named))
            return self

        return call


def test_wandb_is_told_the_run_and_its_scalars_and_continues_a_resumed_run(run, monkeypatch):
    package = Recorded()
    module = types.ModuleType("wandb")
    module.init = package.init
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker = build_wandb(project="digits", mode="offline")
    tracker.began(run)
    tracker.round_done(report(5))
    tracker.ended(run)
    (init, _, given), (log, scalars, step), (finish, _, code) = package.calls
    assert (init, log, finish) == ("init", "log", "finish")
    assert (given["id"], given["resume"], given["mode"], given["entity"]) == (run.run_id, "allow", "offline", None)
    assert scalars == (SCALARS,) and step == {"step": 5}
    # The run did not come to its end.
    assert code == {"exit_code": 1}


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="requirements-mlflow.txt is not installed")
def test_mlflow_keeps_parameters_and_metrics_in_files_and_one_run_for_a_resumed_run(run, tmp_path):
    import dataclasses

    from mlflow import MlflowClient

    for number, is_finished in ((5, False), (10, True)):
        tracker = build_mlflow()
        tracker.began(run)
        tracker.round_done(report(number))
        tracker.ended(dataclasses.replace(run, round_number=number, is_finished=is_finished))
    client = MlflowClient(tracking_uri=(tmp_path / "demo" / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("Digits").experiment_id])
    assert found.data.params == {"training.rounds": "10"}
    assert found.info.status == "FINISHED"
    assert found.data.metrics == pytest.approx({**SCALARS, "nonprivate/mean_accuracy": 0.6})
    history = client.get_metric_history(found.info.run_id, "nonprivate/mean_accuracy")
    assert [(one.step, one.value) for one in history] == [(5, 0.55), (10, 0.6)]
