import dataclasses
import html
import json

import dp_accounting
import pytest

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.build import build_method
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.personal_models.export import _privacy_report
from tff_pdp.privacy.accounting.accountants import epsilon_bounds, poisson_gaussian_event
from tff_pdp.reports.words import upper
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.evaluate import evaluate_experiment, load_trained, summary_table
from tff_pdp.training.privacy_facts import user_sums
from tff_pdp.training.record.releases import all_releases
from tff_pdp.training.train import train

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
    assert len(all_releases(config.clients_folder.parent)) == 2
    assert twice["privacy"]["composed"]["methods"] == 2
    assert twice["privacy"]["composed"]["epsilon"] > once["privacy"]["composed"]["epsilon"]
    assert twice["silos"][0]["epsilon_spent"] == once["silos"][0]["epsilon_spent"]


def test_a_report_shows_some_synthetic_images_of_each_silo(experiment):
    section = {"generator": {"kind": "dp_gaussian", "examples": 20}, "rounds": 1}
    config = experiment(**ONE, training__rounds=2, privacy__synthetic=section)
    train(config, "fed_avg", progress=False)
    evaluate_experiment(config)
    assert "Synthetic images of 3 of 3 silos" in statement(config)


def test_a_run_with_a_known_seed_is_never_called_private(experiment):
    config = experiment(**{**ONE, "training__test_only_seed": 1})
    state = train(config, "fed_avg", progress=False)
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"
    assert "not private" in statement(config).lower()
    method, _ = load_trained(config, "fed_avg")
    assert _privacy_report(config, method, state)["claim"] == "none"
    with pytest.raises(ConfigError, match="other settings"):
        evaluate_experiment(experiment(**ONE))


def test_the_key_in_the_checkpoint_decides_not_the_configuration(experiment):
    config = experiment(**ONE)
    state = train(config, "fed_avg", progress=False)
    key = RunKey.from_test_seed(1)
    made_with = key.keyed(build_method(config, "fed_avg").config_hash)
    guessed = dataclasses.replace(state, run_key=key, config_hash=made_with)
    checkpoints.save(config.algorithm_folder("fed_avg") / "checkpoints", guessed)
    with pytest.raises(DataError, match=r"charges\.jsonl"):
        evaluate_experiment(config)
    for path in config.algorithm_folder("fed_avg").glob("charges.*"):
        path.unlink()
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"


def test_another_run_whose_key_can_be_guessed_leaves_no_bound_for_both(experiment):
    config = experiment(**ONE)
    state = train(config, "fed_avg", progress=False)
    guessed = dataclasses.replace(state, run_key=RunKey.from_test_seed(1))
    checkpoints.save(config.algorithm_folder("mr_mtl") / "checkpoints", guessed)
    privacy = evaluate_experiment(config)["privacy"]
    assert (privacy["composed"]["methods"], privacy["composed"]["epsilon"]) == (2, None)
    assert "training.test_only_seed" in privacy["composed"]["claim_reason"]


def test_a_run_without_privacy_is_reported_and_claims_nothing(experiment):
    config = experiment(**ONE, privacy__kind="none")
    state = train(config, "fed_avg", progress=False)
    summary = evaluate_experiment(config)
    json.dumps(summary, allow_nan=False)
    assert "3 silos; claim: none, and no epsilon: privacy is switched off" in summary_table(summary)
    assert summary["privacy"]["claim"] == "none"
    assert {silo["epsilon_spent"] for silo in summary["silos"]} == {None}
    method, _ = load_trained(config, "fed_avg")
    assert _privacy_report(config, method, state)["claim"] == "none"


def test_a_silo_without_a_bound_takes_the_claim_from_all(experiment):
    budgets = {"kind": "by_silo", "delta": 1e-4, "default_epsilon": 4.0, "silos": {"silo_01": float("inf")}}
    config = experiment(**ONE, privacy__budgets=budgets)
    state = train(config, "fed_avg", progress=False)
    assert evaluate_experiment(config)["privacy"]["claim"] == "none"
    method, _ = load_trained(config, "fed_avg")
    report = _privacy_report(config, method, state)
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


USERS_PRIVACY = {
    "kind": "user",
    "batch_size": 16,
    "clip_norm": 0.5,
    "users_per_round": 1.5,
    "budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-3},
}
METHODS = {"local_only": {}, "fed_avg": {}}
USERS = {**ONE, "algorithms": METHODS, "export__algorithm": "fed_avg", "privacy": USERS_PRIVACY, "tuning": {}}


def evaluate_users(experiment, **overrides):
    config = experiment(**{**USERS, **overrides})
    for name in config.algorithms:
        train(config, name, overwrite=True, progress=False)
    return config, evaluate_experiment(config)


def page_of(config):
    return (config.clients_folder.parent / "report.html").read_text()


