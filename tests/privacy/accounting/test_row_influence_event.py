"""What noisy sums cost whoever is in several rows: the theorem's curve against closed forms, integrals and anchors."""

import json
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

from tests.privacy.accounting.anchor_support import CALIBRATED, by_coarser_orders
from tests.rounding import ELEMENTARY, gamma, half_a_digit
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    epsilon_bounds,
    exact_gaussian_epsilon,
    poisson_gaussian_event,
)
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import event_from_dict, event_to_dict
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.accounting.row_influence import (
    FixedSizeRowsDpEvent,
    PoissonRowsDpEvent,
    calibrate_rows_noise,
    fixed_size_rows_event,
    poisson_rows_event,
)

ORDERS = np.array([1.0102, 1.5, 2.0, 5.0, 32.0, 1000.0])
# Some dozen terms, each of as many operations.
FLOAT64 = gamma(100, np.float64)

# The contact graph of the thesis: rows, batch, steps of an epoch; delta is one over the rows.
ROWS, BATCH, STEPS = 2_609_976, 512, 5098
NOISE = (4.5, 1.0, 0.5, 5.0)


def epsilon(event, delta=1e-5):
    return epsilon_bounds(event, delta, Adjacency.REPLACE_ONE).best


@pytest.mark.parametrize(
    ("changed", "epochs", "expected"),
    [
        (20, 1, ("14.6", "142", "515", "12.8")),
        (20, 2, ("20.7", "201", "726", "18.1")),
        (21, 2, ("21.3", "208", "755", "18.6")),
    ],
)
def test_anchors_of_the_theorem(changed, epochs, expected):
    events = [fixed_size_rows_event(ROWS, BATCH, noise, changed, epochs * STEPS) for noise in NOISE]
    for event, figure in zip(events, expected, strict=True):
        assert by_coarser_orders(figure) <= epsilon(event, 1 / ROWS) <= float(figure) + half_a_digit(figure)


@pytest.mark.parametrize(
    ("changed", "epochs", "expected"),
    [
        (20, 1, ("6.28", "45.4", "142", "5.56")),
        (20, 2, ("8.81", "64.2", "201", "7.78")),
        (21, 2, ("9.03", "66.3", "208", "7.98")),
    ],
)
def test_anchors_of_the_released_code(changed, epochs, expected):
    # A quarter of the theorem's exponent is the theorem's at twice the noise.
    events = [fixed_size_rows_event(ROWS, BATCH, 2 * noise, changed, epochs * STEPS) for noise in NOISE]
    for event, figure in zip(events, expected, strict=True):
        assert by_coarser_orders(figure) <= epsilon(event, 1 / ROWS) <= float(figure) + half_a_digit(figure)


def test_one_row_in_every_batch_is_the_gaussian_mechanism():
    # Replaced, it moves the sum by 2 C; and three rows by 6 C.
    for changed in (1, 3):
        for event in (FixedSizeRowsDpEvent(1.5, 7, 7, changed), PoissonRowsDpEvent(1.5, 1.0, changed)):
            np.testing.assert_allclose(event.rdp(ORDERS), (2 * changed) ** 2 * ORDERS / (2 * 1.5**2), rtol=FLOAT64)


def test_one_order_by_hand():
    # Two of four rows differ, batches of two: rho is 0, 1, 2 in 1, 4, 1 of 6 cases; order 2, z = 2: exponent rho^2.
    expected = math.log((1 + 4 * math.exp(1) + math.exp(4)) / 6)
    assert FixedSizeRowsDpEvent(2.0, 4, 2, 2).rdp(np.array([2.0]))[0] == pytest.approx(expected, rel=FLOAT64)
    # Poisson with rate 1/2: 1, 2, 1 of 4.
    expected = math.log((1 + 2 * math.exp(1) + math.exp(4)) / 4)
    assert PoissonRowsDpEvent(2.0, 0.5, 2).rdp(np.array([2.0]))[0] == pytest.approx(expected, rel=FLOAT64)


