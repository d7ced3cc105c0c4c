"""Refuses Keras models that cannot be trained on single examples, and names the layer and the way out."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tff_pdp.errors import ConfigError

_layers = tf.keras.layers
# Layers whose random numbers are dropout masks alone.
_WITH_MASKS = (
    _layers.Dropout,
    _layers.RNN,
    _layers.LSTMCell,
    _layers.GRUCell,
    _layers.SimpleRNNCell,
    _layers.Attention,
    _layers.AdditiveAttention,
)
_RANDOM: Any = tf.keras.__internal__.layers.BaseRandomLayer


def check_layers(layers: Mapping[str, tf.keras.layers.Layer]) -> None:
    """Refuses layers that mix examples, draw other random numbers than dropout masks, keep state, or penalise weights.

    Args:
      layers: the model's layers by path.

    Raises:
      ConfigError: a layer is refused.
    """
    for path, layer in layers.items():
        reason = _reason(layer)
        if reason:
            raise ConfigError(f"Keras layer {path or layer.name!r} ({type(layer).__name__}) {reason}")


def _reason(layer: tf.keras.layers.Layer) -> str:
    """Returns why a layer is refused, and what to do; empty if it is not refused."""
    # A frozen layer normalises by constants.
    if isinstance(layer, _layers.BatchNormalization) and layer.trainable:
        return (
            "normalises by statistics of the batch, so an example's gradient depends on the other examples: use "
            "LayerNormalization or GroupNormalization"
        )
    if isinstance(layer, _RANDOM) and not isinstance(layer, _WITH_MASKS):
        return "draws random numbers that are not dropout masks: use Dropout or SpatialDropout, or leave the layer out"
    if isinstance(layer, _layers.Dropout) and (getattr(layer, "noise_shape", None) or [None])[0] is not None:
        return "has one mask for several examples: the first entry of noise_shape must be None"
    if getattr(layer, "stateful", False) is True and isinstance(layer, _layers.RNN):
        return "keeps its state from batch to batch: set stateful=False"
    if layer.dtype_policy.compute_dtype != "float32" and layer.weights:
        return f"computes in {layer.dtype_policy.compute_dtype}, but weights and gradients here are float32"
    for name, value in vars(layer).items():
        if name.endswith(("_regularizer", "_constraint")) and value:
            kind = name.strip("_").rpartition("_")[2]
            return f"has a {kind} ({name.strip('_')}), which training here would leave out: remove it"
    return ""
