"""Batches on their way into a model: perhaps empty, perhaps to be shifted and scaled."""

from typing import Any

import tensorflow as tf


def at_least_one_row(values: tf.Tensor) -> tf.Tensor:
    """`values [batch, ...]`, or one row of zeros: oneDNN's convolutions give an empty batch a wrong shape."""
    if values.shape[0]:
        return values
    missing = tf.maximum(1 - tf.shape(values)[0], 0)
    paddings: Any = [[0, missing], *[[0, 0]] * (values.shape.rank - 1)]
    return tf.pad(values, paddings)


def shift_and_scale(x: tf.Tensor, shift: float, scale: float) -> tf.Tensor:
    """`(x + shift) * scale`, by public constants; no operation where they change nothing."""
    shifted = x + shift if shift != 0 else x
    return shifted * scale if scale != 1 else shifted
