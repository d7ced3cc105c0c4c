"""The grid of noise, and pairs of Gaussians, worked out anew: in whole numbers, fractions and 60 digits."""

import math
from collections.abc import Iterable

import mpmath
import numpy as np

# More digits than any comparison asks for.
mpmath.mp.dps = 60
# Both words of a radius are zero: half of the last of 128 digits.
LARGEST_RADIUS = math.sqrt(2 * 129 * math.log(2))
ONES = 2**64 - 1


def public_step(clip_norm: float | np.floating, stddev: float | np.floating) -> float:
    """Returns the largest power of two that is at most 2**-18 of the larger of both.

    >>> public_step(1.0, 0.0) == 2.0**-18, public_step(1.0, 3.99) == 2.0**-17
    (True, True)
    """
    return math.ldexp(0.5, math.frexp(max(float(clip_norm), float(stddev)))[1] - 18)


def on_grid(clip_norm: float, stddev: float, records: int = 1) -> float:
    """Returns how far a value of a sum of clipped users may be from that of users clipped in real numbers.

    Each ends short by a margin of 2**-20 for floating point, and each of its values is rounded by less than a step.
    """
    return records * (clip_norm * 2.0**-20 + public_step(clip_norm, stddev))


def turn_of(angle: int):
    """Returns the angle of a word of 64 bits, an `mpmath` number: a quarter of the circle, and where in it."""
    return mpmath.pi * (angle - 2**61) / 2**63


def exact_pair(high: int, low: int, angle: int) -> tuple:
    """Returns the pair of Gaussians of three words of 64 bits, as `mpmath` numbers.

    The first word's sign says which end of (0, 1) the uniform number of the radius is near, its other bits and the
    second word how near, with half a unit below the last of them.
    """
    near = ONES - high if high >> 63 else high
    distance = (mpmath.mpf(near * 2**64 + low) + 0.5) / mpmath.mpf(2) ** 128
    log = mpmath.log1p(-distance) if high >> 63 else mpmath.log(distance)
    radius, turn = mpmath.sqrt(-2 * log), turn_of(angle)
    return radius * mpmath.cos(turn), radius * mpmath.sin(turn)


def words_of_pairs(pairs: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Returns the words of 32 bits that these pairs' words of 64 are laid out in."""
    words = np.array(list(zip(*pairs, strict=True)), np.uint64)
    return np.stack([words >> np.uint64(32), words & np.uint64(2**32 - 1)], axis=1).astype(np.uint32).ravel()


def pairs_of_words(words: np.ndarray) -> list[tuple[int, int, int]]:
    """Returns the inverse of `words_of_pairs`.

    >>> pairs_of_words(words_of_pairs([(1, 2, 2**40), (ONES, 5, 6)]))
    [(1, 2, 1099511627776), (18446744073709551615, 5, 6)]
    """
    words = np.asarray(words, np.uint64).reshape(3, 2, -1)
    high, low, angle = words[:, 0] << np.uint64(32) | words[:, 1]
    return [(int(h), int(m), int(a)) for h, m, a in zip(high, low, angle, strict=True)]
