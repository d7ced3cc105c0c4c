"""Attacks on noised sums that look at the places of single numbers, and so do not care how large the noise is.

An attacker sees released values, float32 `[cases, values]`, which are `unit` times a noised sum, and has hypotheses
about the sum before noise, `[hypotheses, values]`. All constants of the mechanism are known, seeds are not. A score is
the logarithm of a likelihood ratio: how much better a hypothesis fits than noise without a lattice would.

Sources: Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012, for values on
coarser grids; Holohan and Braghin, "Secure Random Sampling in Differential Privacy", ESORICS 2021, and Jin et al.,
"Are We There Yet? Timing and Floating-Point Attacks on Differential Privacy Systems", S&P 2022, for Box and Muller's.
"""

import math
from collections.abc import Iterator

import numpy as np

# Relative error of float32.
_ULP = 2.0**-24
_TURN = np.float32(2.0 * math.pi * 2.0**-24)
_ANGLES = 2**24
# Variances, in squares of `_ULP`, of a rounding and of what rounding, cosine and products did to a coordinate of noise.
_OF_ROUNDING, _OF_NOISE = 0.17, 0.6
# The share of values that rounding may have moved further than the model says.
_STRAY = 0.01
# So many values are enough for their residues.
_RESIDUES = 512
# As many numbers are in memory at once.
_AT_ONCE = 2**21
# A coordinate is small where the noise all but cancels a sum that is so many times as large.
_SMALL = 8.0


