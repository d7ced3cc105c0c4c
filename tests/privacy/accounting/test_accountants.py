import importlib.util
import math

import attr
import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.pld import pld_pmf, privacy_loss_distribution, privacy_loss_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.privacy.accounting.anchor_support import CALIBRATED, by_noise
from tests.rounding import as_printed
from tests.tiers import amount
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accounting import events as dp_events
from tff_pdp.privacy.accounting.accountants import (
    Adjacency,
    calibrate_noise_multiplier,
    epsilon_bounds,
    exact_gaussian_epsilon,
    solve_noise_multiplier,
)
from tff_pdp.privacy.accounting.events import (
    CustomDpEvent,
    ExponentialMechanismDpEvent,
    GaussianPrivacyLoss,
    poisson_gaussian_event,
)


@pytest.mark.parametrize(
    "epsilon, noise", [(0.25, "13.2855"), (0.5, "7.0318"), (1.0, "3.7306"), (2.0, "1.9938"), (10.0, "0.4999")]
)
def test_exact_gaussian(epsilon, noise):
    assert exact_gaussian_epsilon(float(noise), 1e-5) == pytest.approx(epsilon, rel=by_noise(noise))
    assert calibrate_noise_multiplier(epsilon, 1e-5, 1.0, 1) == as_printed(noise, CALIBRATED)
    # T sums with sqrt(T) times the noise are one sum.
    many = epsilon_bounds(poisson_gaussian_event(1.0, float(noise) * 5, 25), 1e-5)
    assert many.best == many.exact == pytest.approx(epsilon, rel=by_noise(noise))
    assert many.rdp > many.exact and many.pld >= many.exact


def test_bounds_hold_against_the_measured_hockey_stick_divergence():
    """An independent check of one Poisson step, by numerical integration of the definition of (epsilon, delta)."""
    rate, noise, delta = 0.2, 1.0, 1e-3
    bounds = epsilon_bounds(poisson_gaussian_event(rate, noise, 1), delta)
    grid = np.linspace(-12, 13, 400_001)
    without = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    with_record = (1 - rate) * without + rate * np.exp(-((grid - 1) ** 2) / 2) / math.sqrt(2 * math.pi)

    def true_delta(epsilon):
        gaps = [with_record - math.exp(epsilon) * without, without - math.exp(epsilon) * with_record]
        return max(np.trapz(np.maximum(gap, 0), grid) for gap in gaps)

    # The rule is off by an eighth of the step's square for the gap's one kink, whose slopes differ by less than one.
    assert true_delta(bounds.best) <= delta + (grid[1] - grid[0]) ** 2
    assert true_delta(bounds.best - 2e-3) > delta


@settings(max_examples=amount(test=1, all=4), deadline=None, derandomize=True)
@given(st.floats(0.2, 10), st.sampled_from([1e-6, 1e-4]), st.floats(0.01, 0.5), st.integers(1, 400))
def test_calibrated_noise_meets_the_target_tightly(epsilon, delta, rate, steps):
    noise = calibrate_noise_multiplier(epsilon, delta, rate, steps)
    assert epsilon_bounds(poisson_gaussian_event(rate, noise, steps), delta).best <= epsilon
    assert epsilon_bounds(poisson_gaussian_event(rate, 0.999 * noise, steps), delta).best > epsilon


@settings(max_examples=amount(test=1, all=4), deadline=None, derandomize=True)
@given(st.floats(0.02, 0.4), st.floats(0.7, 8), st.integers(2, 300))
def test_epsilon_is_monotone(rate, noise, steps):
    def cost(*plan, delta=1e-5):
        return epsilon_bounds(poisson_gaussian_event(*plan), delta).best

    base = cost(rate, noise, steps)
    assert cost(rate, noise, 2 * steps) > base
    assert cost(rate, 1.3 * noise, steps) < base
    assert cost(min(1.0, 1.5 * rate), noise, steps) > base
    assert cost(rate, noise, steps, delta=1e-3) < base


