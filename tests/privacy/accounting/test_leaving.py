import math

import dp_accounting
import pytest

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    epsilon_bounds,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.calibration import rounds_within_budget
from tff_pdp.privacy.accounting.ledger import Ledger

ROUND = poisson_gaussian_event(0.2, 2.0, 2)
FIXED = [dp_accounting.GaussianDpEvent(8.0), dp_accounting.LaplaceDpEvent(10.0)]


def linear_scan(budget, round_event, fixed_events, rounds):
    fitting = 0
    for count in range(1, rounds + 1):
        released = dp_accounting.ComposedDpEvent([*fixed_events, *[round_event] * count])
        if epsilon_bounds(released, budget.delta).best > budget.epsilon:
            break
        fitting = count
    return fitting


@pytest.mark.parametrize("fixed", [pytest.param([], marks=pytest.mark.all), FIXED])
def test_bisection_finds_what_a_linear_scan_finds(fixed):
    for epsilon in (0.5, 1.0, 1.8):
        budget = SiloBudget(epsilon, 1e-5)
        assert rounds_within_budget(budget, ROUND, iter(fixed), 9) == linear_scan(budget, ROUND, fixed, 9)


def test_gaussian_sums_by_hand():
    # Four sums with a multiplier of 8 are one with 4, and 3.73 is what epsilon 1 asks for; five are one with 3.58.
    event = dp_accounting.GaussianDpEvent(8.0)
    assert rounds_within_budget(SiloBudget(1.0, 1e-5), event, [], 100) == 4
    # Another two are spent before: 8 / sqrt(2) = 5.657.
    assert rounds_within_budget(SiloBudget(1.0, 1e-5), event, [dp_accounting.GaussianDpEvent(5.657)], 100) == 2


def test_a_larger_budget_never_means_fewer_rounds():
    found = [rounds_within_budget(SiloBudget(0.25 * step, 1e-5), ROUND, FIXED, 10) for step in range(1, 12)]
    assert found == sorted(found)
    assert found[0] == 0 and found[-1] == 10 and len(set(found)) > 5


def test_the_rounds_that_the_noise_was_calibrated_for_all_fit():
    noise_multiplier = calibrate_noise_multiplier(1.0, 1e-5, 0.2, 40, FIXED)
    event = poisson_gaussian_event(0.2, noise_multiplier, 4)
    assert rounds_within_budget(SiloBudget(1.0, 1e-5), event, FIXED, 10) == 10
    assert rounds_within_budget(SiloBudget(1.0, 1e-5), event, FIXED, 20) == 10


def test_a_ledger_accepts_these_rounds_and_not_one_more():
    budget = SiloBudget(1.0, 1e-5)
    rounds = rounds_within_budget(budget, ROUND, FIXED, 100)
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a": budget})
    for event in FIXED:
        ledger.append("a", event)
    for _ in range(rounds):
        ledger.append("a", ROUND)
    with pytest.raises(BudgetError):
        ledger.append("a", ROUND)


def test_the_ends_of_the_range():
    small, free = SiloBudget(0.01, 1e-5), SiloBudget(math.inf, 1e-5)
    assert rounds_within_budget(small, ROUND, [], 10) == 0
    assert rounds_within_budget(SiloBudget(1.0, 1e-5), ROUND, [dp_accounting.GaussianDpEvent(0.5)], 10) == 0
    assert rounds_within_budget(small, ROUND, [], 0) == 0
    assert rounds_within_budget(free, dp_accounting.NonPrivateDpEvent(), [], 10) == 10
    assert rounds_within_budget(small, dp_accounting.NoOpDpEvent(), [], 10) == 10
    for rounds in (-1, 2.5):
        with pytest.raises(ConfigError, match="rounds is"):
            rounds_within_budget(small, ROUND, [], rounds)


def test_the_adjacency_is_that_of_the_events():
    with pytest.raises(BudgetError, match="replace_one"):
        rounds_within_budget(SiloBudget(1.0, 1e-5), ROUND, [], 10, Adjacency.REPLACE_ONE)
