import math
import random

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import optimize, special, stats

from tests import rounding
from tests.privacy.accounting.anchor_support import CALIBRATED, by_noise
from tests.rounding import as_printed
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting import events as dp_events
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds, exact_gaussian_epsilon
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent, poisson_gaussian_event
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.repeated_runs import (
    GEOMETRIC,
    LOGARITHMIC,
    POISSON,
    NumberOfRuns,
    calibrate_repeated_runs,
    search_event,
)

DELTA = 1e-5
SILO_RUN = poisson_gaussian_event(0.01, 1.0, 1000)
SHAPES = [LOGARITHMIC, 0.5, GEOMETRIC, 2.0, 5.0, POISSON]


def search_epsilon(run_event, mean, shape):
    return epsilon_bounds(search_event(run_event, NumberOfRuns(mean, shape)), DELTA).best


# An independent implementation of Papernot and Steinke's theorems 2 and 6, and of the conversion to (epsilon, delta),
# with the orders for which the figures were computed.
ORDERS = np.array([*np.arange(1.1, 10.95, 0.1), *range(11, 64), 128, 256, 512, 1024])


def expected_runs(gamma, shape):
    if shape == LOGARITHMIC:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * (1 - gamma**shape))


def solved_gamma(mean, shape):
    return optimize.brentq(lambda gamma: expected_runs(gamma, shape) - mean, 1e-9, 1 - 1e-9)


def independent_epsilon(run_rdp, mean, shape):
    orders = ORDERS
    if shape == POISSON:
        log_deltas = [
            np.min((orders - 1) * (run_rdp - math.log1p(1 / (order - 1)) + np.log1p(-1 / orders)) - np.log(orders))
            for order in orders
        ]
        extra = mean * np.exp(np.minimum(log_deltas, 0))
    else:
        log_gamma = math.log(solved_gamma(mean, shape))
        extra = (1 + shape) * np.min((1 - 1 / orders) * run_rdp - log_gamma / orders)
    tuned = run_rdp + extra + math.log(mean) / (orders - 1)
    return np.min(tuned + np.log1p(-1 / orders) - (math.log(DELTA) + np.log(orders)) / (orders - 1))


def sampled_gaussian_rdp(rate, noise):
    """Of one step, by numerical integration of the definition; infinite at orders too large for its grid."""
    sums = np.linspace(-15, 90, 20_001)
    log_ratio = np.log1p(rate * np.expm1((2 * sums - 1) / (2 * noise**2)))
    log_density = stats.norm.logpdf(sums, scale=noise) + math.log(sums[1] - sums[0])
    moments = [special.logsumexp(log_density + order * log_ratio) if order < 64 else np.inf for order in ORDERS]
    return np.array(moments) / (ORDERS - 1)


@pytest.fixture(scope="module")
def silo_run_rdp():
    return 1000 * sampled_gaussian_rdp(0.01, 1.0)


@pytest.mark.parametrize(
    "shape, noise", zip(SHAPES, ["27.05", "30.19", "33.22", "39.02", "51.78", "34.33"], strict=True)
)
def test_calibration_anchors(shape, noise):
    found = calibrate_repeated_runs(0.25, DELTA, 1.0, 1, NumberOfRuns(10, shape))
    assert found == as_printed(noise, CALIBRATED)
    by_hand = independent_epsilon(ORDERS / (2 * float(noise) ** 2), 10, shape)
    assert by_hand == pytest.approx(0.25, rel=by_noise(noise))


@pytest.mark.parametrize(
    "shape, gamma", zip(SHAPES[:-1], ["0.02692", "0.0625", "0.1000", "0.1708", "0.3343"], strict=True)
)
def test_gamma_anchors(shape, gamma):
    assert NumberOfRuns(10, shape).gamma == as_printed(gamma)


@pytest.mark.parametrize(
    "shape, mean, epsilon",
    [
        (LOGARITHMIC, 3, "3.007"),
        (LOGARITHMIC, 10, "3.523"),
        (LOGARITHMIC, 30, "3.912"),
        (GEOMETRIC, 3, "3.337"),
        (GEOMETRIC, 10, "4.103"),
        (GEOMETRIC, 30, "4.689"),
        (POISSON, 3, "2.831"),
        (POISSON, 10, "4.329"),
        (POISSON, 30, "8.139"),
    ],
)
def test_epsilon_anchors(silo_run_rdp, shape, mean, epsilon):
    assert search_epsilon(SILO_RUN, mean, shape) == as_printed(epsilon)
    assert independent_epsilon(silo_run_rdp, mean, shape) == as_printed(epsilon)


