import math

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import amount
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting import ledger as ledger_module
from tff_pdp.privacy.accounting.accountants import Adjacency, calibrate_noise_multiplier, epsilon_bounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent, poisson_gaussian_event
from tff_pdp.privacy.accounting.ledger import Ledger, LedgerEntry, compose_parts

STEP = poisson_gaussian_event(0.1, 2.0, 1)
OTHER = poisson_gaussian_event(1.0, 20.0, 1)


def build(epsilon=2.0, scopes=("a",)):
    return Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {scope: SiloBudget(epsilon, 1e-5) for scope in scopes})


@pytest.fixture
def count_accounting(monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return epsilon_bounds(*arguments)

    monkeypatch.setattr(ledger_module, "epsilon_bounds", counted)
    return calls


def test_refuses_before_overspending_and_records_nothing():
    ledger = build(epsilon=1.0)
    ledger.append("a", STEP, 10, "training")
    spent = ledger.epsilon("a").best
    with pytest.raises(BudgetError, match=r"Silo 'a' would overspend.*spent.*epsilon=1 at delta=1e-05"):
        ledger.append("a", STEP, 1000, "training")
    with pytest.raises(BudgetError):
        ledger.precheck("a", {dp_accounting.NonPrivateDpEvent(): 1})
    assert ledger.entries == (LedgerEntry("a", STEP, 10, "training"),)
    assert ledger.epsilon("a").best == spent < 1.0


def test_stepwise_charging_stops_exactly_where_the_budget_ends():
    ledger, steps = build(epsilon=0.8), 0
    with pytest.raises(BudgetError):
        for _ in range(10_000):
            ledger.append("a", STEP, 1, "training")
            steps += 1

    def cost(count):
        return epsilon_bounds(dp_accounting.SelfComposedDpEvent(STEP, count), 1e-5).best

    assert cost(steps) <= 0.8 < cost(steps + 1)
    assert ledger.epsilon("a").best == cost(steps)


def test_calibrated_plan_fits_exactly_and_one_more_step_does_not():
    noise = calibrate_noise_multiplier(1.0, 1e-5, 0.2, 60, [ExponentialMechanismDpEvent(0.1)])
    event, ledger = poisson_gaussian_event(0.2, noise, 1), build(epsilon=1.0)
    ledger.append("a", event, 20, "warm start")
    ledger.append("a", ExponentialMechanismDpEvent(0.1), 1, "selection")
    ledger.append("a", event, 40, "training")
    with pytest.raises(BudgetError):
        ledger.precheck("a", {event: 1})


def test_verified_plan_needs_no_accounting_per_round(count_accounting):
    ledger = build(epsilon=4.0)
    ledger.precheck("a", {STEP: 100})
    after_plan = len(count_accounting)
    for _ in range(100):
        ledger.precheck("a", {STEP: 1})
        ledger.append("a", STEP, 1, "training")
    assert len(count_accounting) == after_plan == 1


@pytest.mark.all
def test_unplanned_alternating_events_need_little_accounting(count_accounting):
    ledger = build(epsilon=20.0)
    for _ in range(32):
        ledger.append("a", STEP, 1, "training")
        ledger.append("a", OTHER, 1, "statistics")
    assert len(count_accounting) < 40


def test_another_event_uses_up_a_verified_plan():
    ledger = build(epsilon=epsilon_bounds(dp_accounting.SelfComposedDpEvent(STEP, 20), 1e-5).best)
    ledger.precheck("a", {STEP: 20})
    with pytest.raises(BudgetError):
        ledger.precheck("a", {STEP: 21})
    ledger.append("a", OTHER, 1, "statistics")
    with pytest.raises(BudgetError):
        ledger.precheck("a", {STEP: 20})


def test_repetitions_merge_for_each_scope_and_reason():
    ledger = build(scopes=("a", "b"))
    for _ in range(3):
        ledger.append("a", STEP, 2, "training")
        ledger.append("b", STEP, 1, "training")
    ledger.append("a", STEP, 1, "adaptation")
    ledger.append("a", STEP, 0, "nothing")
    assert [(e.scope, e.count, e.reason) for e in ledger.entries] == [
        ("a", 6, "training"),
        ("b", 3, "training"),
        ("a", 1, "adaptation"),
    ]


EVENTS = st.one_of(
    st.builds(poisson_gaussian_event, st.floats(0.001, 0.3), st.floats(8, 40), st.just(1)),
    st.just(dp_accounting.ComposedDpEvent([OTHER, STEP])),
    st.just(dp_accounting.LaplaceDpEvent(30.0)),
    st.just(ExponentialMechanismDpEvent(0.01)),
)


@settings(max_examples=amount(test=2, all=6), deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), EVENTS, st.integers(1, 3)), max_size=4))
def test_json_round_trip_is_exact(releases):
    ledger = build(epsilon=50.0, scopes=("a", "b"))
    for scope, event, count in releases:
        ledger.append(scope, event, count, "test")
    restored = Ledger.from_json(ledger.to_json())
    assert restored.entries == ledger.entries
    assert restored.to_json() == ledger.to_json()
    assert restored.epsilons() == ledger.epsilons() == {scope: ledger.epsilon(scope) for scope in ("a", "b")}
    assert (restored.unit, restored.adjacency, restored.budgets) == (ledger.unit, ledger.adjacency, ledger.budgets)


