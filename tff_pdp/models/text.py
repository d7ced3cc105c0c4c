"""Builds a model of token sequences: the mean of the tokens' embeddings, and dense layers.

An example is a row of token ids as float32, which holds whole numbers below 2**24 exactly. Id 0 is padding.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import tensorflow as tf
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.models import layers
from tff_pdp.models.base import InitialWeights, Model, Weights, default_loss
from tff_pdp.settings import Count

VocabularySize = Annotated[int, Meta(ge=2)]
# Larger ids are not exact in float32.
_MOST_IDS = 2**24


def build_text(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    vocabulary_size: VocabularySize,
    embedding_size: Count = 32,
    hidden_units: tuple[Count, ...] = (),
) -> Model:
    """Builds a classifier, or a regression, of token sequences: mean of embeddings, then dense layers with ReLU.

    The mean is over the positions with an id from 1 to `vocabulary_size - 1`. Other positions are absent: id 0 is
    padding, and ids from `vocabulary_size` on are unknown. The mean of an empty sequence is zero. The mean is computed
    as a dense layer of each example's frequencies of tokens, so per-example gradients have a closed form; the layer's
    kernel is the table of embeddings. At first, embeddings are uniform between -1 / `embedding_size` and
    1 / `embedding_size`, other kernels Glorot-uniform, and biases zero. The last layer is the head.

    Source: Joulin, Grave, Bojanowski and Mikolov, "Bag of Tricks for Efficient Text Classification", EACL 2017, without
    n-grams and hierarchical softmax.

    Args:
      input_shape: `[sequence_length]`.
      num_classes: number of classes; 0 for a regression.
      vocabulary_size: V, number of token ids, 0 included.
      embedding_size: number of values of a token's embedding.
      hidden_units: number of units of each hidden layer between the mean and the last layer.

    Raises:
      ConfigError: the shape has more than one dimension, or there are more than 2**24 ids.
    """
    if vocabulary_size > _MOST_IDS:
        raise ConfigError(f"model.vocabulary_size is {vocabulary_size}; it must be at most 2**24")
    if len(input_shape) != 1:
        raise ConfigError(
            f"model.kind 'text' takes rows of token ids, of the shape [sequence_length], not {list(input_shape)}"
        )
    sizes = [vocabulary_size, embedding_size, *hidden_units, num_classes or 1]
    names = ["embedding", *(f"dense_{layer}" for layer in range(len(sizes) - 2))]

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for layer, name in enumerate(names):
            shape = sizes[layer], sizes[layer + 1]
            weights[f"{name}/kernel"] = (
                layers.glorot_uniform(rng, shape)
                if layer
                else rng.uniform(-1 / embedding_size, 1 / embedding_size, shape).astype(np.float32)
            )
            weights[f"{name}/bias"] = np.zeros(shape[1], np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = layers.dense(weights, names[0], _frequencies(x, vocabulary_size))
        for layer, name in enumerate(names[1:]):
            # The mean of embeddings goes into the next layer as it is.
            activations = layers.dense(weights, name, tf.nn.relu(activations) if layer else activations)
        return activations if num_classes else activations[:, 0]

    return Model(
        name="text",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=(f"{names[-1]}/kernel", f"{names[-1]}/bias"),
        output_loss=default_loss(num_classes),
    )


def _frequencies(x: tf.Tensor, vocabulary_size: int) -> tf.Tensor:
    """Returns the share of each token among an example's tokens: float32 `[batch, vocabulary_size]`, 0 for padding."""
    ids = tf.cast(tf.round(x), tf.int32)
    is_token = tf.logical_and(ids > 0, ids < vocabulary_size)
    columns = tf.where(is_token, ids, tf.zeros_like(ids))
    rows = tf.zeros_like(ids) + tf.range(tf.shape(ids)[0])[:, tf.newaxis]
    # Small whole numbers: their sum is exact in any order.
    counted = tf.cast(is_token, tf.float32)
    places = tf.stack([rows, columns], axis=-1)
    counts = tf.scatter_nd(places, counted, tf.stack([tf.shape(ids)[0], vocabulary_size]))
    counts = tf.ensure_shape(counts, [None, vocabulary_size])
    return counts / tf.maximum(tf.reduce_sum(counted, axis=1, keepdims=True), 1.0)
