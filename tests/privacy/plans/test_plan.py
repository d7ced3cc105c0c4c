import math

import dp_accounting
import numpy as np
import pytest

from tests.rounding import gamma
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import calibrate_noise_multiplier, epsilon_bounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent
from tff_pdp.privacy.accounting.grid_distance import GridNoiseDpEvent, grid_distance
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.plans.plan import DRAWN_NOISE, PlannedTraining
from tff_pdp.privacy.plans.silo_example import SiloExample
from tff_pdp.privacy.plans.unprotected import without_privacy
from tff_pdp.settings import read_settings

SIZES = {"a": 100, "b": 40, "c": 10}
BUDGETS = {"kind": "by_silo", "delta": 1e-4, "silos": {"a": 1, "b": 4, "c": 8}}
SETTINGS = {"kind": "silo_example", "batch_size": 20, "clip_norm": 1.5, "budgets": BUDGETS}


def read(**changes):
    return read_settings(SiloExample, {**SETTINGS, **changes}, "test", "privacy")


def for_all(epsilon, delta=1e-4):
    return {"kind": "one_for_all", "epsilon": epsilon, "delta": delta}


def each(value):
    return dict.fromkeys(SIZES, value)


@pytest.fixture(scope="module")
def plan():
    return read().build(PlannedTraining(SIZES, gradients_per_round=each(2), rounds=10))


def test_each_silo_has_its_own_mechanism(plan):
    rates = {client_id: mechanism.sampling_rate for client_id, mechanism in plan.mechanisms.items()}
    assert rates == pytest.approx({"a": 0.2, "b": 0.5, "c": 1.0}, abs=2**-23)
    # What is accounted is what is computed with: rates on the sampler's grid, noise in float32, both on the safe side.
    assert all(rate >= exact for rate, exact in zip(rates.values(), (0.2, 0.5, 1.0), strict=True))
    assert all(rate * 2**23 == int(rate * 2**23) for rate in rates.values())
    for mechanism in plan.mechanisms.values():
        assert float(np.float32(mechanism.noise_multiplier)) == mechanism.noise_multiplier
        assert float(np.float32(mechanism.sampling_rate)) == mechanism.sampling_rate
    batches = {client_id: mechanism.expected_batch_size for client_id, mechanism in plan.mechanisms.items()}
    assert batches == pytest.approx({"a": 20.0, "b": 20.0, "c": 10.0}, abs=2**-23 * max(SIZES.values()))


def test_a_delta_that_lets_one_record_be_published_is_refused():
    config = read(batch_size=10, budgets=for_all(4, 0.05))
    with pytest.raises(ConfigError, match="'a' is not below 1 / 100"):
        config.build(PlannedTraining(SIZES, gradients_per_round=each(1), rounds=1))


def test_the_planned_rounds_spend_at_most_the_budget_and_no_round_more_is_possible(plan):
    ledger = plan.build_ledger()
    for number in range(1, 11):
        plan.charge_round(ledger, number)
    for client_id, budget in plan.budgets.items():
        assert 0.98 * budget.epsilon < ledger.epsilon(client_id).best <= budget.epsilon
    before = ledger.to_json()
    with pytest.raises(BudgetError):
        for _ in range(5):
            plan.charge_round(ledger, 10)
    spent = {client_id: ledger.epsilon(client_id).best for client_id in plan.budgets}
    assert all(spent[client_id] <= budget.epsilon for client_id, budget in plan.budgets.items())
    assert len(ledger.to_json()) >= len(before)


def test_budgets_can_be_read_where_silos_upload(plan):
    assert plan.budget_exposure(has_releases=True) == "inferable"
    assert plan.budget_exposure(has_releases=False) == "none"


def test_twice_the_gradients_need_more_noise(plan):
    twice = read().build(PlannedTraining(SIZES, gradients_per_round=each(4), rounds=10))
    for client_id in SIZES:
        assert twice.mechanisms[client_id].noise_multiplier > plan.mechanisms[client_id].noise_multiplier


