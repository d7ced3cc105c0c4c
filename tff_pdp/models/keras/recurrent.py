"""Computes an LSTM step by step by dense layers: one over all inputs, and one over the state before each step.

Uses of the second layer are the positions of one use (`layers.Layer.is_positional`), so gradients of single examples
have a closed form. The steps are in the graph one after another, because a closed form cannot look into a loop.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_pdp.models import layers
from tff_pdp.models.base import Weights


def lstm(layer: Any, weights: Weights, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function in place of a Keras LSTM's method `call`.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 1997, with the forget gate of Gers,
    Schmidhuber and Cummins, "Learning to Forget", Neural Computation 2000; gates in the order of Keras.

    Args:
      layer: a `tf.keras.layers.LSTM` with a bias, without dropout and without state between batches.
      weights: weights by name.
      names: names of kernel `[in, 4 units]`, recurrent kernel `[units, 4 units]` and bias `[4 units]`.
    """
    kernel, recurrent_kernel, bias = names

    def call(inputs: tf.Tensor, mask: Any = None, training: Any = None, initial_state: Any = None) -> Any:
        del training
        mask = mask[0] if isinstance(mask, list) else mask
        of_inputs = tf.unstack(layers.use(layers.DENSE, weights, (kernel, bias), inputs), axis=1)
        seen = [None] * len(of_inputs) if mask is None else tf.unstack(mask, axis=1)
        steps = list(zip(of_inputs, seen, strict=True))
        zeros = tf.zeros([tf.shape(inputs)[0], layer.units])
        hidden, memory = initial_state or (zeros, zeros)
        outputs, output = [], zeros
        for own, is_seen in reversed(steps) if layer.go_backwards else steps:
            gates = own + layers.use(layers.DENSE, weights, (recurrent_kernel,), hidden)
            let_in, kept, new, let_out = tf.split(gates, 4, axis=1)
            gate = layer.recurrent_activation
            next_memory = gate(kept) * memory + gate(let_in) * layer.activation(new)
            next_hidden = gate(let_out) * layer.activation(next_memory)
            if is_seen is None:
                hidden, memory, output = next_hidden, next_memory, next_hidden
            else:
                # Padding leaves the state as it is, and repeats the output.
                chosen = is_seen[:, tf.newaxis]
                hidden = tf.where(chosen, next_hidden, hidden)
                memory = tf.where(chosen, next_memory, memory)
                repeated = tf.zeros_like(output) if layer.zero_output_for_mask else output
                output = tf.where(chosen, next_hidden, repeated)
            outputs.append(output)
        # The last output, even if outputs of padding are zeros.
        result = tf.stack(outputs, axis=1) if layer.return_sequences else hidden
        return [result, hidden, memory] if layer.return_state else result

    return call
