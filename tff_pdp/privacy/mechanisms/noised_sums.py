"""Noised sums that the host computes: parts on a grid, added up as whole numbers, with noise on the same grid.

A step of the grid is `stddev * 2**-GRID_BITS`. Noise of K = floor(G * 2**GRID_BITS) steps, G an ideal standard
Gaussian, makes of a sum of whole steps the sum plus `stddev * G`, rounded down to whole steps: post-processing of the
ideal mechanism, which costs nothing more. Parts are rounded toward zero before they are added up, so that none of them
gets larger, and whole numbers add up without rounding.
"""

from fractions import Fraction

import numpy as np

from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws

# What parts, and the noise's standard deviation, are allowed to have been rounded by before, as a share.
_ROUNDED = 2.0**-48
# Sums below it are added up as int64.
_LARGEST = 2.0**62


def whole_steps(parts: np.ndarray, stddev: float) -> np.ndarray:
    """Adds up parts over the first axis, each rounded toward zero to whole steps: Python's integers, dtype object.

    Guarantee: a part's steps are at most `(1 - 2**-49)` times the part, so that what float64 rounds in computing a
      part, by some units in its last place, and in computing the standard deviation does not exceed the sensitivity.
    Assumes: the parts are finite, and each depends on its own record alone.

    Args:
      parts: float64 `[n, ...]`; n may be 0.
      stddev: of the noise on the sum; positive.
    """
    shrunk = parts * (1 - _ROUNDED)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = np.trunc(shrunk / (stddev * 2.0**-GRID_BITS))
    if (np.abs(steps) * max(1, len(parts)) < _LARGEST).all():
        return np.asarray(steps.astype(np.int64).sum(axis=0)).astype(object)
    step = Fraction(stddev) / 2**GRID_BITS
    exact = np.array([int(Fraction(part) / step) for part in shrunk.ravel().tolist()], object)
    return np.asarray(exact.reshape(parts.shape).sum(axis=0), object)


def add_noise(steps: np.ndarray, stddev: float, draws: ExactDraws) -> np.ndarray:
    """Adds noise to a sum of whole steps: float64 of the same shape.

    Guarantee: a function of `sum + stddev * G`, with an ideal standard Gaussian G for each value, and of nothing else.
    Assumes: as `ExactDraws`.

    Args:
      steps: of `whole_steps`.
      stddev: with which the steps were made.
      draws: of a secret key that serves nothing else.
    """
    noised = steps.ravel() + draws.gaussian_floor(steps.size).astype(object)
    # In the middle of a step: the noise is a half less than a Gaussian on average.
    return (2 * noised + 1).astype(np.float64).reshape(steps.shape) * (stddev * 2.0 ** -(GRID_BITS + 1))
