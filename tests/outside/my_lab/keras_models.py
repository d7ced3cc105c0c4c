"""Keras models of somebody else: a CNN with dropout and LayerNorm, an embedding with an LSTM, one with BatchNorm."""

from collections.abc import Sequence

import tensorflow as tf

from tff_pdp.settings import Count, Share

layers = tf.keras.layers


def build_cnn(
    input_shape: Sequence[int], num_classes: int, *, channels: Count = 4, rate: Share = 0.25
) -> tf.keras.Model:
    """Builds a CNN with LayerNorm after its convolution, and dropout before its last layer.

    Args:
      input_shape: number of values of one square image, row by row.
      num_classes: number of classes.
      channels: channels of the convolution.
      rate: share of hidden values that are dropped in training.
    """
    side = round(input_shape[0] ** 0.5)
    return tf.keras.Sequential(
        [
            tf.keras.Input(tuple(input_shape)),
            layers.Reshape((side, side, 1)),
            layers.Conv2D(channels, 3, activation="relu"),
            layers.LayerNormalization(),
            layers.Flatten(),
            layers.Dropout(rate),
            layers.Dense(num_classes, activation="softmax"),
        ]
    )


def build_text(input_shape: Sequence[int], num_classes: int, *, words: Count = 20, units: Count = 4) -> tf.keras.Model:
    """Builds an LSTM over embedded word ids; id 0 is padding.

    Args:
      input_shape: number of words of one example.
      num_classes: number of classes.
      words: number of different ids.
      units: size of the LSTM's state.
    """
    ids = tf.keras.Input(tuple(input_shape), dtype="int32")
    hidden = layers.LSTM(units)(layers.Embedding(words, 3, mask_zero=True)(ids))
    return tf.keras.Model(ids, layers.Dense(num_classes)(hidden))


def build_batch_norm(input_shape: Sequence[int], num_classes: int) -> tf.keras.Model:
    """Builds a network with a layer that mixes examples."""
    return tf.keras.Sequential(
        [
            tf.keras.Input(tuple(input_shape)),
            layers.Flatten(),
            layers.Dense(4),
            layers.BatchNormalization(name="after_dense"),
            layers.Dense(num_classes),
        ]
    )