@pytest.mark.parametrize(
    ("rows", "changed", "batch"), [(50, 30, 40), (100, 7, 100), (9, 9, 4), (3000, 400, 50), (1000, 20, 1)]
)
def test_batches_of_fixed_size_are_hypergeometric(rows, changed, batch):
    # In exact arithmetic, at noise that leaves the mean of exp(x) finite.
    noise, order = 40.0, 2.0
    weights = {
        rho: Fraction(math.comb(changed, rho) * math.comb(rows - changed, batch - rho), math.comb(rows, batch))
        for rho in range(max(0, batch - rows + changed), min(changed, batch) + 1)
    }
    excess = sum(float(weight) * math.expm1(4 * rho**2 / noise**2) for rho, weight in weights.items())
    curve = FixedSizeRowsDpEvent(noise, rows, batch, changed).rdp(np.array([order]))
    # Weights come from logarithms of factorials, some nine of them, of up to n log n, whose errors they take over.
    bound = gamma(9 * ELEMENTARY, np.float64) * rows * math.log(rows)
    assert curve[0] == pytest.approx(math.log1p(excess), rel=bound)


def test_more_rows_batches_or_steps_cost_more_and_more_noise_costs_less():
    def grows(events):
        curves = np.array([event.rdp(ORDERS) for event in events])
        return (np.diff(curves, axis=0) > 0).all()

    assert grows([PoissonRowsDpEvent(8.0, 0.1, changed) for changed in (1, 2, 3, 20)])
    assert grows([PoissonRowsDpEvent(8.0, rate, 5) for rate in (0.01, 0.1, 0.5, 1.0)])
    assert grows([PoissonRowsDpEvent(noise, 0.1, 5) for noise in (16.0, 8.0, 1.0)])
    assert grows([FixedSizeRowsDpEvent(8.0, 1000, 50, changed) for changed in (1, 2, 3, 20)])
    assert grows([FixedSizeRowsDpEvent(8.0, 1000, batch, 5) for batch in (1, 50, 500, 1000)])
    costs = [epsilon(poisson_rows_event(0.1, 8.0, 5, steps)) for steps in (1, 2, 50, 1000)]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_of_many_rows_a_batch_of_fixed_size_is_like_a_poisson_batch():
    curves = [FixedSizeRowsDpEvent(10.0, 100 * scale, 10 * scale, 8).rdp(ORDERS) for scale in (1, 100, 100_000)]
    poisson = PoissonRowsDpEvent(10.0, 0.1, 8).rdp(ORDERS)
    gaps = [np.abs(curve / poisson - 1).max() for curve in curves]
    # As one over the number of rows.
    assert gaps[0] > 1e-2 and gaps[0] > gaps[1] and gaps[2] == pytest.approx(gaps[1] / 1000, rel=0.1)
    # Draws without replacement spread less.
    assert all((curve < poisson).all() for curve in curves)


@pytest.mark.parametrize(("changed", "rate", "noise"), [(1, 0.5, 1.0), (3, 0.5, 4.0), (5, 0.2, 10.0), (20, 0.2, 30.0)])
@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_two_mixtures_of_gaussians_are_no_further_apart_than_the_curve(changed, rate, noise, order):
    # Every row that differs moves from the clip norm to its opposite: the sums are mixtures around rho and -rho.
    far = 2 * order * changed + 15 * noise
    grid = np.linspace(-far, far, 100_001)
    rho = np.arange(changed + 1)[:, np.newaxis]
    weights = stats.binom.logpmf(rho, changed, rate)
    one = special.logsumexp(weights + stats.norm.logpdf(grid, rho, noise), axis=0)
    other = special.logsumexp(weights + stats.norm.logpdf(grid, -rho, noise), axis=0)
    integral = special.logsumexp(order * one + (1 - order) * other) + math.log(grid[1] - grid[0])
    true = integral / (order - 1)
    curve = PoissonRowsDpEvent(noise, rate, changed).rdp(np.array([order]))[0]
    assert true <= curve < 20 * true
    # That they differ in which rows are drawn, and not in how many, is what the curve cannot see.
    assert order > 2 or curve < 4.1 * true


def test_large_orders_and_many_rows_do_not_overflow():
    with np.errstate(over="raise", invalid="raise"):
        curve = PoissonRowsDpEvent(1.0, 0.01, 10_000).rdp(ORDERS)
        # One batch in 1e20000 has all rows: at a large order it is all that counts.
        assert curve[-1] == pytest.approx(2 * 1000 * 1e8 + 10_000 * math.log(0.01) / 999, rel=FLOAT64)
        assert np.isfinite(curve).all() and (np.diff(curve) > 0).all()
        tiny = PoissonRowsDpEvent(1e6, 1e-6, 3).rdp(ORDERS)
        # There the exponent is so small that only its mean counts, and half of its square at the largest order.
        np.testing.assert_allclose(tiny, 2 * ORDERS * (3e-6 + 6e-12) / 1e12, rtol=ORDERS.max() ** 2 / 1e12)
    assert epsilon(poisson_rows_event(0.01, 1e-4, 3, 10)) == math.inf


