import dataclasses
import json

import dp_accounting
import pytest

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accountants import epsilon_bounds
from tff_pdp.reports.numbers import upper
from tff_pdp.runtime import checkpoint as checkpoints
from tff_pdp.runtime.export import _privacy_report
from tff_pdp.runtime.releases import all_ledgers
from tff_pdp.runtime.results import evaluate_experiment, load_trained, summary_table
from tff_pdp.runtime.run_key import RunKey
from tff_pdp.runtime.train import train

ONE = {"algorithms": {"fed_avg": {}}, "export__algorithm": "fed_avg", "training__test_only_seed": None}


def statement(config):
    return (config.algorithm_folder("fed_avg").parent / "report.html").read_text()


def test_a_private_run_says_so_and_composes_replaced_runs(experiment):
    config = experiment(**ONE)
    train(config, "fed_avg", progress=False)
    once = evaluate_experiment(config)
    assert once["privacy"]["claim"] == "formal-conditional"
    assert once["privacy"]["composed"]["methods"] == 1
    train(config, "fed_avg", overwrite=True, progress=False)
    twice = evaluate_experiment(config)
    assert len(all_ledgers(config.clients_folder.parent)) == 2
    assert twice["privacy"]["composed"]["methods"] == 2
    assert twice["privacy"]["composed"]["epsilon"] > once["privacy"]["composed"]["epsilon"]
    assert twice["silos"][0]["epsilon_spent"] == once["silos"][0]["epsilon_spent"]


def test_a_run_with_a_known_seed_is_never_called_private(experiment):
    config = experiment(**{**ONE, "training__test_only_seed": 1})
    state = train(config, "fed_avg", progress=False)
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"
    assert "not private" in statement(config).lower()
    method, _ = load_trained(config, "fed_avg")
    assert _privacy_report(method, state)["claim"] == "none"
    with pytest.raises(ConfigError, match="other settings"):
        evaluate_experiment(experiment(**ONE))


def test_the_key_in_the_checkpoint_decides_not_the_configuration(experiment):
    config = experiment(**ONE)
    state = train(config, "fed_avg", progress=False)
    guessed = dataclasses.replace(state, run_key=RunKey.from_test_seed(1))
    checkpoints.save(config.algorithm_folder("fed_avg") / "checkpoints", guessed)
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"


def test_a_run_without_privacy_is_reported_and_claims_nothing(experiment):
    config = experiment(**ONE, privacy__plan="none")
    state = train(config, "fed_avg", progress=False)
    summary = evaluate_experiment(config)
    json.dumps(summary, allow_nan=False)
    assert "inf" in summary_table(summary)
    assert summary["privacy"]["claim"] == "none"
    method, _ = load_trained(config, "fed_avg")
    assert _privacy_report(method, state)["claim"] == "none"


def test_a_silo_without_a_bound_takes_the_claim_from_all(experiment):
    budgets = {"delta": 1e-4, "default_epsilon": 4.0, "silos": {"silo_01": float("inf")}}
    config = experiment(**ONE, privacy__budgets=budgets)
    state = train(config, "fed_avg", progress=False)
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"
    method, _ = load_trained(config, "fed_avg")
    report = _privacy_report(method, state)
    json.dumps(report, allow_nan=False)
    assert (report["claim"], report["claim_reason"]) == ("none", "1 silos trained without noise, for example silo_01")


def test_an_unfinished_run_is_not_evaluated(experiment):
    with pytest.raises(ConfigError, match=r"0 of 6 rounds.*--resume"):
        evaluate_experiment(experiment(**ONE))


def test_configurations_that_were_tried_are_priced_as_releases(experiment):
    config = experiment(**ONE, tuning__tuned=["learning rate"], tuning__configurations_tried=4)
    state = train(config, "fed_avg", progress=False)
    evaluate_experiment(config)
    silos = list(state.ledger.budgets)
    worst = max(silos, key=lambda silo: state.ledger.epsilon(silo).best)
    parts = [
        dp_accounting.SelfComposedDpEvent(entry.event, 4 * entry.count)
        for entry in state.ledger.entries
        if entry.scope == worst
    ]
    by_hand = epsilon_bounds(dp_accounting.ComposedDpEvent(parts), state.ledger.budgets[worst].delta).best
    assert f"the ε of the silo that spent most would be {upper(by_hand)} at" in statement(config)
