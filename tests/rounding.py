"""Bounds on rounding errors: how far two right answers may lie apart, from operations, magnitudes and precision.

The model is that of Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002: each operation on numbers
of a type is exact up to a relative error of its unit roundoff u, in whatever order a processor or a library takes the
terms of a sum, and fused or not. So a bound holds on every machine.

Two cases need no name where they stand. Comparisons with no bound given, `pytest.approx(x)` with its 1e-6 and
`assert_allclose` with its 1e-7 of the expected value, are of a few operations on Python's or NumPy's float64, whose own
error is below 1e-12. And the error of a sum whose terms have both signs is bounded by `gamma(n)` times the largest of
many such sums, as of a network with drawn weights: each of its n additions errs by u times a partial sum at most
(Higham 2002, equation 4.3), and partial sums are not larger than such sums get. Of layers after one another the n add
up.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from scipy import stats

# Roundings that exp, log, tanh, erf, pow, sine and cosine each count as, for libraries do not round them correctly:
# the CUDA C++ Programming Guide states up to 4 units in the last place of float32, 8 u; those for processors err less.
ELEMENTARY = 8


def unit_roundoff(dtype=np.float32) -> float:
    """Returns u, half the distance from 1 to the next number of the type: 2**-24 of float32, 2**-53 of float64.

    >>> unit_roundoff() == 2**-24
    True
    """
    return float(np.finfo(dtype).eps) / 2


def gamma(operations: int, dtype=np.float32) -> float:
    """Returns gamma_n = n u / (1 - n u), the relative error of n roundings in a row (Higham 2002, lemma 3.1).

    It bounds the error of a product of n factors, and of a sum or an inner product of n terms over the sum of its
    terms' magnitudes (Higham 2002, section 3.1), which is the result itself where all terms have one sign. Two
    computations of one number, both rounded, differ by at most the sum of their two bounds.

    Raises:
      ValueError: so many operations that nothing is left of the type's precision.

    >>> 59e-8 < gamma(10) < 60e-8
    True
    """
    error = operations * unit_roundoff(dtype)
    if not error < 1:
        raise ValueError(f"{operations} roundings leave no digit of {np.dtype(dtype)}")
    return error / (1 - error)


def probable_gamma(operations: int, dtype=np.float32, chance: float = 1e-9) -> float:
    """Returns a bound on the relative error of n roundings in a row that holds but for a small chance.

    Roundings that are independent and of mean zero add up like a random walk: their product with 1 lies within
    exp(lambda sqrt(n) u + n u^2 / (1 - u)) - 1, but for a chance of 2 n exp(-lambda^2 (1 - u)^2 / 2) over all partial
    results (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5),
    2019, theorems 2.4 and 3.1). For long chains, where `gamma` would let faults pass.

    >>> gamma(10_000) > 10 * probable_gamma(10_000)
    True
    """
    u = unit_roundoff(dtype)
    width = math.sqrt(2 * math.log(2 * operations / chance)) / (1 - u)
    return math.expm1(width * math.sqrt(operations) * u + operations * u**2 / (1 - u))


def standard_errors(comparisons: int = 1, alarm: float = 1e-6) -> float:
    """Returns how many standard errors right estimates stay within, but for a share of `alarm` of all seeds.

    The estimates are means, or other sums of so many draws that they are close to normal. Bonferroni's inequality
    covers several comparisons at once. Tests have fixed seeds, whose bits are the same everywhere: what passes once
    passes always. So a test may also write its factor out, as 3, 4 or 5, which chance exceeds in 3e-3, 6e-5 and 6e-7.

    >>> round(standard_errors(), 2), round(standard_errors(100), 2)
    (4.89, 5.73)
    """
    return float(stats.norm.isf(alarm / comparisons / 2))


def half_a_digit(printed: str) -> float:
    """Returns half a unit of a printed number's last digit, which is how far rounding may have moved the number.

    >>> half_a_digit("13.2855") == 5e-5, half_a_digit("4.4235e-4") == 5e-9
    (True, True)
    """
    return float(Decimal(5).scaleb(Decimal(printed).as_tuple().exponent - 1))


def network_roundings(weights: Mapping[str, Any], examples: int = 1, positions: int = 1) -> int:
    """Returns how many roundings follow one another from a network's input to its loss, and back to gradients.

    Forward, a layer sums over its window and inputs; back, over its window and outputs; its bias and its activation
    round three times more. A normalisation sums over positions and channels, for a mean and a variance, which count
    twice each on both ways. In the end come the loss and a sum over examples and positions.

    Args:
      weights: by name, in the order of the network: kernels `[..., in, out]`, scales `[channels]`.
      examples: that a gradient is a sum over.
      positions: at most, that a layer is applied at.

    >>> network_roundings({"kernel": np.zeros([3, 2])}) == (3 + 3) + (2 + 3) + 3 * ELEMENTARY + 1
    True
    """
    total = 3 * ELEMENTARY + examples * positions
    for name, value in weights.items():
        *window, inputs, outputs = (1, 1, *value.shape) if value.shape else (1, 1, 1)
        if len(value.shape) > 1:
            total += math.prod(window) * (inputs + outputs) + 6
        elif name.endswith("scale"):
            total += 8 * positions * outputs
    return total


def assert_within(actual, desired, bounds) -> None:
    """Asserts that numbers differ by no more than bounds of their own, where `assert_allclose` takes one for all.

    >>> assert_within([1.0, 2.0], [1.0, 2.5], [0.0, 0.5])
    """
    differences = np.abs(np.asarray(actual, np.float64) - np.asarray(desired, np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(differences == 0, 0.0, differences / bounds)
    np.testing.assert_allclose(shares, np.zeros_like(shares), atol=1.0, err_msg="differences over their bounds")


def as_printed(figure: str, relative: float = 0.0):
    """Returns what compares equal to a number that was printed with so many digits; something may come to that.

    Args:
      figure: as it was printed.
      relative: of the number, what its own computation or rounded inputs move it by.

    >>> 1.4964 == as_printed("1.50"), 1.4949 == as_printed("1.50")
    (True, False)
    """
    return pytest.approx(float(figure), abs=half_a_digit(figure) + relative * abs(float(figure)))