def test_nothing_differs_nothing_is_drawn_and_nothing_is_added():
    nothing = dp_accounting.NoOpDpEvent()
    assert poisson_rows_event(0.1, 1.0, 0, 5) == poisson_rows_event(0.0, 1.0, 3, 5) == nothing
    assert fixed_size_rows_event(10, 0, 1.0, 3, 5) == poisson_rows_event(0.1, 1.0, 3, 0) == nothing
    assert epsilon(poisson_rows_event(0.1, 1.0, 0, 5)) == 0
    assert poisson_rows_event(0.1, 0.0, 3, 5) == dp_accounting.NonPrivateDpEvent()
    # More rows than there are cannot differ.
    assert fixed_size_rows_event(10, 4, 1.0, 30, 1) == FixedSizeRowsDpEvent(1.0, 10, 4, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 1.0, 3, 1), "sampling_rate is 1.5"),
        ((0.5, -1.0, 3, 1), "noise_multiplier is -1"),
        ((0.5, math.inf, 3, 1), "noise_multiplier is inf"),
        ((0.5, 1.0, -1, 1), "num_changed_rows is -1"),
        ((0.5, 1.0, 2.5, 1), "num_changed_rows is 2.5"),
        ((0.5, 1.0, 3, -1), "steps is -1"),
    ],
)
def test_values_out_of_range_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        poisson_rows_event(*arguments)
    with pytest.raises(ConfigError, match="batch_size is 11"):
        fixed_size_rows_event(10, 11, 1.0, 3, 1)


def test_calibration_meets_the_budget():
    def event(noise):
        return poisson_rows_event(0.05, noise, 4, 300)

    noise = calibrate_rows_noise(event, 3.0, 1e-6)
    # Epsilon falls with the noise's third power at most.
    assert 3.0 * (1 - 3 * CALIBRATED) <= epsilon(event(noise), 1e-6) <= 3.0
    assert noise > calibrate_rows_noise(lambda z: poisson_rows_event(0.05, z, 3, 300), 3.0, 1e-6)
    # In every batch: one Gaussian whose noise is shared by four rows replaced. RDP costs a little more than the exact.
    in_all = calibrate_rows_noise(lambda z: poisson_rows_event(1.0, z, 4, 9), 3.0, 1e-6)
    assert 2.75 < exact_gaussian_epsilon(in_all / (8 * 3), 1e-6) < 3.0
    assert calibrate_rows_noise(event, math.inf, 1e-6) == 0
    with pytest.raises(BudgetError, match="No noise multiplier"):
        calibrate_rows_noise(lambda z: poisson_rows_event(1.0, z, 10_000, 300), 0.01, 1e-6)


@pytest.mark.parametrize("event", [PoissonRowsDpEvent(40.0, 0.125, 7), FixedSizeRowsDpEvent(40.0, 100, 10, 7)])
def test_ledgers_hold_the_events_through_json(event):
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event)))) == event
    ledger = Ledger("node", Adjacency.REPLACE_ONE, {"clinic": SiloBudget(5.0, 1e-5)})
    ledger.append("clinic", event, 3, "DP-SGD training")
    restored = Ledger.from_json(ledger.to_json())
    assert restored.entries == ledger.entries
    assert restored.epsilon("clinic") == ledger.epsilon("clinic")
    assert 0 < restored.epsilon("clinic").best <= 5
    with pytest.raises(BudgetError, match="Silo 'clinic' would overspend"):
        restored.append("clinic", event, 30_000)


def test_it_costs_more_than_one_row_does():
    # One row removed is one of the ways in which a row can differ.
    for steps in (1, 500):
        one_row = epsilon_bounds(poisson_gaussian_event(0.1, 6.0, steps), 1e-5).best
        assert epsilon(poisson_rows_event(0.1, 6.0, 1, steps)) > 2 * one_row
