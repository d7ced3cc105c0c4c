"""Networks in float64, beside Keras and beside each other: there no fault hides behind thousands of roundings."""

import contextlib

import numpy as np
import tensorflow as tf

from tests.rounding import gamma, network_roundings
from tff_pdp.privacy.mechanisms.per_example import _gradients_and_norms, _in_blocks


@contextlib.contextmanager
def keras_in_float64():
    """Layers that are made inside have weights in float64."""
    tf.keras.backend.set_floatx("float64")
    try:
        yield
    finally:
        tf.keras.backend.set_floatx("float32")


def in_float64(weights):
    return {name: tf.cast(array, tf.float64) for name, array in weights.items()}


def rounding(weights, values, **sizes):
    """How far two networks may lie apart in float64, of values that both compute; sizes as of `network_roundings`."""
    return 2 * gamma(network_roundings(weights, **sizes), np.float64) * np.abs(values).max()


def per_example_norms(model, weights, x, y):
    """The norms that `clipped_sum` clips by, `[batch]`: at least those of the examples' gradients over all weights."""
    _, norms = _gradients_and_norms(model, weights, _in_blocks(x), _in_blocks(y), None)
    return norms[: len(y)]
