"""Fully connected networks: multinomial logistic regression (`linear`) and one or more hidden layers (`mlp`)."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_pdp.models.base import InitialWeights, Model, Weights


def build_mlp(input_shape: Sequence[int], num_classes: int, hidden_units: Sequence[int] = (64,)) -> Model:
    """Builds dense layers with ReLU between them, over the flattened example.

    Kernels are Glorot-uniform (zero without hidden layers), biases zero. The last layer is the head.
    """
    sizes = [int(np.prod(input_shape)), *hidden_units, num_classes]
    layers = range(len(sizes) - 1)

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for layer in layers:
            fan_in, fan_out = sizes[layer], sizes[layer + 1]
            # Without hidden layers the problem is convex and zero is as good a start as any, with no noise of its own.
            limit = np.sqrt(6.0 / (fan_in + fan_out)) if hidden_units else 0.0
            weights[f"dense_{layer}/kernel"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
            weights[f"dense_{layer}/bias"] = np.zeros(fan_out, np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = tf.reshape(x, [-1, sizes[0]])
        for layer in layers:
            activations = activations @ weights[f"dense_{layer}/kernel"] + weights[f"dense_{layer}/bias"]
            if layer < len(sizes) - 2:
                activations = tf.nn.relu(activations)
        return activations

    last = len(sizes) - 2
    return Model(
        name="mlp" if hidden_units else "linear",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=(f"dense_{last}/kernel", f"dense_{last}/bias"),
    )


def build_linear(input_shape: Sequence[int], num_classes: int) -> Model:
    """Builds multinomial logistic regression: one dense layer, all of it head."""
    return build_mlp(input_shape, num_classes, hidden_units=())
