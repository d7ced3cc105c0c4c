"""Adds up records' vectors exactly, by class, and rounds sums to whole steps of the noise's grid.

A record's vector has norm at most 1 and consists of blocks. Each block is a public share times whole numbers, so that
the sums are exact in whatever order records are added.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from tff_pdp.errors import DataError
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS

# Features become whole multiples of 2**-FRACTION_BITS.
FRACTION_BITS = 20
# Classes whose noised count is below this many standard deviations of the noise get no synthetic examples.
_DEVIATIONS = 4


def root(value: Fraction) -> Fraction:
    """Returns the square root, rounded down to a multiple of 2**-60."""
    return Fraction(math.isqrt(value.numerator * 4**60 // value.denominator), 2**60)


def remaining_share(*shares: float) -> float:
    """Returns the share of the sensitivity that others leave, rounded so that all squares sum to at most 1 exactly."""
    rest = 1 - sum(Fraction(share) ** 2 for share in shares)
    share = math.sqrt(rest)
    return share if Fraction(share) ** 2 <= rest else math.nextafter(share, 0)


class ClassSums:
    """Exact numbers of records, and exact sums of whole numbers, by class.

    Attributes:
      counts: Python's integers `[classes]`.
      sums: Python's integers `[classes, values]`.
    """

    def __init__(self, num_classes: int, num_values: int):
        """Begins with zeros."""
        self.counts = np.zeros(num_classes, object)
        self.sums = np.zeros((num_classes, num_values), object)

    def add(self, whole: np.ndarray, labels: np.ndarray) -> None:
        """Adds records.

        Args:
          whole: whole numbers of magnitude at most 2**20, any dtype, `[records, values]`; at most 2**32 records.
          labels: classes `[records]`.
        """
        for label in np.unique(labels).tolist():
            own = whole[labels == label]
            self.counts[label] += len(own)
            self.sums[label] += own.sum(axis=0).astype(np.int64)


def in_parts(
    x: np.ndarray, y: np.ndarray, rows: int, whole: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the whole numbers and labels of up to `rows` records at once, so that memory does not grow with records.

    Args:
      x: examples `[n, ...]`.
      y: classes `[n]`.
      rows: number of records at once.
      whole: examples to whole numbers `[records, values]`; each row a function of its own example alone, to the bit.
    """
    for start in range(0, len(x), rows):
        yield whole(x[start : start + rows]), np.asarray(y[start : start + rows])


def to_steps(blocks: Sequence[tuple[np.ndarray, Fraction]], noise_multiplier: float) -> np.ndarray:
    """Rounds a sum of vectors of norm at most 1 to whole steps of `exact_draws`: Python's integers `[values]`.

    Guarantee: if a record changes the sum by at most 1 in L2 norm, it changes the result by at most 1, in units of the
      sensitivity. Before a sum of D values is rounded to steps, it is scaled down so that a difference of norm 1
      shrinks by at least sqrt(D) steps; rounding can add no more than that to a difference.

    Args:
      blocks: whole numbers `[block values]` and the exact factor of each block; the blocks make up the sum.
      noise_multiplier: standard deviation of the noise that will be added.
    """
    step = Fraction(noise_multiplier) / 2**GRID_BITS
    rounding = Fraction(math.isqrt(sum(len(block) for block, _ in blocks)) + 1) * step
    in_steps = [(1 - rounding) * scale / step for _, scale in blocks]
    pairs = zip(blocks, in_steps, strict=True)
    return np.concatenate([block * scale.numerator // scale.denominator for (block, _), scale in pairs])


def least_count(stddev: float) -> float:
    """Returns the noised count above which a class gets examples; `stddev` is that of the noise on a count."""
    return _DEVIATIONS * stddev


def classes_above_noise(counts: np.ndarray, stddev: float) -> np.ndarray:
    """Returns the classes whose noised count noise alone hardly ever reaches: int64 `[kept]`, ascending.

    Args:
      counts: noised counts `[classes]`.
      stddev: standard deviation of the noise on a count.

    Raises:
      DataError: there is no such class; a function of the release alone.
    """
    least = least_count(stddev)
    kept = np.flatnonzero(counts > least)
    if not len(kept):
        raise DataError(
            f"too few records for this budget: each class needs a noised count above {least:.4g}, which is "
            f"{_DEVIATIONS} standard deviations of the noise, and no class has one. The release has been made: its "
            "cost counts"
        )
    return kept
