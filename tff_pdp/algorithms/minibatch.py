"""Builds the plain gradient estimator: batches of a fixed size, epoch after epoch, without clip or noise.

The estimator is for training without privacy, and for user-level privacy, which protects a client's whole release.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradientEstimator, map_weights, merge
from tff_pdp.generators import philox
from tff_pdp.models.base import Model, Weights
from tff_pdp.models.dropout import RowDraws

# 32-bit words of the key of a step's dropout masks.
_WORDS_OF_A_KEY = 4


class Minibatches(NamedTuple):
    """Batches `[steps, batch_size]`: row numbers `indices`, int32, and the mask `filled`, bool, false for padding.

    For a model with dropout there are `keys`, too, int64 `[steps, 2]`: the key of each step's masks.
    """

    indices: tf.Tensor
    filled: tf.Tensor
    keys: tf.Tensor | tuple[()] = ()


def build_minibatch(model: Model, batch_size: int) -> GradientEstimator:
    """Builds the estimator, whose result is the mean gradient over a batch.

    Batches are consecutive; the last batch of an epoch may be smaller. The client's seed decides the first batch of a
    round. Examples keep their order: shuffle them when you prepare the data. Dropout masks come from Philox, with a key
    for each step.

    Args:
      model: model whose loss is differentiated.
      batch_size: number of examples in a batch.
    """

    def draw(
        mechanism: Any, num_examples: tf.Tensor, max_examples: tf.Tensor, num_steps: tf.Tensor, seeds: tf.Tensor
    ) -> Minibatches:
        steps_per_epoch = tf.maximum((num_examples + batch_size - 1) // batch_size, 1)
        # Rounds that are shorter than an epoch must not always see the same examples.
        first = tf.math.floormod(seeds[:, 0], tf.cast(steps_per_epoch, tf.int64))
        # A client that has taken all its steps repeats the last batch.
        step = tf.minimum(tf.range(tf.reduce_max(num_steps)), tf.maximum(num_steps - 1, 0)[:, tf.newaxis])
        batch = (tf.cast(first, tf.int32)[:, tf.newaxis] + step) % steps_per_epoch[:, tf.newaxis]
        indices = batch[:, :, tf.newaxis] * batch_size + tf.range(batch_size)
        filled = indices < num_examples[:, tf.newaxis, tf.newaxis]
        # The rest of a batch repeats its first example.
        rows = tf.where(filled, indices, indices[:, :, :1])
        if model.training_predict is None:
            return Minibatches(rows, filled)
        words = philox.keystreams(seeds, _WORDS_OF_A_KEY * tf.shape(step)[1], place=0)
        return Minibatches(rows, filled, tf.bitcast(tf.reshape(words, [*tf.unstack(tf.shape(step)), 2, 2]), tf.int64))

    def gradient(
        mechanism: Any,
        draws: Minibatches,
        weights: Weights,
        data: ClientData,
        index: tf.Tensor,
        scale: tf.Tensor,
        pull: Weights | None = None,
        trainable: Sequence[str] | None = None,
    ) -> Weights:
        names = list(weights if trainable is None else trainable)
        watched = [tf.convert_to_tensor(weights[name]) for name in names]
        indices, filled = draws.indices[index], draws.filled[index]
        shares = tf.cast(filled, tf.float32)
        shares *= scale / tf.maximum(tf.reduce_sum(shares), 1.0)
        x, y = tf.gather(data.x, indices), tf.gather(data.y, indices)
        with tf.GradientTape() as tape:
            tape.watch(watched)
            current = merge(weights, dict(zip(names, watched, strict=True)))
            own = None if model.training_predict is None else RowDraws(draws.keys[index], tf.cast(indices, tf.int64))
            loss = tf.reduce_sum(model.training_loss(current, x, y, own) * shares)
        gradients = tape.gradient(loss, watched, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # The gradient w.r.t. a table, of which some rows were read, is not dense.
        scaled = collections.OrderedDict(zip(names, map(tf.convert_to_tensor, gradients), strict=True))
        # Nothing is clipped, so a pull on every example is a pull on their mean.
        return scaled if pull is None else map_weights(lambda g, p: g + scale * p, scaled, pull)

    return GradientEstimator(mechanism=(), draw=draw, gradient=gradient, is_plain=True)
