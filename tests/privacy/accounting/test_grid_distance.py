"""What noise on a grid costs: tails by simulation and by hand, the conversion as an inequality, and events."""

import json
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

from tests.rounding import standard_errors
from tff_pdp.privacy.accounting import grid_distance as module
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    epsilon_bounds,
    exact_gaussian_epsilon,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import event_from_dict, event_to_dict
from tff_pdp.privacy.accounting.grid_distance import (
    MOST_STEPS,
    ROUNDING,
    GridNoiseDpEvent,
    grid_distance,
    with_grid_noise,
)
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.repeated_runs import LOGARITHMIC, POISSON, NumberOfRuns, most_runs

# Of a logarithm of a pair's ratio, per unit of its length.
PER_LENGTH = 4.2 * ROUNDING * MOST_STEPS
# Of delta, for ratios that are larger than the distance.
SHARE = 2.0**-10


# --- the distance


def log_ratios(per_length, pairs, runs, rng):
    """Sums of logarithms of the ratio of two laws, under the ideal one: as large as the bound allows, up or down.

    A pair of length r has the logarithm k r or -k r, with the probabilities for which ratios are one on average.
    """
    total = np.zeros(runs)
    for _ in range(pairs):
        sizes = per_length * rng.rayleigh(size=runs)
        up = -np.expm1(-sizes) / (2 * np.sinh(sizes))
        total += np.where(rng.random(runs) < up, sizes, -sizes)
    return total


@pytest.mark.parametrize(("per_length", "pairs"), [(0.003, 400), (0.02, 100), (0.02, 400), (0.1, 30)])
def test_sums_of_log_ratios_have_the_tails_that_are_charged(per_length, pairs, monkeypatch):
    """At roundings that are exaggerated a hundred thousand times and more: real ones no simulation sees."""
    monkeypatch.setattr(module, "_PER_LENGTH", per_length)
    runs = 100_000
    total = log_ratios(per_length, pairs, runs, np.random.default_rng(0))
    ratio = np.exp(total)
    # The laws are laws.
    assert abs(ratio.mean() - 1) < standard_errors() * ratio.std() / math.sqrt(runs)
    for log_mass in (1.0, 2.0, 4.0, 6.0):
        bound, mass = grid_distance(2 * (pairs - 1), log_mass), math.exp(-log_mass)
        # Ideal noise, either way; and computed noise, whose law is the ideal one times the ratio.
        for weights in ((total > bound).astype(float), (total < -bound).astype(float), ratio * (total > bound)):
            assert weights.mean() <= mass + standard_errors(12) * weights.std() / math.sqrt(runs)
    if per_length < 0.01:
        # Less than twice what a bell curve of this width would ask for, though it holds for all laws.
        width, mean = per_length * math.sqrt(2 * pairs), pairs * per_length**2
        assert grid_distance(2 * (pairs - 1), 6.0) < 2 * (stats.norm.isf(math.exp(-6)) * width + mean)


@pytest.mark.parametrize("values", [10**4, 10**6, 10**8, 10**11])
@pytest.mark.parametrize("log_mass", [1.0, 20.0, 60.0])
def test_the_distance_is_that_of_the_best_exponent(values, log_mass):
    """Of (n (s + 1)^2 V / 2 + L) / s the least is n V + sqrt(n V (n V + 2 L)), for a V that does not grow with s."""
    spread = (values / 2 + 1) * PER_LENGTH**2 * 2.1
    least = spread + math.sqrt(spread * (spread + 2 * log_mass))
    # For few values, the exponent is so large that V does grow.
    growth = math.exp(10.6 * math.sqrt(2 * log_mass / ((values / 2 + 1) * 2.1)))
    assert least * (1 - 1e-9) <= grid_distance(values, log_mass) <= (1 + growth) / 2 * 1.001 * least


@settings(max_examples=300, deadline=None)
@given(
    values=st.integers(1, 10**13),
    more=st.integers(0, 10**13),
    log_mass=st.floats(0.5, 200),
    less_mass=st.floats(0, 200),
)
def test_more_values_and_less_mass_are_never_cheaper(values, more, log_mass, less_mass):
    distance = grid_distance(values, log_mass)
    assert distance <= grid_distance(values, log_mass + less_mass) * (1 + 1e-12)
    # Of few values the exponent is not the best one, so that fewer may cost more, but next to nothing.
    assert 0 < distance < 0.02 or values > 10**6
    assert values < 10**6 or distance <= grid_distance(values + more, log_mass) * (1 + 1e-12)


