import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws
from tff_pdp.privacy.synthetic.conditional import ExampleNetwork, noised_counts, noised_sum, one_hot, to_unit
from tff_pdp.privacy.synthetic.gaussian import DpGaussian

INF, NAN = math.inf, math.nan


def draws_of(key=b"a key of conditional networks"):
    return ExactDraws(key)


def test_features_are_clipped_and_mapped_to_the_unit_range():
    settings = DpGaussian(examples=1, low=-2.0, high=2.0)
    x = np.array([[[-2.0, 2.0], [0.0, 1.0]], [[NAN, INF], [-INF, 1e300]]])
    assert to_unit(x, settings).tolist() == [[0, 1, 0.5, 0.75], [0.5, 1, 0, 1]]
    assert to_unit(x, settings).dtype == np.float32 and to_unit(x[:0], settings).shape == (0, 4)


@pytest.mark.parametrize(("squared", "noise_multiplier"), [(1, 0.3), (1, 1234.5), (300, 19.7441), (1200, 23.094)])
def test_a_sum_of_whole_numbers_moves_by_no_more_than_the_sensitivity(squared, noise_multiplier):
    zeros, other = (noised_sum(np.array([value]), squared, noise_multiplier, draws_of()) for value in (0, 1))
    assert (other - zeros)[0] == pytest.approx(1, rel=1e-9)
    noise = noised_sum(np.zeros(4000, int), squared, noise_multiplier, draws_of())
    stddev = noise_multiplier * math.sqrt(squared)
    assert noise.std() == pytest.approx(stddev, rel=5 / math.sqrt(8000))
    # One whole number is worth this many steps of the grid: the most that the sensitivity allows.
    least = int(2**GRID_BITS / stddev) - 5
    steps = next(one for one in itertools.count(least) if not allowed(one + 1, squared, noise_multiplier))
    assert allowed(steps, squared, noise_multiplier)
    # Results are odd numbers of half steps.
    halves = noise * 2 * steps
    assert np.abs(halves - np.rint(halves)).max() < 1e-4 and (np.rint(halves) % 2 == 1).all()


def allowed(steps, squared, noise_multiplier):
    """A change by the root of `squared` is at most one, in the unit in which noise has the deviation z; exactly."""
    change = steps * Fraction(noise_multiplier) / 2**GRID_BITS
    return change**2 * squared <= 1


def test_noise_as_large_as_the_grid_allows_is_refused():
    for noise_multiplier in (0.0, 1e4, NAN):
        with pytest.raises(ConfigError, match="the standard deviation of the noise"):
            noised_sum(np.zeros(2, int), 10**8, noise_multiplier, draws_of())


def test_counts_that_noise_explains_are_zero():
    y = np.array([0] * 500 + [2] * 40 + [4] * 3)
    counts = noised_counts(y, 6, 2.0, draws_of())
    assert counts[[1, 3, 4, 5]].tolist() == [0] * 4
    assert counts[[0, 2]] == pytest.approx([500, 40], abs=10)
    with pytest.raises(DataError, match=r"a noised count above 8, .* The release has been made"):
        noised_counts(y[-3:], 6, 2.0, draws_of())


def test_the_network_makes_as_many_examples_as_asked_for():
    settings = DpGaussian(examples=5000, num_classes=3, low=-1.0, high=3.0)
    made = [
        ExampleNetwork(6, 3, 4, (5,), 1e-3, draws_of()).synthetic(np.array([1.0, 0, 3]), (2, 3), settings)
        for _ in range(2)
    ]
    assert made[0].x.shape == (5000, 2, 3) and np.bincount(made[0].y, minlength=3).tolist() == [1250, 0, 3750]
    assert made[0].x.min() > -1 and made[0].x.max() < 3 and made[0].x.std(axis=0).min() > 0
    assert (made[0].x == made[1].x).all() and (made[0].y == made[1].y).all()


def test_inputs_are_latent_numbers_and_classes():
    inputs = ExampleNetwork(6, 3, 4, (5,), 1e-3, draws_of()).inputs(np.array([2, 0] * 500))
    assert inputs.shape == (1000, 7) and (inputs[:, 4:] == one_hot(np.array([2, 0] * 500), 3)).all()
    assert np.abs(inputs[:, :4]).max() <= 1 and abs(inputs[:, :4].mean()) < 5 * math.sqrt(1 / 3 / 4000)