def test_an_impossible_budget_names_the_silo():
    budgets = {"kind": "by_silo", "delta": 1e-9, "default_epsilon": 4, "silos": {"b": 1e-7}}
    config = read(batch_size=10, budgets=budgets)
    with pytest.raises(BudgetError, match="'b'"):
        config.build(PlannedTraining(SIZES, gradients_per_round=each(100), rounds=1000))


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf])
def test_a_clip_that_bounds_nothing_is_refused(clip_norm):
    with pytest.raises(ConfigError, match=rf"privacy\.clip_norm must be a number above 0, not {clip_norm}"):
        read(clip_norm=clip_norm)


def test_without_privacy_nothing_is_clipped_noised_or_claimed():
    plan = without_privacy(read()).build(PlannedTraining(SIZES, gradients_per_round=each(1), rounds=1))
    assert plan.claim == "none"
    assert plan.build_ledger() is None
    assert plan.budget_exposure(has_releases=True) == "none"
    assert {mechanism.noise_multiplier for mechanism in plan.mechanisms.values()} == {0.0}
    assert {mechanism.clip_norm for mechanism in plan.mechanisms.values()} == {math.inf}


def test_silos_with_more_local_steps_get_more_noise():
    config = read(budgets=for_all(2))
    sizes = {"a": 100, "b": 100}
    plan = config.build(PlannedTraining(sizes, gradients_per_round={"a": 1, "b": 4}, rounds=5))
    assert plan.mechanisms["b"].noise_multiplier > plan.mechanisms["a"].noise_multiplier
    ledger = plan.build_ledger()
    plan.charge_round(ledger, 1)
    assert {entry.scope: entry.count for entry in ledger.entries} == {"a": 1, "b": 4}


def test_selections_are_charged_in_their_rounds_and_paid_for_by_more_noise(plan):
    without = plan
    given = {"gradients_per_round": each(2), "rounds": 10}
    plan = read().build(PlannedTraining(SIZES, **given, selection_rounds=3))
    for client_id, epsilon in (("a", 1.0), ("b", 4.0), ("c", 8.0)):
        assert plan.selection_epsilons[client_id] == np.float32(0.03 * epsilon)
        fixed = [dp_accounting.SelfComposedDpEvent(ExponentialMechanismDpEvent(float(np.float32(0.03 * epsilon))), 3)]
        mechanism = plan.mechanisms[client_id]
        expected = calibrate_noise_multiplier(epsilon, 1e-4, mechanism.sampling_rate, 20, fixed)
        # To a number of float32, on the safe side.
        assert mechanism.noise_multiplier == pytest.approx(expected, rel=gamma(2))
        assert mechanism.noise_multiplier > without.mechanisms[client_id].noise_multiplier
        epsilons = [plan.selection_epsilon(client_id, number) for number in range(1, 11)]
        assert epsilons == [np.float32(0.03 * epsilon)] * 3 + [0.0] * 7
    ledger = plan.build_ledger()
    for number in range(1, 11):
        plan.charge_round(ledger, number)
    selections = {e.scope: e.count for e in ledger.entries if e.reason == "private cluster selection"}
    assert selections == each(3)
    for client_id, budget in plan.budgets.items():
        assert 0.98 * budget.epsilon < ledger.epsilon(client_id).best <= budget.epsilon


def test_what_was_released_before_training_is_in_the_ledger_and_in_the_noise(plan):
    without = plan
    statistics = dp_accounting.GaussianDpEvent(5.0)
    given = {"gradients_per_round": each(2), "rounds": 10}
    fixed_events = {"a": ((statistics, "mean of each feature"),)}
    plan = read().build(PlannedTraining(SIZES, **given, fixed_events=fixed_events))
    assert plan.mechanisms["a"].noise_multiplier > without.mechanisms["a"].noise_multiplier
    assert plan.mechanisms["b"] == without.mechanisms["b"]
    assert [(e.scope, e.event, e.count, e.reason) for e in plan.build_ledger().entries] == [
        ("a", statistics, 1, "mean of each feature")
    ]