def test_a_second_moment_and_masses_of_lengths_are_bounds():
    # Of the length of a pair and two steps, of a share of 2^-9 of a standard deviation at most.
    step = 2.0**-9
    assert 2 + 2 * 2 * step * math.sqrt(math.pi / 2) + (2 * step) ** 2 < 2.1
    assert math.exp(-(10.6**2) / 2) < math.exp(-56)
    assert math.exp(-(12.0**2) / 2) == math.exp(-72)


# --- the conversion


def at_least_mass(values, distance):
    """The least mass for which the distance is no larger: it grows with the mass's logarithm."""
    if grid_distance(values, 1e-6) >= distance:
        return 1.0
    if grid_distance(values, 1e4) <= distance:
        return 0.0
    found: Any = optimize.brentq(lambda log_mass: grid_distance(values, log_mass) - distance, 1e-6, 1e4, xtol=1e-10)
    return math.exp(-float(found) * (1 - 1e-9))


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 20.0, 35.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("values", [1, 10**5, 10**8, 10**11, 10**13])
def test_what_is_claimed_follows_from_the_ideal_guarantee_and_the_distance(epsilon, delta, values):
    """From (epsilon, delta), where ratios are within exp(a) but for a mass of b, come epsilon + 2 a and, in place of
    delta, exp(a) delta + (1 + exp(epsilon + a)) b.
    """
    ideal_event, asked = dp_accounting.GaussianDpEvent(1.0), []

    def bound(parts, smaller):
        asked.append((parts, smaller))
        return epsilon

    parts = ((ideal_event, 3), (GridNoiseDpEvent(values), 1))
    # What is rough of an epsilon is no smaller than that at a delta of a half and more of this.
    found, more = with_grid_noise(parts, delta, lambda *_: epsilon, bound)
    assert found == epsilon
    ((left, smaller),) = asked
    assert left == ((ideal_event, 3),)
    if math.isinf(more):
        # Far fewer values, or a far smaller epsilon, and it is finite.
        assert values > 10**10 or epsilon > 30
        return
    distance = more / 2
    assert delta / 2 < smaller < delta
    pairs = values / 2 + 1
    # Pairs beyond a length of 10.6, as many as come; or two of them up to any longer length, for what these cost.
    masses = [at_least_mass(values, distance) + pairs * math.exp(-56)]
    for length in np.linspace(10.6, 12.0, 1001):
        moved = ROUNDING * length + 2.0**-129 * math.exp(length**2 / 2) / length
        rest = distance - 2 * 4.2 * MOST_STEPS * moved
        if rest > 0:
            too_long = pairs * math.exp(-(length**2) / 2) + (pairs * math.exp(-56)) ** 3
            masses.append(at_least_mass(values, rest) + too_long)
    mass = min(masses)
    # In both directions.
    assert math.exp(distance) * smaller + (1 + math.exp(epsilon + distance)) * 2 * mass <= delta


@pytest.mark.parametrize(("values", "largest"), [(1000, 43.6), (10**6, 36.7), (10**9, 29.7)])
def test_an_epsilon_that_is_too_large_for_the_digits_becomes_infinite(values, largest):
    """The mass of values beyond a length of 12 has to fit into 2^-13 exp(-epsilon - 1) of delta = 1e-5."""
    assert largest == pytest.approx(72 - math.log(values) - math.log(2**13 / 1e-5) - 1, abs=0.1)
    for epsilon, is_finite in ((1.0, True), (largest - 0.2, True), (largest + 0.2, False), (800.0, False)):
        parts = ((dp_accounting.GaussianDpEvent(1.0), 1), (GridNoiseDpEvent(values), 1))
        _, more = with_grid_noise(parts, 1e-5, lambda *_, epsilon=epsilon: epsilon, lambda *_: 0.0)
        assert math.isfinite(more) == is_finite
    event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(0.08), GridNoiseDpEvent(values)])
    assert epsilon_bounds(event, 1e-5).best == math.inf


def test_a_distance_that_takes_more_than_half_of_delta_is_infinite():
    parts = ((dp_accounting.GaussianDpEvent(1.0), 1), (GridNoiseDpEvent(10**16), 1))
    assert grid_distance(10**16, 30.0) > 1.0
    assert with_grid_noise(parts, 1e-5, lambda *_: 1.0, lambda *_: 1.0)[1] == math.inf


