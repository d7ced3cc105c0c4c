"""The reports of a training's rounds: to metrics.jsonl, and to trackers."""

import dataclasses
import sys
import types

import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import build_method, experiment_engine
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.training.rounds import evaluate_clients, first_state
from tff_pdp.training.run_folder import read_metrics, validation_means
from tff_pdp.training.tracking import RoundReports, build_trackers
from tff_pdp.training.train import train

PRIVATE = {"training__test_only_seed": None}


class Told:
    """A tracker that remembers what it is told, and may fail."""

    def __init__(self, fails_in=""):
        self.calls, self._fails_in = [], fails_in

    def __getattr__(self, name):
        def call(fact):
            self.calls.append((name, fact))
            if name == self._fails_in:
                raise OSError("the disk is full")

        return call


@pytest.fixture
def trackers(monkeypatch):
    """The module of a user, with trackers that the test can ask afterwards."""
    module = types.ModuleType("trackers_of_a_user")
    module.made = []

    def build_told(*, fails_in: str = ""):
        module.made.append(Told(fails_in))
        return module.made[-1]

    build_told.__module__ = module.__name__
    module.build_told = build_told
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_rows_have_epsilon_and_what_is_not_private_apart(experiment, monkeypatch):
    config = experiment(**PRIVATE)
    state = train(config, "mr_mtl", progress=False)
    rows = read_metrics(config.algorithm_folder("mr_mtl"))
    assert [row["round"] for row in rows] == [3, 6]
    spent = max(state.ledger.epsilon(silo).best for silo in state.ledger.budgets)
    budget = max(one.epsilon for one in state.ledger.budgets.values())
    assert 0 < rows[0]["epsilon_at_most"] < rows[1]["epsilon_at_most"] <= budget
    assert rows[1]["epsilon_at_most"] >= spent
    assert rows[1]["delta"] == max(one.delta for one in state.ledger.budgets.values())
    public = {"format_version", "round", "split", "seconds", "epsilon_at_most", "delta", "metric", "higher_is_better"}
    traffic = {"uplink_bytes", "downlink_bytes", "total_uplink_bytes", "total_downlink_bytes"}
    assert all(set(row) == public | traffic | {"nonprivate"} for row in rows)


def test_in_a_long_training_a_bound_holds_for_a_stage_and_covers_every_round(experiment):
    config = experiment(**PRIVATE)
    method = build_method(config, "mr_mtl")
    with experiment_engine(config):
        state = first_state(method, None)
    # As for 150 rounds, of which stages have three: rounds 1 to 3, and so on.
    plan = dataclasses.replace(method.plan, rounds=150, last_rounds=dict.fromkeys(method.plan.last_rounds, 150))
    plan = dataclasses.replace(plan, budgets={silo: SiloBudget(1000.0, 1e-5) for silo in plan.budgets})
    ledger, reports = plan.build_ledger(), RoundReports(dataclasses.replace(method, plan=plan))
    found = []
    for number in range(1, 8):
        plan.charge_round(ledger, number)
        own = dataclasses.replace(state, round_number=number, ledger=ledger)
        found.append(reports.report(own, 0.5, {}, None).epsilon_at_most)
        assert found[-1] >= max(ledger.epsilon(silo).best for silo in plan.budgets)
    assert found[0] == found[1] == found[2] < found[3] == found[4] == found[5] < found[6]
    # A resumed run has the same rows.
    again = RoundReports(dataclasses.replace(method, plan=plan))
    assert again.report(dataclasses.replace(own, round_number=7), 0.5, {}, None).epsilon_at_most == found[6]
    assert found[2] == max(ledger_through(plan, 3).epsilon_at_most(silo) for silo in plan.budgets)


def ledger_through(plan, round_number):
    ledger = plan.build_ledger()
    for number in range(1, round_number + 1):
        plan.charge_round(ledger, number)
    return ledger


