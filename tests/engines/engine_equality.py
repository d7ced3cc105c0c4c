"""Compares the results of two engines: the same containers, the same types, and numbers equal up to rounding.

Engines may take the terms of a sum in another order, and TensorFlow's builds have other kernels for the same operation.
So either result may be off by the roundings on the way to it, relative to the magnitudes of what is added up.
"""

import attrs
import numpy as np
import tensorflow as tf

from tests.rounding import probable_gamma
from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues

# Roundings in a row in a case of these tests: sums of a few dozen numbers, a quotient, an elementary function.
OPERATIONS = 64
# No number that a case starts with is larger: they are whole numbers, or four deviations of 10.
LARGEST_INPUT = 40.0


def assert_same(result, expected, operations=OPERATIONS, magnitude=LARGEST_INPUT):
    """Fails where two results differ by more than rounding explains.

    Args:
      result: of one engine.
      expected: of the engine that is taken as right.
      operations: roundings in a row that lead to a number.
      magnitude: of the largest number that is added up, unless the result itself is larger.

    Returns:
      The largest share of its bound that a difference takes.

    Raises:
      AssertionError: numbers differ by more, or containers, names, dtypes, shapes or texts at all; the message says
        where.
    """
    return _largest_share(result, expected, operations, magnitude, "result")


def largest_float(value):
    """Returns the largest magnitude of all floats of a nest of arrays."""
    parts = _members(list(value) if isinstance(value, tf.data.Dataset | ClientValues) else value)
    if parts is not None:
        return max(map(largest_float, parts.values()), default=0.0)
    array = np.asarray(value)
    return float(np.abs(array).max()) if array.dtype.kind == "f" and array.size else 0.0


def _largest_share(result, expected, operations, magnitude, where):
    if isinstance(expected, tf.data.Dataset | ClientValues) or isinstance(result, tf.data.Dataset | ClientValues):
        # One engine's data set or clients' values are another's list.
        result, expected = list(result), list(expected)
    parts = _members(expected)
    if parts is None:
        return _share_of_leaf(np.asarray(result), np.asarray(expected), operations, magnitude, where)
    assert _kind(result) == _kind(expected), f"{where}: {type(result)}, not {type(expected)}"
    own = _members(result)
    assert list(own) == list(parts), f"{where}: members {list(own)}, not {list(parts)}"
    shares = [_largest_share(own[name], parts[name], operations, magnitude, f"{where}.{name}") for name in parts]
    return max(shares, default=0.0)


def _kind(value):
    # Named tuples of the optimizers and queries in tensorflow_privacy are classes made anew for each object.
    # Elements of data sets are in plain dictionaries or in ordered ones.
    return "dict" if isinstance(value, dict) else type(value).__name__


def _members(value):
    if isinstance(value, _tff.Struct):
        return {name or index: member for index, (name, member) in enumerate(_tff.to_elements(value))}
    if isinstance(value, dict):
        return value
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if attrs.has(type(value)):
        return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
    return None


def _share_of_leaf(result, expected, operations, magnitude, where):
    described = f"{where}: {result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"
    if expected.dtype.kind in "SUO":
        assert result.tolist() == expected.tolist(), f"{where}: {result}, not {expected}"
        return 0.0
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), described
    if expected.dtype.kind not in "fc":
        np.testing.assert_array_equal(result, expected, err_msg=where)
        return 0.0
    is_finite = np.isfinite(expected)
    largest = max(magnitude, np.abs(expected[is_finite]).max(initial=0.0))
    # Each of the two may be off.
    bound = 2 * probable_gamma(operations, expected.dtype) * largest
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=where)
    return float(np.abs(result[is_finite] - expected[is_finite]).max(initial=0.0) / bound)