def test_a_fixed_grid_costs_what_releasing_every_run_costs():
    bounds = epsilon_bounds(search_event(SILO_RUN, 10), DELTA)
    assert bounds.rdp == as_printed("6.713")
    assert bounds == epsilon_bounds(poisson_gaussian_event(0.01, 1.0, 10_000), DELTA)
    assert search_epsilon(SILO_RUN, 10, LOGARITHMIC) < bounds.best
    assert epsilon_bounds(search_event(SILO_RUN, 1), DELTA) == epsilon_bounds(SILO_RUN, DELTA)


def probability_generating_function(mean, shape):
    """The function and its derivative, on [0, 1]."""
    if shape == POISSON:
        return (lambda x: np.exp(mean * (x - 1))), (lambda x: mean * np.exp(mean * (x - 1)))
    gamma = solved_gamma(mean, shape)
    if shape == LOGARITHMIC:
        scale = math.log(gamma)
        return (lambda x: np.log(1 - (1 - gamma) * x) / scale), (lambda x: -(1 - gamma) / (1 - (1 - gamma) * x) / scale)
    scale = gamma**-shape - 1
    return (
        lambda x: ((1 - (1 - gamma) * x) ** -shape - 1) / scale,
        lambda x: shape * (1 - gamma) * (1 - (1 - gamma) * x) ** (-shape - 1) / scale,
    )


@pytest.mark.parametrize("shape", [LOGARITHMIC, GEOMETRIC, 5.0, POISSON])
def test_bound_holds_against_the_measured_divergence_of_the_largest_of_many_gaussians(shape):
    """The search that publishes its largest noisy sum: the output's density is known, so is delta at each epsilon."""
    mean, noise = 10, 2.0
    function, derivative = probability_generating_function(mean, shape)
    assert derivative(1.0) == pytest.approx(mean)
    outputs = np.linspace(-10, 14, 200_001)

    def density(shift):
        return derivative(stats.norm.cdf(outputs - shift)) * stats.norm.pdf(outputs - shift)

    without, with_record = density(0.0), density(1 / noise)
    # The trapezoid's rule errs by a twelfth of the step's square times how much slopes change, of densities as smooth.
    step = outputs[1] - outputs[0]
    assert np.trapz(without, outputs) == pytest.approx(1 - function(0.0), abs=mean * step**2)

    def true_delta(epsilon):
        gaps = [with_record - math.exp(epsilon) * without, without - math.exp(epsilon) * with_record]
        return max(np.trapz(np.maximum(gap, 0), outputs) for gap in gaps)

    run = dp_accounting.GaussianDpEvent(noise)
    assert true_delta(search_epsilon(run, mean, shape)) <= DELTA
    # One run's epsilon would not do.
    assert true_delta(exact_gaussian_epsilon(noise, DELTA)) > 1.5 * DELTA


@pytest.mark.parametrize("mean, shape", [(10, LOGARITHMIC), (4, 0.3), (10, GEOMETRIC), (10, 5.0), (3, POISSON)])
def test_numbers_drawn_have_the_distribution(mean, shape):
    stream, draws, largest = random.Random(11), 4000, 40
    runs = NumberOfRuns(mean, shape)
    counts = np.bincount([min(runs.draw(stream.randrange), largest) for _ in range(draws)], minlength=largest + 1)
    numbers = np.arange(largest)
    if shape == POISSON:
        expected = stats.poisson.pmf(numbers, mean)
    else:
        assert counts[0] == 0
        gamma = solved_gamma(mean, shape)
        first = (1 - gamma) / math.log(1 / gamma) if shape == 0 else shape * (1 - gamma) / (gamma**-shape - 1)
        ratios = (1 - gamma) * (numbers[1:-1] + shape) / (numbers[1:-1] + 1)
        expected = np.concatenate([[0.0], first * np.cumprod([1.0, *ratios])])
    expected = draws * np.append(expected, 1 - expected.sum())
    # Bins too small for the chi-square approximation go together.
    often = expected >= 10
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    used = wanted > 0
    assert stats.chisquare(observed[used], wanted[used]).pvalue > 1e-3


def test_extremes_of_the_distribution_can_be_drawn():
    for shape in (1e-200, 1e-6, 0.5, 20.0):
        runs = NumberOfRuns(10, shape)
        assert runs.draw(lambda number: 0) == 1
        largest = runs.draw(lambda number: number - 1)
        # As far out as a tail of half a unit in 256 bits lies: each further run is less likely by up to 1 - gamma.
        assert 10 < largest < 1.1 * 257 * math.log(2) / -math.log1p(-runs.gamma) + 200


