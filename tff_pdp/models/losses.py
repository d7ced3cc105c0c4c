"""Defines losses and metrics that a configuration chooses by name, besides those in `base` and `metrics`.

Each is a function `(outputs, y, *, settings) -> float32 [batch]`, one number for each example; its keyword-only
parameters are settings. So are those from outside of this package. Outputs are logits `[batch, num_classes]`, with
labels int64 `[batch]`, or values `[batch]` of a regression, with labels float32 `[batch]`.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import tensorflow as tf
from msgspec import Meta

from tff_pdp.settings import Count, Positive

_Function = TypeVar("_Function", bound=Callable[..., tf.Tensor])


def lower_is_better(figure: _Function) -> _Function:
    """Marks a metric whose smaller values are better; returns the same function."""
    figure.lower_is_better = True  # pyright: ignore[reportFunctionMemberAccess]
    return figure


@lower_is_better
def absolute_error(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the absolute error of a regression for each example: float32 `[batch]`.

    >>> absolute_error(tf.constant([1.0, 5.0]), tf.constant([3.0, 4.5])).numpy().tolist()
    [2.0, 0.5]
    """
    return tf.abs(outputs - y)


def huber(outputs: tf.Tensor, y: tf.Tensor, *, delta: Positive = 1.0) -> tf.Tensor:
    """Returns half the squared error, or beyond `delta` the tangent of this parabola: float32 `[batch]`.

    Source: Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 1964.

    Args:
      outputs: values of a regression, `[batch]`.
      y: labels, `[batch]`.
      delta: absolute error from which the loss is linear, in units of the labels.

    >>> huber(tf.constant([1.0, 5.0]), tf.constant([3.0, 4.5])).numpy().tolist()
    [1.5, 0.125]
    """
    error = tf.abs(outputs - y)
    return tf.where(error <= delta, 0.5 * tf.square(error), delta * (error - 0.5 * delta))


def pinball(outputs: tf.Tensor, y: tf.Tensor, *, quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.5) -> tf.Tensor:
    """Returns the loss whose smallest mean is at a quantile of the labels: float32 `[batch]`.

    Source: Koenker and Bassett, "Regression Quantiles", Econometrica 1978.

    Args:
      outputs: values of a regression, `[batch]`.
      y: labels, `[batch]`.
      quantile: share of labels below the prediction that the loss aims at.

    >>> pinball(tf.constant([1.0, 5.0]), tf.constant([3.0, 4.5]), quantile=0.75).numpy().tolist()
    [1.5, 0.125]
    """
    missing = y - outputs
    return tf.maximum(quantile * missing, (quantile - 1.0) * missing)


def binary_cross_entropy(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the cross entropy of a classifier of two classes, from the difference of its logits: float32 `[batch]`.

    >>> round(float(binary_cross_entropy(tf.zeros([1, 2]), tf.constant([1], tf.int64))[0]), 4)
    0.6931
    """
    signs = tf.cast(2 * y - 1, outputs.dtype)
    return tf.nn.softplus(-signs * (outputs[:, 1] - outputs[:, 0]))


def top_k_accuracy(outputs: tf.Tensor, y: tf.Tensor, *, k: Count = 5) -> tf.Tensor:
    """Returns 1 for examples with fewer than k classes ahead of the label's class, else 0: float32 `[batch]`.

    Args:
      outputs: logits, `[batch, num_classes]`.
      y: labels, int64 `[batch]`.
      k: number of classes among which the label's class has to be.

    >>> top_k_accuracy(tf.constant([[3.0, 1.0, 2.0]] * 2), tf.constant([1, 2], tf.int64), k=2).numpy().tolist()
    [0.0, 1.0]
    """
    own = tf.gather(outputs, y, batch_dims=1)
    ahead = tf.reduce_sum(tf.cast(outputs > own[:, tf.newaxis], tf.float32), axis=1)
    return tf.cast(tf.logical_and(ahead < float(k), tf.math.is_finite(own)), tf.float32)