def test_no_noise_no_steps_and_full_participation():
    assert epsilon_bounds(poisson_gaussian_event(0.1, 0.0, 1), 1e-5).best == math.inf
    hidden = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(0.0))
    assert epsilon_bounds(hidden, 1e-5).best == math.inf
    assert epsilon_bounds(poisson_gaussian_event(0.1, 1.0, 0), 1e-5).best == 0.0
    assert epsilon_bounds(poisson_gaussian_event(0.0, 0.0, 5), 1e-5).best == 0.0
    assert calibrate_noise_multiplier(math.inf, 1e-5, 0.1, 10) == 0.0


def test_next_to_no_noise_counts_as_none():
    for noise in (1e-320, 1e-200, 1e-6, 0.999 * dp_events.NOISE_FLOOR):
        for rate in (0.1, 1.0):
            assert epsilon_bounds(poisson_gaussian_event(rate, noise, 100), 1e-5).best == math.inf
    for rate in (0.1, 1.0):
        at_floor = epsilon_bounds(poisson_gaussian_event(rate, dp_events.NOISE_FLOOR, 100), 1e-5)
        assert at_floor.pld is None and 1e6 < at_floor.best < math.inf


@pytest.mark.parametrize("delta", [math.nan, math.inf, -1.0, 0.0, 1.0])
def test_calibration_names_a_bad_delta(delta):
    for epsilon in (1.0, math.inf):
        with pytest.raises(ConfigError, match="delta is"):
            calibrate_noise_multiplier(epsilon, delta, 0.1, 10)


@pytest.mark.parametrize("steps", [math.nan, math.inf, -1, 1.5])
def test_calibration_names_bad_steps(steps):
    with pytest.raises(ConfigError, match="steps is"):
        calibrate_noise_multiplier(1.0, 1e-5, 0.1, steps)


def test_nesting_and_order_do_not_matter():
    a, b = poisson_gaussian_event(0.1, 2.0, 3), poisson_gaussian_event(1.0, 9.0, 1)
    one = dp_accounting.ComposedDpEvent([a, b, a])
    other = dp_accounting.ComposedDpEvent([b, dp_accounting.SelfComposedDpEvent(a, 2)])
    assert epsilon_bounds(one, 1e-5) == epsilon_bounds(other, 1e-5)


def test_fixed_events_are_paid_by_more_noise():
    plain = calibrate_noise_multiplier(2.0, 1e-5, 0.1, 100)
    beside = calibrate_noise_multiplier(2.0, 1e-5, 0.1, 100, [ExponentialMechanismDpEvent(0.5)])
    assert beside > plain
    event = dp_accounting.ComposedDpEvent([ExponentialMechanismDpEvent(0.5), poisson_gaussian_event(0.1, beside, 100)])
    assert epsilon_bounds(event, 1e-5).best <= 2.0


def test_impossible_budgets_say_why():
    with pytest.raises(BudgetError, match="fixed"):
        calibrate_noise_multiplier(1.0, 1e-5, 0.1, 10, [dp_accounting.GaussianDpEvent(1.0)])
    with pytest.raises(BudgetError, match="must be above 0"):
        calibrate_noise_multiplier(0.0, 1e-5, 0.1, 10)


@pytest.mark.parametrize("plan", [(1.5, 1.0, 1), (-0.1, 1.0, 1), (0.1, -1.0, 1), (0.1, math.inf, 1), (0.1, 1.0, -1)])
def test_values_out_of_range(plan):
    with pytest.raises(ConfigError, match="must be"):
        poisson_gaussian_event(*plan)
    with pytest.raises(ConfigError, match="delta"):
        epsilon_bounds(poisson_gaussian_event(0.1, 1.0, 1), 1.0)


