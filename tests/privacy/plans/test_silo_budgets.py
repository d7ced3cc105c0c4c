"""Budgets that differ between silos: noise for the least budget, weights by budgets, and labels of a formula."""

import math

import numpy as np
import pytest

from tff_pdp.data.manifest import RowInfluence
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import next_float32
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.calibration import asymptotic_noise_multiplier
from tff_pdp.privacy.plans.contact_graph import ContactGraph
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.settings import read_settings
from tff_pdp.testing import check_plan

SIZES = {"a": 200, "b": 200, "c": 200}
BUDGETS = {"kind": "by_silo", "delta": 1e-4, "silos": {"a": 1, "b": 4, "c": {"epsilon": 8, "delta": 1e-6}}}
SETTINGS = {"kind": "silo_example", "batch_size": 20, "budgets": BUDGETS}
ROUNDS, STEPS = 10, 3


def planned(sizes=SIZES, **others):
    return PlannedTraining(sizes, gradients_per_round=dict.fromkeys(sizes, STEPS), rounds=ROUNDS, **others)


def build(training=None, settings_class=SiloExample, **changes):
    level = changes.pop("level", "own")
    settings = {**SETTINGS, **changes}
    settings["budgets"] = {**settings["budgets"], "level": level}
    return read_settings(settings_class, settings, "test", "privacy").build(training or planned())


def test_with_level_minimum_every_silo_has_the_noise_of_the_least_budget():
    own, least = build(), build(level="minimum")
    assert least.budgets == own.budgets, "a silo's own budget stays its cap"
    z = {client_id: mechanism.noise_multiplier for client_id, mechanism in least.mechanisms.items()}
    assert z["a"] == z["b"] == own.mechanisms["a"].noise_multiplier
    # The third has the epsilon of the first, and a smaller delta of its own.
    assert z["c"] > z["a"] > own.mechanisms["b"].noise_multiplier
    ledger = least.build_ledger()
    for number in range(1, ROUNDS + 1):
        least.charge_round(ledger, number)
    spent = {client_id: ledger.epsilon(client_id).best for client_id in least.budgets}
    assert all(0.98 < epsilon <= 1 for epsilon in spent.values())
    assert {one: ledger.budgets[one].epsilon for one in SIZES} == {"a": 1, "b": 4, "c": 8}
    assert least.planned_epsilon() <= 1


def test_selections_too_cost_a_share_of_the_least_budget():
    plan = build(planned(selection_rounds=2), level="minimum")
    assert set(plan.selection_epsilons.values()) == {float(np.float32(0.03))}


def test_a_contact_graph_has_the_same_levels():
    budgets = {"kind": "cycled", "epsilons": [1, 4, 8], "delta": 1e-4}
    training = planned(row_influence=RowInfluence("node", "replace_one", 3, "nobody has more than 2 contacts"))
    given = {"kind": "contact_graph", "budgets": budgets}
    own, least = (build(training, ContactGraph, level=level, **given) for level in ("own", "minimum"))
    assert own.budgets == least.budgets
    assert {one.noise_multiplier for one in least.mechanisms.values()} == {own.mechanisms["a"].noise_multiplier}


def test_a_level_and_noise_are_not_both_given():
    with pytest.raises(ConfigError, match=r"level minimum sets the noise: leave out privacy\.noise_multiplier"):
        build(level="minimum", noise_multiplier=2.0)


def test_silos_count_by_their_amounts_among_those_that_take_part():
    plan = build(noise_multiplier=1.0)
    gone = [client_id for client_id, last in plan.last_rounds.items() if last < ROUNDS]
    assert gone == ["a"]
    amounts = {"a": 0.125, "b": 0.5, "c": 1.0}
    last = plan.weights(amounts, ["b", "c"], 1, ROUNDS)
    np.testing.assert_array_equal(last, [0.5 / 0.75, 1 / 0.75])
    equal = plan.weights(dict.fromkeys(SIZES, 1.0), list(SIZES), 1, 1)
    np.testing.assert_array_equal(equal, 1.0)