def test_a_user_level_run_has_one_epsilon_for_all(experiment):
    config, summary = evaluate_users(experiment)
    json.dumps(summary, allow_nan=False)
    method, state = load_trained(config, "fed_avg")
    state.client_states.close()
    row, alone = summary["algorithms"]["fed_avg"], summary["algorithms"]["local_only"]
    # Half of the three users in each of six rounds.
    noise = method.plan.mechanism.noise_multiplier
    (drawn,) = method.plan.drawn_noise.values()
    by_hand = epsilon_bounds(dp_accounting.ComposedDpEvent([poisson_gaussian_event(0.5, noise, 6), drawn]), 1e-3)
    assert row["epsilon_spent"] == by_hand.best
    assert (row["epsilon_rdp"], row["epsilon_pld"]) == (by_hand.rdp, by_hand.pld)
    assert 4.9 < row["epsilon_spent"] <= row["epsilon_target"] == 5.0
    # The linear model of 8 by 8 digits has 650 weights.
    assert row["noise_to_signal"] == pytest.approx(noise * 650**0.5 / 1.5)
    assert (alone["epsilon_spent"], alone["num_noised"], alone["noise_to_signal"]) == (0.0, 0, 0.0)
    assert (summary["privacy"]["unit"], summary["privacy"]["claim"]) == ("user", "formal-conditional")
    # Local training releases nothing, so both together cost what one does.
    assert summary["privacy"]["composed"]["epsilon"] == row["epsilon_spent"]
    personal = [user["personal"]["fed_avg"] for user in summary["users"]]
    assert row["mean"] == pytest.approx(sum(personal) / 3)
    assert [user["id"] for user in summary["users"]] == list(method.clients.client_ids)
    table = summary_table(summary)
    assert "mean over users" in table
    assert "3 users; each method spent at most 5 of epsilon, at delta 0.001" in table
    page = page_of(config)
    assert "of 3 users better" in page
    assert "divides by the constant 1.5" in page


def test_user_level_runs_compose_with_those_they_replace(experiment):
    config, once = evaluate_users(experiment, algorithms={"fed_avg": {}}, export__algorithm="fed_avg")
    _, twice = evaluate_users(experiment, algorithms={"fed_avg": {}}, export__algorithm="fed_avg")
    (release, _) = all_releases(config.clients_folder.parent)
    (drawn, entry) = release.ledger.entries
    both = [dp_accounting.SelfComposedDpEvent(entry.event, 12), dp_accounting.SelfComposedDpEvent(drawn.event, 2)]
    by_hand = epsilon_bounds(dp_accounting.ComposedDpEvent(both), 1e-3).best
    assert once["privacy"]["composed"]["methods"] == 1
    assert twice["privacy"]["composed"] == {
        "methods": 2,
        "claim": "formal-conditional",
        "claim_reason": "the number of users is treated as public; random bits are Philox's, which is no cryptographic "
        "generator",
        "epsilon": by_hand,
        "delta": 1e-3,
        "source": "ledger",
    }
    larger = {**USERS_PRIVACY, "budgets": {"kind": "one_for_all", "epsilon": 5.0, "delta": 1e-2}}
    _, thrice = evaluate_users(experiment, algorithms={"fed_avg": {}}, export__algorithm="fed_avg", privacy=larger)
    assert thrice["privacy"]["composed"]["delta"] == 1e-2


@pytest.mark.parametrize("first", ["silos", "users"])
def test_runs_that_protect_different_things_have_no_common_figure(experiment, first):
    kinds = {"silos": experiment(**ONE), "users": experiment(**{**USERS, **ONE})}
    summary = {}
    for kind in sorted(kinds, reverse=first == "users"):
        train(kinds[kind], "fed_avg", overwrite=True, progress=False)
        summary = evaluate_experiment(kinds[kind])
    composed = summary["privacy"]["composed"]
    assert (composed["methods"], composed["claim"], composed["epsilon"]) == (2, "none", None)
    assert "protect different things" in composed["claim_reason"]


def test_users_without_noise_or_under_a_known_seed_get_no_claim(experiment):
    bare = {"kind": "none", "unit": "user", "batch_size": 16, "users_per_round": 1.5}
    for name, overrides in (("bare", {"privacy": bare}), ("seeded", {"training__test_only_seed": 1})):
        config, summary = evaluate_users(experiment, name=name, **overrides)
        json.dumps(summary, allow_nan=False)
        assert summary["privacy"]["claim"] == "none"
        assert "not private" in page_of(config).lower()
        summary_table(summary)
        method, state = load_trained(config, "fed_avg")
        state.client_states.close()
        report = _privacy_report(config, method, state)
        json.dumps(report, allow_nan=False)
        assert report["claim"] == "none"
        assert "joint differential privacy" not in report["personal_models"]


def test_noise_that_drowns_what_is_learnt_is_noted(experiment):
    tight = {**USERS_PRIVACY, "budgets": {"kind": "one_for_all", "epsilon": 0.1, "delta": 1e-3}}
    config, summary = evaluate_users(experiment, privacy=tight, algorithms={"fed_avg": {}})
    (note,) = summary["notes"]
    assert note.startswith("FedAvg: The noise on a round's mean is about")
    assert note in html.unescape(page_of(config))
    assert f"note: {note}" in summary_table(summary)


def test_sums_are_described_as_they_are_planned(experiment):
    def described(noise, **others):
        config = experiment(**{**USERS, "privacy": {**USERS_PRIVACY, "user_noise": noise}, **others})
        method = build_method(config, "fed_avg")
        return method, user_sums(config, [(build_method(config, "local_only"), None), (method, None)])

    method, sums = described({"kind": "adaptive_clip", "quantile": 0.8, "count_stddev": 2.0})
    total = method.plan.mechanism.noise_multiplier
    assert (sums.quantile, sums.count_stddev, sums.noise_multiplier) == (0.8, 3.0, total)
    assert sums.sum_noise_multiplier == pytest.approx((total**-2 - 6.0**-2) ** -0.5)
    assert (sums.rounds_per_tree, sums.is_constant, sums.weight_cap, sums.own_support) == (None, False, None, ())
    _, sums = described({"kind": "tree"})
    assert (sums.rounds_per_tree, sums.quantile) == (2, None)
    capped = {"training__weighting": "paper_capped_num_examples", "training__weight_cap": 10}
    _, sums = described({"kind": "fixed_clip"}, **capped)
    assert sums.weight_cap == 10