def test_events_need_their_adjacency():
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(2.0))
    with pytest.raises(BudgetError, match="No accountant supports"):
        epsilon_bounds(poisson_gaussian_event(0.1, 1.0, 1), 1e-5, Adjacency.REPLACE_ONE)
    with pytest.raises(BudgetError, match="No accountant supports"):
        epsilon_bounds(sampled, 1e-5)
    bounds = epsilon_bounds(dp_accounting.SelfComposedDpEvent(sampled, 2000), 1e-5, Adjacency.REPLACE_ONE)
    assert bounds.pld is None and bounds.best == bounds.rdp < math.inf


def test_exponential_mechanism():
    repeated = dp_accounting.SelfComposedDpEvent(ExponentialMechanismDpEvent(0.015), 40)
    bounds = epsilon_bounds(repeated, 1e-7)
    gaussian_rdp = epsilon_bounds(poisson_gaussian_event(1.0, 2 / 0.015, 40), 1e-7).rdp
    assert bounds.rdp == pytest.approx(gaussian_rdp)
    assert bounds.pld is not None and bounds.exact is None
    # One choice can never cost more than its own epsilon, up to the grid.
    grid = 1e-4
    assert epsilon_bounds(ExponentialMechanismDpEvent(0.5), 1e-9, discretisation=grid).pld <= 0.5 + grid


def test_custom_events_without_privacy_loss_distribution_use_rdp():
    @attr.s(frozen=True, slots=True, auto_attribs=True)
    class CurveDpEvent(CustomDpEvent):
        slope: float

        def rdp(self, orders):
            return self.slope * orders

    bounds = epsilon_bounds(dp_accounting.SelfComposedDpEvent(CurveDpEvent(1 / 200), 10), 1e-5)
    assert bounds.pld is None
    assert bounds.rdp == pytest.approx(epsilon_bounds(poisson_gaussian_event(1.0, 10.0, 10), 1e-5).rdp)
    found = solve_noise_multiplier(lambda z: CurveDpEvent(1 / (2 * z * z)), 1.0, 1e-5)
    assert epsilon_bounds(CurveDpEvent(1 / (2 * found**2)), 1e-5).best <= 1.0


def test_pld_is_left_out_at_tiny_delta():
    bounds = epsilon_bounds(poisson_gaussian_event(0.1, 2.0, 10), 1e-12)
    assert bounds.pld is None and bounds.best == bounds.rdp


def test_unknown_stored_event():
    with pytest.raises(ConfigError, match="unknown name"):
        dp_events.event_from_dict({"name": "os.system"})


@pytest.mark.parametrize("adjacency", privacy_loss_mechanism.AdjacencyType)
@pytest.mark.parametrize("sampling_rate", [0.01, 0.37, 0.5, 0.999, 1.0])
def test_losses_inverted_at_once_have_the_librarys_bits(sampling_rate, adjacency):
    """Also at the ends of the range, at zero, and beyond, where the library refuses."""
    (library,) = GaussianPrivacyLoss.__bases__
    edge = math.log1p(-sampling_rate) if sampling_rate < 1 else -40.0
    sign = -1.0 if adjacency is privacy_loss_mechanism.AdjacencyType.ADD else 1.0
    inside = np.arange(math.ceil(edge / 1e-3), 30_000) * 1e-3
    near = edge * np.array([1, 1 - 1e-16, 1 - 1e-9, 1 - 1e-7, 1 - 1e-5])
    losses = sign * np.concatenate([inside, near, np.random.default_rng(0).uniform(edge, 30, 2000)])
    for noise in (0.4, 1.0, 7.3):
        given = noise, {"sampling_prob": sampling_rate, "adjacency_type": adjacency}
        ours, theirs = GaussianPrivacyLoss(given[0], **given[1]), library(given[0], **given[1])
        np.testing.assert_array_equal(ours.get_delta_for_epsilon(losses), theirs.get_delta_for_epsilon(losses))
        assert ours.get_delta_for_epsilon(sign * 0.3) == theirs.get_delta_for_epsilon(sign * 0.3)
        if sampling_rate < 1:
            for loss in (ours, theirs):
                with pytest.raises(ValueError, match="sampling_prob"):
                    loss.inverse_privacy_loss(sign * (edge - 0.1))
    assert privacy_loss_distribution.privacy_loss_mechanism.GaussianPrivacyLoss is GaussianPrivacyLoss