@pytest.mark.parametrize("mean, shape", [(10, LOGARITHMIC), (4, 0.3), (10, GEOMETRIC), (10, 5.0), (3, POISSON)])
def test_each_number_is_drawn_from_its_share_of_all_uniform_numbers(mean, shape):
    """The share by bisection over the uniform numbers, beside the law in mpmath: within 2**-250, wherever it lies."""
    runs = NumberOfRuns(mean, shape)

    def first_uniform_of(number):
        low, high = 0, 2**256
        while low < high:
            middle = (low + high) // 2
            if runs.draw(lambda _, middle=middle: middle) >= number:
                high = middle
            else:
                low = middle + 1
        return low

    with mpmath.workdps(120):
        for number in (1, 2, 7, 40):
            share = mpmath.mpf(first_uniform_of(number + 1) - first_uniform_of(number)) / 2**256
            if shape == POISSON:
                exact = mpmath.exp(-mean) * mpmath.mpf(mean) ** number / mpmath.factorial(number)
            elif shape == LOGARITHMIC:
                gamma = mpmath.mpf(runs.gamma)
                exact = (1 - gamma) ** number / (-mpmath.log(gamma) * number)
            else:
                gamma, eta = mpmath.mpf(runs.gamma), mpmath.mpf(shape)
                ways = mpmath.rf(eta, number) / mpmath.factorial(number)
                exact = (1 - gamma) ** number * ways / (gamma**-eta - 1)
            assert abs(share - exact) < mpmath.mpf(2) ** -250


def test_more_runs_and_larger_shapes_cost_more():
    run = dp_accounting.GaussianDpEvent(8.0)
    costs = [[search_epsilon(run, mean, shape) for shape in SHAPES[:-1]] for mean in (1.5, 5, 30)]
    assert (np.diff(costs, axis=0) > 0).all() and (np.diff(costs, axis=1) > 0).all()
    assert min(costs[0]) > epsilon_bounds(run, DELTA).best


def test_searches_compose_with_other_events():
    search = search_event(SILO_RUN, NumberOfRuns(5, GEOMETRIC))
    other = poisson_gaussian_event(0.1, 5.0, 20)
    both = epsilon_bounds(dp_accounting.ComposedDpEvent([other, search]), DELTA)
    assert both == epsilon_bounds(dp_accounting.ComposedDpEvent([search, other]), DELTA)
    assert both.pld is None and both.exact is None
    assert max(epsilon_bounds(search, DELTA).best, epsilon_bounds(other, DELTA).rdp) < both.best
    assert both.best < epsilon_bounds(search, DELTA).best + epsilon_bounds(other, DELTA).rdp
    twice = dp_accounting.SelfComposedDpEvent(search, 2)
    assert dict(dp_events.flatten_event(dp_accounting.ComposedDpEvent([twice, search, other]))) == {
        search: 3,
        poisson_gaussian_event(0.1, 5.0, 1): 20,
    }
    assert epsilon_bounds(twice, DELTA).best > epsilon_bounds(search, DELTA).best
    # A search of the same sums is not that many sums.
    assert dp_events.flatten_event(search) != dp_events.flatten_event(SILO_RUN)


def test_a_search_may_hold_several_events_and_own_ones():
    score = ExponentialMechanismDpEvent(0.2)
    run = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(8.0), score])
    with_score = search_epsilon(run, 10, GEOMETRIC)
    assert with_score > search_epsilon(dp_accounting.GaussianDpEvent(8.0), 10, GEOMETRIC)
    run_rdp = ORDERS / (2 * 8.0**2) + np.minimum(0.2**2 / 8 * ORDERS, 0.2)
    # The same operations, a hundred at each order.
    by_hand = independent_epsilon(run_rdp, 10, GEOMETRIC)
    assert with_score == pytest.approx(by_hand, rel=rounding.gamma(100, np.float64))


@pytest.mark.parametrize("inside", [dp_accounting.NonPrivateDpEvent(), dp_accounting.GaussianDpEvent(1e-4)])
def test_a_search_among_runs_without_noise_is_not_private(inside):
    run = dp_accounting.ComposedDpEvent([SILO_RUN, dp_accounting.SelfComposedDpEvent(inside, 2)])
    search = search_event(run, NumberOfRuns(3, GEOMETRIC))
    assert dp_events.releases_without_noise(search)
    assert epsilon_bounds(search, DELTA).best == math.inf
    assert not dp_events.releases_without_noise(search_event(SILO_RUN, NumberOfRuns(3, GEOMETRIC)))