def test_with_given_noise_a_silo_leaves_after_the_last_round_its_budget_pays_for():
    config = read(noise_multiplier=3.0)
    plan = config.build(PlannedTraining(SIZES, gradients_per_round=each(2), rounds=60))
    ledger = plan.build_ledger()
    for number in range(1, 61):
        plan.charge_round(ledger, number)
    for client_id, budget in plan.budgets.items():
        last = plan.last_rounds[client_id]
        assert plan.takes_part(client_id, last) and not plan.takes_part(client_id, last + 1)
        assert sum(entry.count for entry in ledger.entries if entry.scope == client_id) == 2 * last
        rate = plan.mechanisms[client_id].sampling_rate

        def cost(rounds, rate=rate):
            return epsilon_bounds(poisson_gaussian_event(rate, 3.0, 2 * rounds), 1e-4).best

        assert cost(last) <= budget.epsilon
        assert last == 60 or cost(last + 1) > budget.epsilon
    assert len(set(plan.last_rounds.values())) > 1, "all left together: this test shows nothing"


def test_claims():
    def build(changes=None, **given):
        # One silo: a plan's claim is that of all.
        config = read(budgets=for_all(8), **(changes or {}))
        return config.build(PlannedTraining({"c": 10}, gradients_per_round={"c": 1}, rounds=1, **given))

    def claim(changes=None, **given):
        return build(changes, **given).claim

    assert claim() == "formal-conditional"
    assert claim(num_examples_are_noised=True) == "formal-conditional"
    assert claim(unsound="features were standardised") == "none"
    assert claim({"sampler": "paper_shuffled"}, num_examples_are_noised=True) == "none"
    for given in ({}, {"num_examples_are_noised": True}):
        safe = build({"generator": "chacha20"}, **given)
        assert (safe.claim, safe.generator) == ("formal-conditional", "chacha20")
        assert "generator" not in safe.claim_reason
        assert "an example's gradient is taken not to depend, to the last bit, on the others" in safe.claim_reason
        of_bits = "random bits are Philox's, which is no cryptographic generator"
        assert build(**given).claim_reason == f"{safe.claim_reason}; {of_bits}"
    with pytest.raises(ConfigError, match=r"privacy\.generator must be one of chacha20, philox, not 'aes'"):
        build({"generator": "aes"})


def test_noise_that_is_drawn_a_third_time_costs_once_more():
    """Planned is that all rounds are run twice."""
    training = PlannedTraining(SIZES, gradients_per_round=each(2), rounds=10, num_parameters=1001)
    plan = read().build(training)
    ledger = plan.build_ledger()
    assert plan.with_noise_drawn_anew(ledger, 1) is ledger
    assert plan.with_noise_drawn_anew(None, 2) is None
    more = plan.with_noise_drawn_anew(ledger, 2)
    for scope, event in plan.drawn_noise.items():
        drawn = [one.event.values for one in more.entries if one.scope == scope and one.reason == DRAWN_NOISE]
        assert drawn == [event.values, event.values / 2]
    assert len(ledger.entries) < len(more.entries)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sampler", "shuffled"), ("selection_share", 1.0), ("noise_multiplier", 0.0), ("selection_loss_bound", -1.0)],
)
def test_parameters_out_of_range_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"privacy\.{key} must be .*, not {value!r}"):
        read(**{key: value})


def test_a_silo_that_leaves_early_pays_only_for_the_selections_it_makes():
    config = read(noise_multiplier=4.0, budgets=for_all(1.0, 1e-5))
    given = {"gradients_per_round": {"a": 16}, "rounds": 400}
    without = config.build(PlannedTraining({"a": 1000}, **given)).last_rounds["a"]
    always = config.build(PlannedTraining({"a": 1000}, **given, selection_rounds=400))
    assert 0 < always.last_rounds["a"] < without
    ledger = always.build_ledger()
    for number in range(1, 401):
        always.charge_round(ledger, number)
    counts = {entry.reason: entry.count for entry in ledger.entries}
    assert counts["private cluster selection"] == always.last_rounds["a"]
    assert 0.95 < ledger.epsilon("a").best <= 1.0


def test_budgets_that_pay_for_no_round_at_all_are_refused():
    config = read(noise_multiplier=0.1)
    with pytest.raises(BudgetError, match="single round"):
        config.build(PlannedTraining(SIZES, gradients_per_round=each(2), rounds=5))