@pytest.mark.parametrize(
    ("sampling_rate", "noise_multiplier"),
    [(1e-6, 0.3), (0.01, 1.0), (0.064, 0.9), (0.1, 5.0), (0.37, 300.0), (0.5, 2.0), (0.6, 0.05), (0.999, 1.3)],
)
def test_divergences_computed_at_once_have_the_librarys_bits(sampling_rate, noise_multiplier):
    """Whole orders and others, for series of a few terms and of hundreds."""
    orders = (1.0102, 1.1, 2.0, 2.5, 10.9, 33.0, 97.3, 256.0, 1024.0)
    sampled = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    ours, theirs = dp_events.RdpAccountant(orders), rdp.RdpAccountant(orders)
    for accountant in (ours, theirs):
        accountant.compose(sampled)
    rounded_up = np.maximum(theirs._rdp, 0.0) + 1e-14 / (np.array(orders) - 1)
    np.testing.assert_array_equal(ours._rdp, rounded_up)
    curve = dp_events.sampled_gaussian_rdp(sampling_rate, noise_multiplier, np.array(orders))
    np.testing.assert_array_equal(curve, theirs._rdp)


def test_divergences_at_many_epsilons_have_the_librarys_bits():
    """Below, among, at and above the losses, and at infinity."""
    ours = dp_events.hockey_stick_divergences
    assert pld_pmf._get_delta_for_epsilon_vectorized is ours
    # The module as it is before anything is put in its place.
    spec = importlib.util.find_spec(pld_pmf.__name__)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    rng = np.random.default_rng(0)
    for size in (1, 2, 50, 3000):
        losses = np.sort(rng.normal(0, 3, size))
        masses = 1e-3, losses, rng.dirichlet(np.ones(size)) * 0.999
        among = np.sort(rng.choice(losses, 5))
        inside = np.linspace(0.0, 4.0, 64)
        for epsilons in (
            [-20.0],
            [30.0],
            [0.5, math.inf],
            [math.inf],
            inside,
            [-30.0, *among, 30.0],
            [*among, math.inf],
        ):
            expected = library._get_delta_for_epsilon_vectorized(*masses, epsilons)
            np.testing.assert_array_equal(ours(*masses, epsilons), expected)
    with pytest.raises(ValueError, match="ascend"):
        ours(0.0, [0.0], [1.0], [1.0, 0.5])


@pytest.mark.parametrize(("sampling_rate", "noise"), [(0.05, 1.3), (0.5, 3.0), (1.0, 4.0)])
def test_a_zeroed_record_costs_what_an_absent_one_costs(sampling_rate, noise):
    # Both neighbours draw the record with the same probability; it adds 1, the clip norm, in one of them.
    points, spacing = np.linspace(-30 * noise, 30 * noise, 2_000_001, retstep=True)
    zeroed = np.exp(-0.5 * (points / noise) ** 2) / noise / math.sqrt(2 * math.pi)
    added = np.exp(-0.5 * ((points - 1) / noise) ** 2) / noise / math.sqrt(2 * math.pi)
    with_record = (1 - sampling_rate) * zeroed + sampling_rate * added
    delta = 1e-3
    epsilon = epsilon_bounds(poisson_gaussian_event(sampling_rate, noise, 1), delta).best
    spent = [
        float(np.maximum(first - math.exp(epsilon) * second, 0).sum() * spacing)
        for first, second in ((with_record, zeroed), (zeroed, with_record))
    ]
    # An upper bound for both directions, and no looser than its grid of losses (1e-4) makes it.
    assert 0.95 * delta < max(spent) <= delta * (1 + 1e-6)