@pytest.mark.parametrize("shape", [GEOMETRIC, POISSON])
def test_runs_that_reveal_next_to_nothing(shape):
    # Rounding makes some of this curve's divergences negative.
    run = poisson_gaussian_event(1e-6, 1e3, 10)
    assert 0 < search_epsilon(run, 5, shape) < 0.01


def test_a_search_needs_the_adjacency_of_its_runs():
    search = search_event(SILO_RUN, NumberOfRuns(5, GEOMETRIC))
    with pytest.raises(BudgetError, match="No accountant supports RepeatAndSelect"):
        epsilon_bounds(search, DELTA, Adjacency.REPLACE_ONE)
    whole = search_event(dp_accounting.GaussianDpEvent(4.0), NumberOfRuns(5, GEOMETRIC))
    assert epsilon_bounds(whole, DELTA, Adjacency.REPLACE_ONE) == epsilon_bounds(whole, DELTA)


@pytest.mark.parametrize("shape", [LOGARITHMIC, 0.5, POISSON])
def test_ledgers_keep_searches(shape):
    run = dp_accounting.ComposedDpEvent([SILO_RUN, ExponentialMechanismDpEvent(0.1)])
    search = search_event(run, NumberOfRuns(5, shape))
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {"a": SiloBudget(5.0, DELTA)})
    ledger.append("a", search, 1, "choice of the learning rate")
    ledger.append("a", poisson_gaussian_event(0.1, 9.0, 1), 3, "statistics")
    spent = ledger.epsilon("a")
    assert epsilon_bounds(search, DELTA).best < spent.best <= 5.0 and spent.pld is None
    restored = Ledger.from_json(ledger.to_json())
    assert restored.entries == ledger.entries and restored.to_json() == ledger.to_json()
    assert isinstance(restored.entries[0].event, dp_event.RepeatAndSelectDpEvent)
    assert restored.epsilon("a") == spent
    with pytest.raises(BudgetError, match="would overspend"):
        restored.append("a", search, 2, "choice of the clip norm")


def test_calibration_covers_the_whole_search():
    runs, score, once = NumberOfRuns(5, GEOMETRIC), ExponentialMechanismDpEvent(0.1), dp_accounting.GaussianDpEvent(9.0)

    def cost(noise):
        run = dp_accounting.ComposedDpEvent([poisson_gaussian_event(0.05, noise, 100), score])
        return epsilon_bounds(dp_accounting.ComposedDpEvent([search_event(run, runs), once]), DELTA).best

    noise = calibrate_repeated_runs(3.0, DELTA, 0.05, 100, runs, run_events=[score], fixed_events=[once])
    assert cost(noise) <= 3.0 < cost(0.999 * noise)
    without = [
        calibrate_repeated_runs(3.0, DELTA, 0.05, 100, runs, fixed_events=[once]),
        calibrate_repeated_runs(3.0, DELTA, 0.05, 100, runs, run_events=[score]),
    ]
    assert max(without) < noise
    assert calibrate_repeated_runs(math.inf, DELTA, 0.05, 100, runs) == 0.0


def test_impossible_budgets():
    runs = NumberOfRuns(5, GEOMETRIC)
    with pytest.raises(BudgetError, match="fixed"):
        calibrate_repeated_runs(0.5, DELTA, 1.0, 1, runs, run_events=[dp_accounting.GaussianDpEvent(2.0)])
    with pytest.raises(BudgetError, match="must be above 0"):
        calibrate_repeated_runs(0.0, DELTA, 1.0, 1, runs)


@pytest.mark.parametrize("mean, shape", [(1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (5.0, -0.5), (5.0, math.nan)])
def test_impossible_distributions(mean, shape):
    with pytest.raises(ConfigError, match=r"(mean|shape) is"):
        NumberOfRuns(mean, shape)


def test_values_out_of_range():
    with pytest.raises(ConfigError, match="no gamma"):
        _ = NumberOfRuns(5, POISSON).gamma
    for count in (0, 1.5, math.inf):
        with pytest.raises(ConfigError, match="runs is"):
            search_event(SILO_RUN, count)
    runs = NumberOfRuns(5, GEOMETRIC)
    for epsilon in (1.0, math.inf):
        with pytest.raises(ConfigError, match="delta is"):
            calibrate_repeated_runs(epsilon, 0.0, 0.1, 10, runs)
        with pytest.raises(ConfigError, match="sampling_rate is"):
            calibrate_repeated_runs(epsilon, DELTA, 1.1, 10, runs)
