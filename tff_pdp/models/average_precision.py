"""Computes average precision, the area under the precision-recall curve as a sum of steps, for tensors and for arrays.

`AP = sum_k (R_k - R_{k-1}) P_k` over the distinct scores, largest first. P_k and R_k are precision and recall if the
prediction is positive for all scores that are at least the k-th. Nothing is interpolated, and equal scores are one
threshold, as in scikit-learn's `average_precision_score`. Each positive example adds one step of recall, so AP is the
mean, over the positive examples, of the precision at their own scores; this module computes this mean.

A score of NaN ranks last, like minus infinity: a model must not gain by predicting NaN.
"""

import numpy as np
import tensorflow as tf

from tff_pdp.models.metrics import AVERAGE_PRECISION, Ranking


def average_precision(scores: tf.Tensor, y: tf.Tensor, included: tf.Tensor) -> tf.Tensor:
    """Computes average precision over the last axis: float32 `[...]`; NaN where no included example is positive.

    Args:
      scores: float `[..., n]`, n at least 1.
      y: `[..., n]`, 1 for positive examples and 0 for others.
      included: bool `[..., n]`, false for examples that are left out.
    """
    # Examples that do not count go last, too, so that they do not come between the others.
    ranked = tf.logical_and(included, tf.logical_not(tf.math.is_nan(scores)))
    keys = tf.where(ranked, scores, tf.constant(-np.inf, scores.dtype))
    order = tf.argsort(keys, axis=-1, direction="DESCENDING")
    is_positive = tf.logical_and(included, tf.equal(y, tf.ones([], y.dtype)))

    def in_order(values: tf.Tensor) -> tf.Tensor:
        return tf.gather(values, order, batch_dims=order.shape.rank - 1)

    # Equal scores are one threshold, at the last of their places.
    ascending = -in_order(keys)
    last = tf.searchsorted(ascending, ascending, side="right") - 1

    def up_to_last(counted: tf.Tensor) -> tf.Tensor:
        return tf.gather(tf.cumsum(counted, axis=-1), last, batch_dims=last.shape.rank - 1)

    # In float64, where counts are exact.
    positive, counted = (in_order(tf.cast(which, tf.float64)) for which in (is_positive, included))
    precision = tf.math.divide_no_nan(up_to_last(positive), up_to_last(counted))
    return tf.cast(tf.reduce_sum(positive * precision, axis=-1) / tf.reduce_sum(positive, axis=-1), tf.float32)


def average_precision_of_arrays(scores: np.ndarray, y: np.ndarray) -> float:
    """Computes average precision of all examples; NaN if no example is positive.

    Args:
      scores: float `[n]`; n may be 0.
      y: `[n]`, 1 for positive examples and 0 for others.
    """
    keys = np.where(np.isnan(scores), -np.inf, scores)
    is_positive = np.asarray(y) == 1
    if not is_positive.any():
        return float("nan")
    # One row for each distinct score, smallest first.
    _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    positives = np.bincount(group, weights=is_positive, minlength=len(sizes))[::-1]
    precision = np.cumsum(positives) / np.cumsum(sizes[::-1])
    return float(np.sum(positives * precision) / np.sum(positives))


RANKING = Ranking(AVERAGE_PRECISION, average_precision, average_precision_of_arrays)