def test_labels_of_the_formula_are_replaced_by_true_epsilons():
    plan = build(planned(num_parameters=50), noise_calibration="paper_asymptotic")
    assert plan.claim == "formal-conditional"
    assert plan.labels == {"a": 1, "b": 4, "c": 8}
    for client_id, budget in plan.budgets.items():
        mechanism, label = plan.mechanisms[client_id], plan.labels[client_id]
        q, delta = mechanism.sampling_rate, budget.delta
        assert budget.delta == (1e-6 if client_id == "c" else 1e-4)
        by_formula = 10 * q * math.sqrt(ROUNDS * STEPS * -math.log10(delta)) / label
        assert mechanism.noise_multiplier == next_float32(asymptotic_noise_multiplier(label, delta, q, ROUNDS * STEPS))
        assert mechanism.noise_multiplier == pytest.approx(by_formula, rel=1e-6)
        # The whole training, the charge for drawn noise included, costs the budget, which has four digits.
        ledger = plan.build_ledger()
        ledger.append(client_id, plan.training_event(client_id))
        spent = ledger.epsilon(client_id).best
        assert spent <= budget.epsilon <= spent * (1 + 1.2e-3)
        assert float(f"{budget.epsilon:.3e}") == budget.epsilon
        assert plan.client_facts(client_id)["noise_label"] == label
        assert f"{label:g} is truly {budget.epsilon:g} (1 silo)" in plan.warning
    assert "noise_label" not in build().client_facts("a") and build().warning == ""


def test_labels_keep_the_rules_of_plans():
    for level in ("own", "minimum"):
        budgets = {"kind": "one_for_all", "epsilon": 3, "delta": 1e-4, "level": level}
        check_plan(SiloExample, {"batch_size": 8, "budgets": budgets, "noise_calibration": "paper_asymptotic"})


def test_other_releases_are_part_of_the_true_epsilon():
    alone, more = (
        build(planned(selection_rounds=rounds), noise_calibration="paper_asymptotic") for rounds in (0, ROUNDS)
    )
    assert more.mechanisms == alone.mechanisms, "the formula has no place for them"
    assert all(more.budgets[one].epsilon > alone.budgets[one].epsilon for one in SIZES)


def test_with_level_minimum_budgets_are_those_of_the_silos_own_labels():
    own, least = (build(noise_calibration="paper_asymptotic", level=level) for level in ("own", "minimum"))
    assert (least.budgets, least.labels) == (own.budgets, own.labels)
    assert least.mechanisms["b"] == own.mechanisms["a"]
    assert least.build_ledger() is not None


def test_a_warning_counts_silos_of_equal_label_and_lists_a_few():
    sizes = {f"silo_{number:02}": 200 for number in range(10)}
    two = {"kind": "cycled", "epsilons": [1, 4], "delta": 1e-4}
    plan = build(planned(sizes), noise_calibration="paper_asymptotic", budgets=two)
    assert plan.warning.count("(5 silos)") == 2 and "paper_asymptotic" in plan.warning
    many = {**two, "epsilons": [1 + number / 4 for number in range(10)]}
    warning = build(planned(sizes), noise_calibration="paper_asymptotic", budgets=many).warning
    assert warning.endswith(", and 4 more")
    # The largest labels, whose true epsilons may be above them, come first.
    assert "the true epsilons: 3.25 is truly" in warning and "1 is truly" not in warning


def test_an_infinite_label_asks_for_no_noise():
    budgets = {**BUDGETS, "silos": {"a": math.inf, "b": 4, "c": math.inf}}
    plan = build(noise_calibration="paper_asymptotic", budgets=budgets)
    assert plan.clients_without_noise() == ["a", "c"]
    assert plan.budgets["a"] == SiloBudget(math.inf, 1e-4)
    assert "inf" not in plan.warning and "4 is truly" in plan.warning


@pytest.mark.parametrize(
    ("changes", "training", "error", "message"),
    [
        ({"noise_multiplier": 2.0}, {}, ConfigError, "leave out privacy.noise_multiplier"),
        ({}, {"num_examples_are_noised": True}, ConfigError, "needs public numbers of examples"),
        ({"sampler": "paper_shuffled"}, {}, ConfigError, "needs sampler poisson, not paper_shuffled"),
        (
            {"budgets": {"kind": "one_for_all", "epsilon": 40, "delta": 1e-4}},
            {"num_parameters": 50},
            BudgetError,
            r"silo 'a': the noise .* chooses for epsilon 40 has a true epsilon of \d+, too large for any claim",
        ),
    ],
)
def test_what_makes_labels_false_is_refused(changes, training, error, message):
    with pytest.raises(error, match=message):
        build(planned(**training), noise_calibration="paper_asymptotic", **changes)


def test_the_true_epsilon_may_be_above_the_label():
    """The released code's 6000 records, batches of 4, and 80 rounds of 100 steps."""
    training = PlannedTraining({"a": 6000}, gradients_per_round={"a": 100}, rounds=80, num_parameters=50)
    budgets = {"kind": "one_for_all", "epsilon": 3, "delta": 1e-5}
    plan = build(training, noise_calibration="paper_asymptotic", batch_size=4, budgets=budgets)
    assert plan.budgets["a"].epsilon == pytest.approx(6.1, rel=0.02)
    assert "3 is truly 6.1" in plan.warning
