"""Bounds on rounding errors: how far two right answers may lie apart, from operations, magnitudes and precision.

The model is that of Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002: each operation on numbers
of a type is exact up to a relative error of its unit roundoff u, in whatever order a processor or a library takes the
terms of a sum, and fused or not. So a bound holds on every machine.
"""

import numpy as np


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