def pairings(size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the ways in which a layout could pair coordinates: halves, with padding or without, and neighbours."""
    for offset in sorted({math.ceil(size / 2), 2 * math.ceil(size / 4)}):
        first = np.arange(size - offset)
        yield first, first + offset
    first = np.arange(0, size - 1, 2)
    yield first, first + 1


def angle_scores(released: np.ndarray, sums: np.ndarray, *, unit: float = 1.0, roundings: int = 1) -> np.ndarray:
    """Scores hypotheses by how close directions of pairs of noise are to those that a float32 angle can have.

    Args:
      released: `[cases, values]`.
      sums: `[hypotheses, values]`.
      unit: what a noised sum is multiplied by.
      roundings: of a released value, from the addition of the noise on.

    Returns:
      `[cases, hypotheses]`, each of the best of all pairings.
    """
    values = released.astype(np.float64) / unit
    scores = np.full((len(values), len(sums)), -math.inf)
    for first, second in pairings(values.shape[1]):
        chunk = max(1, _AT_ONCE // (len(sums) * len(first)))
        for start in range(0, len(values), chunk):
            own = values[start : start + chunk, np.newaxis]
            ratios = _angle_ratios(own - sums, own, first, second, roundings)
            scores[start : start + chunk] = np.maximum(scores[start : start + chunk], ratios.sum(axis=-1))
    return scores


def _angle_ratios(
    noise: np.ndarray, values: np.ndarray, first: np.ndarray, second: np.ndarray, roundings: int
) -> np.ndarray:
    x, y = noise[..., first], noise[..., second]
    variance_x = _OF_NOISE * x**2 + _OF_ROUNDING * roundings * values[..., first] ** 2
    variance_y = _OF_NOISE * y**2 + _OF_ROUNDING * roundings * values[..., second] ** 2
    square = np.maximum(x**2 + y**2, 1e-300)
    # What is closer than this to an angle is close by chance.
    precision = square / (_ULP * np.sqrt(x**2 * variance_y + y**2 * variance_x) + 1e-12 * square)
    angle = np.arctan2(y, x)
    angle += np.where(angle < 0, 2 * math.pi, 0.0)
    nearest = np.rint(angle / float(_TURN))
    density = np.zeros_like(angle)
    # An angle of the lattice is a rounded product itself, by up to more than half a place.
    for step in (-2, -1, 0, 1, 2):
        number = np.clip(nearest + step, 0, _ANGLES - 1)
        is_own = number == nearest + step
        lattice = (number.astype(np.float32) * _TURN).astype(np.float64)
        density += np.where(is_own, np.exp(-0.5 * ((angle - lattice) * precision) ** 2), 0.0)
    return np.log(_STRAY + (1 - _STRAY) * float(_TURN) / math.sqrt(2 * math.pi) * precision * density)


def cohort_sums(updates: np.ndarray) -> np.ndarray:
    """Returns the sum of each cohort of users, `[2**users, values]`; the bits of a cohort's number are its users."""
    sums = np.zeros((1, updates.shape[1]))
    for update in updates.astype(np.float64):
        sums = np.concatenate([sums, sums + update])
    return sums


def rank_of(scores: np.ndarray, hypothesis: int) -> int:
    """Returns how many hypotheses score better than one; those that score the same count half."""
    own = scores[hypothesis]
    return int(np.sum(scores > own) + (np.sum(scores == own) - 1) // 2)


def granularity_margins(
    released: np.ndarray, with_it: np.ndarray, without: np.ndarray, *, unit: float = 1.0, roundings: int = 1
) -> np.ndarray:
    """Decides between two sums by the share of small values that are on a coarse grid; positive is for `with_it`.

    A small value at a place where the sum is large is the difference of two large numbers in float32, so it is a
    multiple of their spacing. Where the sum is nearly zero it has all digits of its own.

    Args:
      released: `[cases, values]`.
      with_it: `[values]`, the sum by one hypothesis.
      without: `[values]`, the sum by the other; places where it is not small beside `with_it` are left out.
      unit: what a noised sum is multiplied by.
      roundings: of a released value, from the addition of the noise on.

    Returns:
      `[cases]`; zero where no value is small.
    """
    values = released.astype(np.float64) / unit
    is_telling = (np.abs(without) <= np.abs(with_it) / 256) & (with_it != 0)
    is_small = is_telling & (np.abs(values) <= np.abs(with_it) / _SMALL)
    grid = np.spacing(np.maximum(np.abs(with_it) * (1 - 1 / _SMALL), 1e-30).astype(np.float32)).astype(np.float64)
    in_steps = values / grid
    # After the addition; half a place each.
    tolerance = (roundings - 1) * _ULP * np.abs(in_steps) + 1e-9
    is_on_grid = np.abs(in_steps - np.rint(in_steps)) <= tolerance
    by_chance = np.spacing(np.abs(values).astype(np.float32)).astype(np.float64) / grid + 2 * tolerance
    counts = np.maximum(is_small.sum(axis=1), 1)
    shares = (is_small * is_on_grid).sum(axis=1) / counts
    thresholds = (is_small * (1 + np.minimum(by_chance, 1)) / 2).sum(axis=1) / counts
    return shares - thresholds


def residue_scores(
    released: np.ndarray, sums: np.ndarray, stddev: float, *, unit: float = 1.0, roundings: int = 1
) -> np.ndarray:
    """Scores hypotheses by whether noise is a whole number of steps, of any step that there could be.

    It finds noise on a grid that was added to a sum which is not on it. Steps are powers of two, and the standard
    deviation over powers of two.

    Returns:
      `[cases, hypotheses]`, each of the best of all steps.
    """
    values = released[:, :_RESIDUES].astype(np.float64) / unit
    error = _ULP * math.sqrt(_OF_ROUNDING * roundings)
    smallest = 16 * error * np.abs(values).max()
    steps = {2.0 ** math.floor(math.log2(stddev)) * 2.0**-place for place in range(24)}
    steps |= {stddev * 2.0**-place for place in range(24)}
    scores = np.full((len(values), len(sums)), -math.inf)
    for step in sorted(step for step in steps if step > smallest):
        for hypothesis, total in enumerate(sums[:, :_RESIDUES]):
            residues = (values - total) / step
            residues -= np.rint(residues)
            # A value without digits below the step has been rounded by nothing.
            spread = error * np.abs(values) / step + 1e-4
            density = np.exp(-0.5 * (residues / spread) ** 2) / (math.sqrt(2 * math.pi) * spread)
            ratios = np.log(_STRAY + (1 - _STRAY) * density).sum(axis=1)
            scores[:, hypothesis] = np.maximum(scores[:, hypothesis], ratios)
    return scores


def lowest_bits(released: np.ndarray) -> np.ndarray:
    """Returns the exponent of each number's lowest bit that is set, int `[...]`; 128 for zero."""
    words = released.astype(np.float32).view(np.int32)
    exponents = (words >> 23) & 0xFF
    significands = np.where(exponents > 0, 2**23, 0) | (words & (2**23 - 1))
    lowest = significands & -significands
    places = np.log2(np.maximum(lowest, 1)).astype(np.int64) + np.maximum(exponents, 1) - 150
    return np.where(significands == 0, 128, places)


def lowest_bits_of_small(released: np.ndarray, with_it: np.ndarray, without: np.ndarray, unit: float) -> np.ndarray:
    """Returns `lowest_bits` of values that are small beside one sum, and the other sum all but zero, in one range.

    Of all that is in so narrow a range, an honest release has each number about as often by either hypothesis. The
    range is one for all places: they are not in it equally often, and its numbers should not tell which they are.
    """
    is_telling = (np.abs(without) <= np.abs(with_it) / 256) & (with_it != 0)
    is_telling &= np.abs(with_it) >= np.quantile(np.abs(with_it[is_telling]), 0.9)
    # As it was before it was multiplied, but for the last place of some.
    places = (released[:, is_telling].astype(np.float64) / unit).astype(np.float32)
    return lowest_bits(places[np.abs(places) <= np.abs(with_it[is_telling]).min() / _SMALL])
