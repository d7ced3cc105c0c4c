"""The bound for several rows that goes by way of the same rows zeroed: against the library, and against the truth."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from tests.privacy.accounting.anchor_support import by_transforms
from tests.rounding import ELEMENTARY, gamma
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds
from tff_pdp.privacy.accounting.row_influence import _Mixture, calibrate_rows_noise, poisson_rows_event, zeroed_rows_pld


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.01, 0.8), (1.0, 2.0)])
def test_one_row_is_the_librarys_sampled_gaussian(rate, noise):
    ours = zeroed_rows_pld(noise, rate, 1, 1e-3).self_compose(100)
    library = privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-3, sampling_prob=rate
    ).self_compose(100)
    for delta in (1e-3, 1e-8):
        expected = pytest.approx(library.get_epsilon_for_delta(delta), abs=by_transforms(100, delta))
        assert ours.get_epsilon_for_delta(delta) == expected


def test_every_row_in_every_batch_is_one_gaussian_with_a_larger_step():
    ours = zeroed_rows_pld(6.0, 1.0, 3, 1e-3)
    library = privacy_loss_distribution.from_gaussian_mechanism(2.0, value_discretization_interval=1e-3)
    # Sums of some ten thousand cells, whose share of delta moves epsilon by less.
    bound = gamma(10_000, np.float64) / 1e-6
    assert ours.get_epsilon_for_delta(1e-6) == pytest.approx(library.get_epsilon_for_delta(1e-6), abs=bound)


@pytest.mark.parametrize(
    ("rows", "rate", "noise"),
    [(2, 0.3, 1.5), (5, 0.2, 2.0), (3, 1.0, 4.0), pytest.param(20, 0.05, 3.0, marks=pytest.mark.all)],
)
def test_no_replaced_rows_lose_more(rows, rate, noise):
    # Rows that pull one way in one data set and the other way in its neighbour: what of one mixture exceeds exp(e)
    # times the other, by numerical integration.
    x = np.linspace(-rows - 12 * noise, rows + 12 * noise, 200_001)
    counts = np.arange(rows + 1)
    shares = stats.binom.pmf(counts, rows, rate)
    one, other = (
        sum(share * stats.norm.pdf(x, sign * count, noise) for count, share in zip(counts, shares, strict=True))
        for sign in (1, -1)
    )
    width = x[1] - x[0]
    event = poisson_rows_event(rate, noise, rows, 1)
    for delta in (1e-2, 1e-4, 1e-6):
        bound = epsilon_bounds(event, delta, Adjacency.REPLACE_ONE).pld
        assert bound is not None and bound > 0
        true_delta = np.clip(one - math.exp(bound) * other, 0, None).sum() * width
        assert true_delta <= delta
        # Nor is it far: at a third of the bound, the promise would be broken.
        assert np.clip(one - math.exp(bound / 3) * other, 0, None).sum() * width > delta


def test_bound_grows_with_rows_rate_and_steps_and_falls_with_noise():
    def bound(rows=3, rate=0.1, noise=3.0, steps=10):
        return epsilon_bounds(poisson_rows_event(rate, noise, rows, steps), 1e-5, Adjacency.REPLACE_ONE).pld

    base = bound()
    assert min(bound(rows=4), bound(rate=0.12), bound(steps=12), bound(noise=2.5)) > base


def test_contacts_of_a_pair_need_far_less_noise_than_by_the_theorem():
    # Two rows of a hundred batches: calibrated noise stays within the budget, which the theorem's curve exceeds.
    noise = calibrate_rows_noise(lambda z: poisson_rows_event(0.05, z, 2, 100), 2.0, 1e-5)
    bounds = epsilon_bounds(poisson_rows_event(0.05, noise, 2, 100), 1e-5, Adjacency.REPLACE_ONE)
    assert bounds.best == bounds.pld <= 2.0 < bounds.rdp / 2


def test_what_cannot_be_trusted_is_left_to_the_theorem():
    # Deltas that small are lost in the rounding of Fourier transforms; so many rows would take long.
    assert epsilon_bounds(poisson_rows_event(0.1, 5.0, 3, 10), 1e-11, Adjacency.REPLACE_ONE).pld is None
    many = epsilon_bounds(poisson_rows_event(0.001, 50.0, 501, 1), 1e-5, Adjacency.REPLACE_ONE)
    assert many.pld is None and math.isfinite(many.rdp)


@pytest.mark.parametrize(
    ("noise", "rate", "rows", "steps"),
    [(1.0, 1.0, 41, 1), (3.0, 1.0, 200, 100), (0.06, 1e-3, 2, 1), (1.0, 0.3, 2, 10_000), (0.1, 0.03, 200, 100)],
)
def test_too_little_noise_is_an_answer_and_no_error(noise, rate, rows, steps):
    bounds = epsilon_bounds(poisson_rows_event(rate, noise, rows, steps), 1e-6, Adjacency.REPLACE_ONE)
    assert bounds.best == min(bound for bound in (bounds.rdp, bounds.pld) if bound is not None) > 0


def test_hockey_stick_of_zeros_against_the_mixture_at_large_losses():
    # By quadrature with 40 digits: a difference of nearly equal numbers would be off by half.
    with mpmath.workdps(40):
        noise, rows, rate, loss = 10, 41, mpmath.mpf("0.5"), 11
        shares = [mpmath.binomial(rows, k) * rate**k * (1 - rate) ** (rows - k) for k in range(rows + 1)]

        def ratio(x):
            return mpmath.log(
                sum(p * mpmath.exp((k * x - mpmath.mpf(k) ** 2 / 2) / noise**2) for k, p in enumerate(shares))
            )

        end = mpmath.findroot(lambda x: ratio(x) + loss, -40)
        other = sum(p * mpmath.ncdf((end - k) / noise) for k, p in enumerate(shares))
        expected = float(mpmath.ncdf(end / noise) - mpmath.exp(loss) * other)
    found = _Mixture(noise, 0.5, rows).unzeroed(np.array([float(loss)]))[0]
    # A sum over all rows of probabilities whose logarithms are below 25, and so 25 times as rounded.
    assert found == pytest.approx(expected, rel=gamma(rows + 25 * 2 * ELEMENTARY, np.float64))
