"""Compares what two engines return: the same containers, the same types, and numbers close to each other."""

import attrs
import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues

TOLERANCE = 1e-5


def largest_difference(result, expected, where="result"):
    """The largest `|a - b| / (1e-3 + |b|)` over all leaves, with b from the engine that is taken as right.

    Raises:
      AssertionError: containers, names, dtypes, shapes, or anything else than numbers differ; the message says where.
    """
    if isinstance(expected, tf.data.Dataset | ClientValues) or isinstance(result, tf.data.Dataset | ClientValues):
        # One engine's data set or clients' values are another's list.
        result, expected = list(result), list(expected)
    parts = _members(expected)
    if parts is None:
        return _leaf_difference(result, expected, where)
    assert _kind(result) == _kind(expected), f"{where}: {type(result)}, not {type(expected)}"
    own = _members(result)
    assert list(own) == list(parts), f"{where}: members {list(own)}, not {list(parts)}"
    return max((largest_difference(own[name], parts[name], f"{where}.{name}") for name in parts), default=0.0)


def assert_same(result, expected, tolerance=TOLERANCE):
    """Fails where two results differ by more than the tolerance, see `largest_difference`; returns the difference."""
    difference = largest_difference(result, expected)
    assert difference <= tolerance, f"{difference:.3g} > {tolerance:.3g}:\n{result}\nnot\n{expected}"
    return difference


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


def _leaf_difference(result, expected, where):
    result, expected = np.asarray(result), np.asarray(expected)
    if expected.dtype.kind in "SUO":
        assert result.tolist() == expected.tolist(), f"{where}: {result}, not {expected}"
        return 0.0
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), (
        f"{where}: {result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"
    )
    if not expected.size:
        return 0.0
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    result, expected = result.astype(wide), expected.astype(wide)
    same = (result == expected) | (np.isnan(result) & np.isnan(expected))  # Infinities among them.
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(result - expected) / (1e-3 + np.abs(expected)))
    assert not np.isnan(differences).any(), f"{where}: {result}, not {expected}"
    return float(differences.max())