def test_what_is_left_of_a_plan_is_checked_once(plan, monkeypatch):
    ledger = plan.build_ledger()
    for number in range(1, 4):
        plan.charge_round(ledger, number)
    resumed = type(ledger).from_json(ledger.to_json())
    plan.precheck_rest(resumed)
    monkeypatch.setattr(type(resumed), "_bounds", None)
    for number in range(4, 11):
        plan.charge_round(resumed, number)


@pytest.mark.parametrize("num_parameters", [1, 999, 1000, 10**7])
def test_noise_on_a_grid_is_charged_once_and_paid_for_by_more_noise(plan, num_parameters):
    planned = PlannedTraining(SIZES, gradients_per_round=each(2), rounds=10, num_parameters=num_parameters)
    drawn = read().build(planned)
    # Pairs of values, of two gradients in each of ten rounds, drawn twice at most.
    event = GridNoiseDpEvent(2 * 2 * math.ceil(num_parameters / 2) * 2 * 10)
    assert drawn.drawn_noise == each(event)
    for client_id, budget in drawn.budgets.items():
        mechanism, ideal = drawn.mechanisms[client_id], plan.mechanisms[client_id]
        assert ideal.noise_multiplier < mechanism.noise_multiplier < 1.005 * ideal.noise_multiplier
        # What the distance leaves of the budget, for a rough epsilon that is at most a half above it.
        share = 2.0**-10 * budget.delta
        masses = (1.0 + epsilon + math.log(4.04 / share) for epsilon in (0.95 * budget.epsilon, 1.5 * budget.epsilon))
        wanted = [
            calibrate_noise_multiplier(
                budget.epsilon - 2 * distance, (budget.delta - share) * math.exp(-distance), mechanism.sampling_rate, 20
            )
            for distance in (grid_distance(event.values, log_mass) for log_mass in masses)
        ]
        # Two calibrations, each of which finds the noise's logarithm to 1e-5.
        assert wanted[0] * (1 - 3e-5) <= mechanism.noise_multiplier <= wanted[1] * (1 + 3e-5)
    ledger = drawn.build_ledger()
    assert [(e.scope, e.event, e.count, e.reason) for e in ledger.entries] == [
        (client_id, event, 1, DRAWN_NOISE) for client_id in SIZES
    ]
    for number in range(1, 11):
        drawn.charge_round(ledger, number)
    for client_id, budget in drawn.budgets.items():
        assert 0.98 * budget.epsilon < ledger.epsilon(client_id).best <= budget.epsilon
        assert sum(entry.reason == DRAWN_NOISE for entry in ledger.entries if entry.scope == client_id) == 1


def test_a_ledger_that_was_begun_without_the_distance_is_charged_with_it_before_the_next_round():
    planned = PlannedTraining(SIZES, gradients_per_round=each(2), rounds=10, num_parameters=10)
    plan = read().build(planned)
    ledger = Ledger(plan.unit, plan.adjacency, plan.budgets)
    plan.precheck_rest(ledger)
    plan.charge_round(ledger, 1)
    assert [entry.reason for entry in ledger.entries[:3]] == [DRAWN_NOISE] * 3


def test_noise_that_is_much_louder_than_the_signal_is_warned_of_before_training():
    def plan_of(num_parameters):
        training = PlannedTraining(SIZES, each(1), rounds=10, num_parameters=num_parameters)
        return read(budgets=for_all(1), noise_multiplier=2.0).build(training)

    # z sqrt(d) / qn: 2 * 100 / 20 is exactly the limit for two silos, and the third has batches of 10.
    at_limit = plan_of(100**2)
    ratios = {client_id: at_limit.client_facts(client_id)["noise_to_signal"] for client_id in SIZES}
    assert ratios == pytest.approx({"a": 10.0, "b": 10.0, "c": 20.0}, rel=1e-5)
    assert plan_of(40**2).warning == ""
    warning = plan_of(120**2).warning
    assert warning.startswith("In 3 of 3 silos the noise on a step's mean gradient is more than 10 times as long")
    assert "most in 'c', 24 times (z sqrt(d) / qn, with z = 2, d = 14,400 weights, qn = 10 examples)" in warning
    without = without_privacy(read()).build(PlannedTraining(SIZES, each(1), rounds=10, num_parameters=10**6))
    assert without.warning == ""