@pytest.mark.parametrize(
    "ideal",
    [
        poisson_gaussian_event(0.05, 0.8, 300),
        poisson_gaussian_event(1.0, 6.0, 40),
        dp_accounting.GaussianDpEvent(0.4),
    ],
)
@pytest.mark.parametrize("values", [1, 10**5, 10**9])
def test_noise_on_a_grid_never_costs_less_than_ideal_noise(ideal, values):
    event = dp_accounting.ComposedDpEvent([ideal, GridNoiseDpEvent(values)])
    for delta in (1e-3, 1e-6):
        without, found = epsilon_bounds(ideal, delta), epsilon_bounds(event, delta)
        assert found.best > without.best
        for one, other in ((without.rdp, found.rdp), (without.pld, found.pld), (without.exact, found.exact)):
            assert (one is None) == (other is None)
            assert one is None or (other is not None and other > one)
        # Twice as much of the same noise counts as one.
        twice = dp_accounting.ComposedDpEvent([ideal, GridNoiseDpEvent(values), GridNoiseDpEvent(values)])
        assert epsilon_bounds(twice, delta) == epsilon_bounds(
            dp_accounting.ComposedDpEvent([ideal, GridNoiseDpEvent(2 * values)]), delta
        )


@pytest.mark.parametrize(("z", "values"), [(2.0, 10**6), (0.7, 10**4), (9.0, 10**9)])
def test_a_gaussian_sums_epsilon_is_the_exact_one_at_a_smaller_delta_and_twice_the_distance(z, values):
    delta = 1e-5
    event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z), GridNoiseDpEvent(values)])
    # The best of all orders at half of delta; the library's few ones are up to a tenth worse.
    orders = 1 + np.geomspace(1e-2, 1e3, 20_000)
    rough = (orders / (2 * z**2) + np.log1p(-1 / orders) - (np.log(delta / 2) + np.log(orders)) / (orders - 1)).min()
    found = epsilon_bounds(event, delta).exact
    assert found is not None
    by_hand = []
    for factor in (1.0, 1.15):
        distance = grid_distance(values, factor * rough + 1 + math.log(4.04 / (SHARE * delta)))
        by_hand.append(exact_gaussian_epsilon(z, delta * (1 - SHARE) * math.exp(-distance)) + 2 * distance)
    assert by_hand[0] * (1 - 1e-9) <= found <= by_hand[1] * (1 + 1e-9)
    # And that is (epsilon, delta)-DP also by the curve of a Gaussian: not one that only the code knows.
    least = special.ndtr(0.5 / z - found * z) - math.exp(found) * special.ndtr(-0.5 / z - found * z)
    assert least < delta


# --- the event


def test_noise_alone_releases_nothing():
    for adjacency in Adjacency:
        bounds = epsilon_bounds(GridNoiseDpEvent(10**6), 1e-5, adjacency)
        assert bounds.best == 0.0
    np.testing.assert_array_equal(GridNoiseDpEvent(7).rdp(np.array([2.0, 3.0])), [0.0, 0.0])


@pytest.mark.parametrize("values", [0, 1, 10**13])
def test_an_event_survives_being_stored(values):
    event = GridNoiseDpEvent(values)
    stored = json.loads(json.dumps(event_to_dict(event)))
    assert stored == {"name": "GridNoiseDpEvent", "values": values}
    assert event_from_dict(stored) == event
    composed = dp_accounting.ComposedDpEvent([event, dp_accounting.GaussianDpEvent(2.0)])
    restored = event_from_dict(json.loads(json.dumps(event_to_dict(composed))))
    assert epsilon_bounds(restored, 1e-5) == epsilon_bounds(composed, 1e-5)


def test_a_ledger_with_it_survives_being_stored():
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a": SiloBudget(8.0, 1e-5)})
    ledger.append("a", GridNoiseDpEvent(10**6), 1, "noise")
    ledger.append("a", poisson_gaussian_event(0.1, 1.0, 1), 50, "training")
    restored = Ledger.from_json(ledger.to_json())
    assert restored.entries == ledger.entries
    assert restored.epsilon("a") == ledger.epsilon("a")
    assert ledger.epsilon("a").best > epsilon_bounds(poisson_gaussian_event(0.1, 1.0, 50), 1e-5).best


# --- how much is drawn in a search


@pytest.mark.parametrize("shape", [LOGARITHMIC, 0.5, 1.0, 2.0, 20.0, POISSON])
@pytest.mark.parametrize("mean", [1.5, 5, 300, 10_000])
def test_a_search_has_more_runs_than_are_planned_for_with_next_to_no_probability(shape, mean):
    runs = NumberOfRuns(mean=mean, shape=shape)
    most = most_runs(runs)
    if shape == POISSON:
        tail = stats.poisson(mean).sf(most)
    elif shape == LOGARITHMIC:
        rate = 1 - runs.gamma
        tail = rate ** (most + 1) / (most + 1) / runs.gamma / -math.log(runs.gamma)
    else:
        # The law is conditioned on one run at least.
        tail = stats.nbinom(shape, runs.gamma).sf(most) / -math.expm1(shape * math.log(runs.gamma))
    assert tail < math.exp(-60)
    assert most_runs(7) == 7