def test_restored_ledger_goes_on_refusing():
    ledger = build(epsilon=1.0)
    ledger.append("a", STEP, 10, "training")
    restored = Ledger.from_json(ledger.to_json())
    restored.append("a", STEP, 1, "training")
    assert [entry.count for entry in restored.entries] == [11]
    with pytest.raises(BudgetError):
        restored.append("a", STEP, 1000, "training")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"unit": "user", "adjacency": "sideways", "budgets": {}}'])
def test_broken_ledgers_are_refused(text):
    with pytest.raises(ConfigError, match="Not a stored privacy ledger"):
        Ledger.from_json(text)


def test_an_event_for_another_adjacency_is_refused():
    ledger = build()
    with pytest.raises(BudgetError, match="No accountant supports SampledWithoutReplacement"):
        ledger.append("a", dp_accounting.SampledWithoutReplacementDpEvent(100, 10, OTHER), 1, "training")
    assert ledger.entries == ()


def test_unknown_scope_and_bad_count():
    with pytest.raises(ConfigError, match="Silo 'z' has no privacy budget"):
        build().precheck("z", {STEP: 1})
    with pytest.raises(ConfigError, match="whole number"):
        build().append("a", STEP, -1, "training")


def test_infinite_budget_never_refuses():
    ledger = build(epsilon=math.inf)
    ledger.append("a", dp_accounting.NonPrivateDpEvent(), 3, "no noise")
    assert ledger.epsilon("a").best == math.inf
    assert Ledger.from_json(ledger.to_json()).budgets == ledger.budgets


def together(ledgers, scope):
    """The cost of everything in several ledgers to one scope."""
    return compose_parts([(ledger, scope) for ledger in ledgers if scope in ledger.budgets])[0]


def test_releasing_several_methods_costs_what_their_union_costs():
    first, second = build(), build()
    first.append("a", STEP, 30, "method one")
    second.append("a", STEP, 30, "method two")
    union = together([first, second], "a")
    assert union == epsilon_bounds(dp_accounting.SelfComposedDpEvent(STEP, 60), 1e-5)
    assert first.epsilon("a").best < union.best < 2 * first.epsilon("a").best
    assert together([first], "a") == first.epsilon("a")
    assert together([first, build(scopes=("b",))], "a") == first.epsilon("a")


def test_ledgers_of_different_kinds_do_not_compose():
    other = Ledger("user", Adjacency.ADD_OR_REMOVE_ONE, {"a": SiloBudget(1.0, 1e-5)})
    with pytest.raises(BudgetError, match="different kinds"):
        together([build(), other], "a")
    with pytest.raises(ConfigError, match="No ledger"):
        together([build()], "z")


def test_the_quick_bound_covers_the_best_one_and_stays_within_the_budget():
    noise = calibrate_noise_multiplier(2.0, 1e-5, 0.1, 200)
    step, ledger = poisson_gaussian_event(0.1, noise, 1), build(epsilon=2.0)
    assert ledger.epsilon_at_most("a") == 0.0
    ledger.precheck("a", {step: 200})
    before = 0.0
    for count in (1, 19, 80, 100):
        ledger.append("a", step, count, "training")
        quick = ledger.epsilon_at_most("a")
        assert max(before, ledger.epsilon("a").best) <= quick <= 2.0
        before = quick
    # Renyi's bound alone is above the budget that the best bound meets.
    assert before == 2.0
    # A ledger that was read has verified nothing, and accounts.
    restored = Ledger.from_json(ledger.to_json())
    assert restored.epsilon_at_most("a") == ledger.epsilon("a").best < 2.0
    with pytest.raises(ConfigError, match="'b' has no privacy budget"):
        ledger.epsilon_at_most("b")


def test_the_quick_bound_is_honest_about_spending_over_the_budget():
    stored = build(epsilon=9.0)
    stored.append("a", STEP, 200, "training")
    over = Ledger.from_json(stored.to_json().replace("9.0", "0.5"))
    assert over.epsilon_at_most("a") == over.epsilon("a").best > 0.5


def test_the_quick_bound_needs_no_accounting_per_round(count_accounting):
    ledger = build(epsilon=4.0)
    ledger.precheck("a", {STEP: 100})
    for _ in range(100):
        ledger.append("a", STEP, 1, "training")
        ledger.epsilon_at_most("a")
    assert len(count_accounting) == 1
