"""Computes Keras layers by this package's layers, whose gradients of single examples have a closed form.

A layer qualifies if it is of exactly one of these classes and its settings have an equivalent here. `from_keras`
compares the outputs with those of Keras before it relies on them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_pdp.models import layers
from tff_pdp.models.base import Weights
from tff_pdp.models.keras.recurrent import gru, lstm, simple_rnn

_keras = tf.keras.layers
# `weights -> function in place of the layer's method call`.
Form = Callable[[Weights], Callable[..., Any]]


def closed_form(layer: tf.keras.layers.Layer, names: Mapping[int, str]) -> Form | None:
    """Returns the form of a layer; None if there is none for the layer's class or settings.

    Args:
      layer: a built layer.
      names: names of the trainable variables, by the variables' ids.
    """
    build = _FORMS.get(type(layer))
    return build(layer, names) if build else None


def _names(names: Mapping[int, str], *variables: Any) -> tuple[str, ...] | None:
    """Returns the names of variables, those that are None left out; None if a variable has no name."""
    present = [variable for variable in variables if variable is not None]
    found = tuple(names[id(variable)] for variable in present if id(variable) in names)
    return found if len(found) == len(present) else None


def _dense(layer: Any, names: Mapping[int, str]) -> Form | None:
    own = _names(names, layer.kernel, layer.bias)
    if own is None:
        return None
    return lambda weights: lambda inputs: _activated(layer, layers.use(layers.DENSE, weights, own, inputs))


def _conv2d(layer: Any, names: Mapping[int, str]) -> Form | None:
    own = _names(names, layer.kernel, layer.bias)
    has_form = (
        layer.strides[0] == layer.strides[1]
        and layer.dilation_rate == (1, 1)
        and layer.groups == 1
        and layer.padding in ("valid", "same")
        and layer.data_format == "channels_last"
    )
    if own is None or not has_form:
        return None
    convolution = layers.convolution(layer.strides[0], "SAME" if layer.padding == "same" else "VALID")
    return lambda weights: lambda inputs: _activated(layer, layers.use(convolution, weights, own, inputs))


def _activated(layer: Any, values: tf.Tensor) -> tf.Tensor:
    return values if layer.activation is None else layer.activation(values)


def _embedding(layer: Any, names: Mapping[int, str]) -> Form | None:
    own = _names(names, layer.embeddings)
    if own is None or getattr(layer, "sparse", False):
        return None
    return lambda weights: lambda inputs: layers.use(layers.EMBEDDING, weights, own, inputs)


def _layer_norm(layer: Any, names: Mapping[int, str]) -> Form | None:
    own = _names(names, layer.gamma, layer.beta)
    if own is None or len(own) != 2 or len(layer.axis) != 1:
        return None

    def form(weights: Weights) -> Callable[..., tf.Tensor]:
        original = layer.call

        def call(inputs: tf.Tensor) -> tf.Tensor:
            # Only the last axis has a scale for each channel here. Keras has made the number of the axis positive.
            if layer.axis[0] != inputs.shape.rank - 1:
                return original(inputs)
            mean = tf.reduce_mean(inputs, axis=-1, keepdims=True)
            centred = inputs - mean
            variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
            return layers.use(layers.SCALE, weights, own, centred * tf.math.rsqrt(variance + layer.epsilon))

        return call

    return form


def _group_norm(layer: Any, names: Mapping[int, str]) -> Form | None:
    own = _names(names, layer.gamma, layer.beta)
    if own is None or len(own) != 2 or layer.axis not in (-1, layer.input_spec.ndim - 1):
        return None

    def form(weights: Weights) -> Callable[..., tf.Tensor]:
        original = layer.call

        def call(inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
            if mask is not None or None in inputs.shape[1:].as_list():
                return original(inputs, mask)
            normalised = layers.normalised_in_groups(inputs, layer.groups, layer.epsilon)
            return layers.use(layers.SCALE, weights, own, normalised)

        return call

    return form


def _recurrent(build: Callable[[Any, Weights, tuple[str, ...]], Callable[..., Any]]) -> Any:
    def form_of(layer: Any, names: Mapping[int, str]) -> Form | None:
        own = _names(names, layer.cell.kernel, layer.cell.recurrent_kernel, layer.cell.bias)
        has_form = not (layer.recurrent_dropout or layer.time_major or layer.stateful)
        if own is None or len(own) != 3 or not has_form or not getattr(layer, "reset_after", True):
            return None

        def form(weights: Weights) -> Callable[..., Any]:
            original, own_form = layer.call, build(layer, weights, own)

            def call(inputs: tf.Tensor, mask: Any = None, training: Any = None, initial_state: Any = None) -> Any:
                steps = inputs.shape[1]
                chosen = own_form if steps is not None and steps <= _MOST_STEPS else original
                return chosen(inputs, mask=mask, training=training, initial_state=initial_state)

            return call

        return form

    return form_of


# A graph has the operations of each step of a recurrent layer.
_MOST_STEPS = 128
_FORMS: dict[type, Callable[[Any, Mapping[int, str]], Form | None]] = {
    _keras.Dense: _dense,
    _keras.Conv2D: _conv2d,
    _keras.Embedding: _embedding,
    _keras.LayerNormalization: _layer_norm,
    _keras.GroupNormalization: _group_norm,
    _keras.LSTM: _recurrent(lstm),
    _keras.GRU: _recurrent(gru),
    _keras.SimpleRNN: _recurrent(simple_rnn),
}
