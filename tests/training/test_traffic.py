"""The bytes of a training's rounds, its resumption through warm start, groups and subspaces, and its warning."""

import pytest

from tests.training.stopping import stop_before
from tests.training.test_train import assert_same_run
from tff_pdp.experiment.build import build_method
from tff_pdp.training.run_folder import read_metrics
from tff_pdp.training.traffic import TrafficCount
from tff_pdp.training.train import train

PFA_PLUS = {"algorithms": {"pfa_plus": {"kind": "pfa", "plus": True, "learning_rate": 0.1, "local_steps": 2}}}
BY_SILO = {"kind": "cycled", "epsilons": [0.5, 8.0, 0.5], "delta": 1e-3}


def pfa_plus(experiment, name="run", **others):
    settings = {**PFA_PLUS, "export__algorithm": "pfa_plus", "privacy__budgets": BY_SILO}
    return experiment(name, **settings, **others)


def traffic_of(row):
    return [row[name] for name in ("uplink_bytes", "downlink_bytes", "total_uplink_bytes", "total_downlink_bytes")]


def test_rows_of_metrics_have_the_bytes_that_real_silos_would_send_and_receive(experiment):
    config = experiment()
    weights = build_method(config, "fed_avg").model.num_parameters()
    train(config, "fed_avg", progress=False)
    a_round = 4 * 3 * weights
    rows = read_metrics(config.algorithm_folder("fed_avg"))
    assert [traffic_of(row) for row in rows] == [
        [a_round, a_round, 3 * a_round, 3 * a_round],
        [a_round] * 2 + [6 * a_round] * 2,
    ]


def test_a_resumed_run_of_pfa_plus_has_the_same_bits_and_the_same_traffic(experiment, monkeypatch, capsys):
    config = pfa_plus(experiment, "whole")
    whole = train(config, "pfa_plus", progress=False)
    assert "pfa_plus: warning: 1 of 3 silos are liberal" in capsys.readouterr().err
    rows = [traffic_of(row) for row in read_metrics(config.algorithm_folder("pfa_plus"))]
    # After the warm start, the first projection, and in the middle of the rounds with coordinates.
    for stopped in (2, 3, 5):
        config = pfa_plus(experiment, f"stopped before {stopped}")
        with monkeypatch.context() as patch:
            stop_before(patch, stopped)
            with pytest.raises(RuntimeError):
                train(config, "pfa_plus", progress=False)
        assert_same_run(whole, train(config, "pfa_plus", resume=True, progress=False))
        assert [traffic_of(row) for row in read_metrics(config.algorithm_folder("pfa_plus"))] == rows
    model = build_method(config, "pfa_plus").model
    weights, tensors = model.num_parameters(), len(model.init(0))
    # Rounds 1 and 2 are whole; then one silo of three sends everything, two send a number for each tensor.
    few = 4 * (weights + 2 * tensors)
    assert [row[0] for row in rows] == [few, few]
    assert rows[1][2] == 2 * 4 * 3 * weights + 4 * few
    assert [row[1] for row in rows] == [4 * (3 * weights + 2 * 2 * weights)] * 2


def test_every_silo_stays_within_its_own_budget_with_the_warm_start_entered(experiment):
    config = pfa_plus(experiment)
    ledger = train(config, "pfa_plus", progress=False).ledger
    for client_id, budget in ledger.budgets.items():
        assert 0.9 * budget.epsilon < ledger.epsilon(client_id).best <= budget.epsilon
        entries = [entry for entry in ledger.entries if entry.scope == client_id and "DP-SGD" in entry.reason]
        assert sum(entry.count for entry in entries) == 6 * 2


def test_of_users_only_one_users_bytes_are_told(experiment):
    # A sum over a sample would reveal the sample's size.
    config = experiment(
        privacy__kind="none",
        privacy__unit="user",
        privacy__users_per_round=2,
    )
    method = build_method(config, "fed_avg")
    facts = TrafficCount(method).through({}, 1)
    size = 4 * method.model.num_parameters()
    assert facts == {"uplink_bytes_per_user": size, "downlink_bytes_per_user": size}