def test_figures_over_clients_are_those_of_an_evaluation(experiment):
    config = experiment()
    state = train(config, "mr_mtl", progress=False)
    method = build_method(config, "mr_mtl")
    with experiment_engine(config):
        found = evaluate_clients(method, state, method.round_data("validation"))
    own = {client_id: one["personal"] for client_id, one in found.items()}
    accuracies = [float(one["accuracy"]) for one in own.values()]
    mean = sum(accuracies) / 3
    row = read_metrics(config.algorithm_folder("mr_mtl"))[-1]
    # The noise follows from a seed that is known.
    assert row["epsilon_at_most"] is None and row["delta"] == 0.0
    assert row["nonprivate"] == {
        "mean": pytest.approx(mean),
        "loss": pytest.approx(sum(float(one["loss"]) for one in own.values()) / 3),
        "spread": pytest.approx((sum((one - mean) ** 2 for one in accuracies) / 3) ** 0.5),
        "worst": min(accuracies),
        "worst_client": min(own, key=lambda client_id: own[client_id]["accuracy"]),
    }


def test_one_switch_leaves_out_all_that_is_not_private(experiment, monkeypatch):
    monkeypatch.setattr("tff_pdp.training.train.client_metrics", lambda *arguments: pytest.fail("validated"))
    config = experiment(**PRIVATE, training__nonprivate_metrics=False)
    train(config, "mr_mtl", progress=False)
    rows = read_metrics(config.algorithm_folder("mr_mtl"))
    assert len(rows) == 2 and not any("nonprivate" in row for row in rows)
    assert validation_means(rows) == []
    assert all(row["epsilon_at_most"] > 0 for row in rows)


def test_means_of_earlier_versions_are_read_too():
    old, new = {"round": 2, "mean": "nan"}, {"round": 4, "nonprivate": {"mean": 0.5}}
    (first, nan), second = validation_means([old, new, {"round": 6}])
    assert (first, nan != nan, second) == (2, True, (4, 0.5))


def test_a_tracker_from_outside_is_told_every_validated_round(experiment, trackers):
    config = experiment(training__trackers=[{"kind": "trackers_of_a_user:build_told"}])
    train(config, "local_only", progress=False)
    (told,) = trackers.made
    assert [name for name, _ in told.calls] == ["began", "round_done", "round_done", "ended"]
    (_, began), (_, third), (_, sixth), (_, ended) = told.calls
    assert (began.method, began.rounds, began.round_number, began.is_finished) == ("local_only", 6, 0, False)
    assert (third.round_number, sixth.round_number) == (3, 6)
    assert (ended.round_number, ended.is_finished) == (6, True)
    rows = read_metrics(config.algorithm_folder("local_only"))
    assert [row["nonprivate"] for row in rows] == [dict(third.nonprivate), dict(sixth.nonprivate)]


@pytest.mark.parametrize("fails_in", ["began", "round_done", "ended"])
def test_a_tracker_that_fails_is_warned_of_once_and_training_goes_on(experiment, trackers, capfd, fails_in):
    sections = [
        {"kind": "trackers_of_a_user:build_told", "fails_in": fails_in},
        {"kind": "trackers_of_a_user:build_told"},
    ]
    state = train(experiment(training__trackers=sections), "local_only", progress=False)
    assert state.round_number == 6
    failed, other = trackers.made
    assert [name for name, _ in failed.calls][-1] == fails_in and len(other.calls) == 4
    text = capfd.readouterr().err
    assert text.count("warning: the tracker Told failed and is left out") == 1
    assert "OSError: the disk is full" in text


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"missing key training\.trackers\[0\]\.kind"),
        ({"kind": "tensor"}, r"training\.trackers: unknown kind 'tensor'"),
        ({"kind": "tensorboard", "folders": "x"}, r"unknown key training\.trackers\[0\]\.folders; did you mean folder"),
        ({"kind": "wandb"}, r"training\.trackers\[0\]"),
    ],
)
def test_a_wrong_tracker_is_refused_before_anything_is_spent(experiment, section, message):
    config = experiment(training__trackers=[section])
    with pytest.raises(ConfigError, match=message):
        build_trackers(config)
    with pytest.raises(ConfigError, match=message):
        train(config, "mr_mtl", progress=False)
    assert not config.algorithm_folder("mr_mtl").exists()
