"""Defines the two image classifiers in TensorFlow, as functions of a list of weights in the workload's order."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def mean_loss(model: str, weights: Sequence[Any], x: Any, y: Any) -> Any:
    """Returns the softmax cross-entropy of a model, averaged over the batch."""
    return batch_loss(predict(model, weights, x), y)


def batch_loss(logits: Any, y: Any) -> Any:
    """Returns the softmax cross-entropy of logits `[batch, classes]`, averaged over the batch."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def predict(model: str, weights: Sequence[Any], x: Any) -> Any:
    """Returns the logits `[batch, classes]` of the `cnn` or the `mlp`."""
    if model == "cnn":
        *convolutions, dense_kernel, dense_bias, head_kernel, head_bias = weights
        for kernel, bias in zip(convolutions[::2], convolutions[1::2], strict=True):
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=1, padding="VALID") + bias)
        x = tf.nn.max_pool2d(x, ksize=2, strides=2, padding="VALID")
        # Only one dimension may be -1: the size of a client's batch may be unknown.
        x = tf.reshape(x, [-1, 12 * 12 * 64])
    else:
        dense_kernel, dense_bias, head_kernel, head_bias = weights
    return tf.nn.relu(x @ dense_kernel + dense_bias) @ head_kernel + head_bias
