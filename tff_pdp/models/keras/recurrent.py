"""Computes recurrent layers step by step by dense layers: one over all inputs, and one over the state before each step.

Uses of the second layer are the positions of one use (`layers.Layer.is_positional`), so gradients of single examples
have a closed form. The steps are in the graph one after another, because a closed form cannot look into a loop. Names
of weights are those of kernel, recurrent kernel and bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tff_pdp.models import layers
from tff_pdp.models.base import Weights
from tff_pdp.models.layers import DENSE, SHIFT

# `(part of the inputs at one step, states before) -> states after`; the first state is the output.
Step = Callable[[tf.Tensor, Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def lstm(layer: Any, weights: Weights, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function in place of the method `call` of a Keras LSTM with a bias.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 1997, with the forget gate of Gers,
    Schmidhuber and Cummins, "Learning to Forget", Neural Computation 2000; gates in the order of Keras.
    """
    kernel, recurrent_kernel, bias = names

    def step(own: tf.Tensor, states: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        hidden, memory = states
        gate = layer.recurrent_activation
        gates = own + layers.use(DENSE, weights, (recurrent_kernel,), hidden)
        let_in, kept, new, let_out = tf.split(gates, 4, axis=1)
        memory = gate(kept) * memory + gate(let_in) * layer.activation(new)
        return gate(let_out) * layer.activation(memory), memory

    return _over_steps(layer, lambda inputs: layers.use(DENSE, weights, (kernel, bias), inputs), step, num_states=2)


def gru(layer: Any, weights: Weights, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function in place of the method `call` of a Keras GRU with a bias `[2, 3 units]` (`reset_after=True`).

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation",
    EMNLP 2014, with the reset gate after the product with the recurrent kernel, as in cuDNN.
    """
    kernel, recurrent_kernel, bias = names

    def step(own: tf.Tensor, states: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        (hidden,) = states
        gate = layer.recurrent_activation
        both = tf.concat([own, layers.use(DENSE, weights, (recurrent_kernel,), hidden)], axis=1)
        update, reset, new, old_update, old_reset, old = tf.split(layers.use(SHIFT, weights, (bias,), both), 6, axis=1)
        kept = gate(update + old_update)
        candidate = layer.activation(new + gate(reset + old_reset) * old)
        return (kept * hidden + (1.0 - kept) * candidate,)

    return _over_steps(layer, lambda inputs: layers.use(DENSE, weights, (kernel,), inputs), step, num_states=1)


def simple_rnn(layer: Any, weights: Weights, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function in place of the method `call` of a Keras SimpleRNN with a bias.

    Source: Elman, "Finding Structure in Time", Cognitive Science 1990.
    """
    kernel, recurrent_kernel, bias = names

    def step(own: tf.Tensor, states: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return (layer.activation(own + layers.use(DENSE, weights, (recurrent_kernel,), states[0])),)

    return _over_steps(layer, lambda inputs: layers.use(DENSE, weights, (kernel, bias), inputs), step, num_states=1)


def _over_steps(
    layer: Any, of_inputs: Callable[[tf.Tensor], tf.Tensor], step: Step, num_states: int
) -> Callable[..., Any]:
    def call(inputs: tf.Tensor, mask: Any = None, training: Any = None, initial_state: Any = None) -> Any:
        mask = mask[0] if isinstance(mask, list) else mask
        if training and layer.dropout:
            inputs = layer._random_generator.dropout(inputs, layer.dropout)
        parts = tf.unstack(of_inputs(inputs), axis=1)
        seen = [None] * len(parts) if mask is None else tf.unstack(mask, axis=1)
        steps = list(zip(parts, seen, strict=True))
        zeros = tf.zeros([tf.shape(inputs)[0], layer.units])
        given = initial_state if initial_state is None or isinstance(initial_state, list | tuple) else [initial_state]
        states = list(given or [zeros] * num_states)
        outputs, output = [], zeros
        for own, is_seen in reversed(steps) if layer.go_backwards else steps:
            after = step(own, states)
            if is_seen is None:
                states, output = list(after), after[0]
            else:
                # Padding leaves the state as it is, and repeats the output.
                chosen = is_seen[:, tf.newaxis]
                states = [tf.where(chosen, new, old) for new, old in zip(after, states, strict=True)]
                repeated = tf.zeros_like(output) if layer.zero_output_for_mask else output
                output = tf.where(chosen, after[0], repeated)
            outputs.append(output)
        # The last state, even if outputs of padding are zeros.
        result = tf.stack(outputs, axis=1) if layer.return_sequences else states[0]
        return [result, *states] if layer.return_state else result

    return call
