"""Sums of the host on a grid: whole steps that are never longer than their parts, and noise in whole steps."""

from fractions import Fraction

import numpy as np
import pytest

from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws, add_noise, whole_steps

KEY = bytes(range(32))


def exact_steps(parts, stddev):
    """By fractions: each part a little smaller, then toward zero."""
    step = Fraction(stddev) / 2**GRID_BITS
    return [int(Fraction(part * (1 - 2.0**-48)) / step) for part in parts]


@pytest.mark.parametrize("stddev", [1e-320, 1e-15, 0.1, 1.0, 2.0**20, 3e7])
def test_parts_are_rounded_toward_zero_and_added_up_as_whole_numbers(stddev):
    parts = np.random.default_rng(0).normal(size=300) * np.float64(10.0) ** np.random.default_rng(1).integers(
        -9, 3, 300
    )
    total = int(whole_steps(parts, stddev))
    # Division in float64 may miss a step by its last place, below the part all the same.
    assert abs(total - sum(exact_steps(parts, stddev))) <= 300
    for part in parts[:50]:
        steps = int(whole_steps(np.array([part]), stddev))
        assert abs(steps) * Fraction(stddev) / 2**GRID_BITS <= abs(Fraction(part)) * (1 - Fraction(1, 2**49))
    assert (
        total
        == int(whole_steps(parts[::-1], stddev))
        == int(whole_steps(parts[:7], stddev) + whole_steps(parts[7:], stddev))
    )


def test_one_part_more_changes_a_sum_by_that_parts_steps():
    parts = np.random.default_rng(0).normal(size=(100, 2, 3))
    whole = whole_steps(parts, 0.7)
    assert whole.shape == (2, 3) and whole.dtype == object
    for row in range(0, 100, 7):
        without = whole_steps(np.delete(parts, row, axis=0), 0.7)
        assert (whole - without == whole_steps(parts[row : row + 1], 0.7)).all()
    assert (whole_steps(parts[:0], 0.7) == 0).all()


@pytest.mark.parametrize("stddev", [0.3, 2.0, 1e9])
def test_noise_is_a_rounded_gaussian_in_whole_steps_and_half_a_step(stddev):
    steps = np.array([[0, 5], [-(2**70), 2**40]], object)
    noise = ExactDraws(KEY).gaussian_floor(4).reshape(2, 2)
    found = add_noise(steps, stddev, ExactDraws(KEY))
    for place in np.ndindex(2, 2):
        exact = (steps[place] + int(noise[place]) + Fraction(1, 2)) * Fraction(stddev) / 2**GRID_BITS
        # Two roundings, of the whole number and of the product.
        assert abs(Fraction(found[place]) - exact) <= abs(exact) * Fraction(1, 2**51)
    assert found.dtype == np.float64
    # A sum without axes is one number.
    assert add_noise(whole_steps(np.zeros(3), stddev), stddev, ExactDraws(KEY)).shape == ()
