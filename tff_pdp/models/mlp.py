"""Fully connected networks: multinomial logistic regression (`linear`) and one or more hidden layers (`mlp`)."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models import layers
from tff_pdp.models.base import InitialWeights, Model, Weights, half_squared_error, softmax_cross_entropy
from tff_pdp.models.batches import shift_and_scale


def build_mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden_units: Sequence[int] = (64,),
    *,
    input_shift: float = 0.0,
    input_scale: float = 1.0,
) -> Model:
    """Builds dense layers with ReLU between them, over the flattened example `(x + input_shift) * input_scale`.

    Shift and scale are public constants: fitting them to private data would cost budget. Kernels are Glorot-uniform
    (zero without hidden layers), biases zero. The last layer is the head. Without classes it is a regression of one
    value, with half the squared error as its loss.

    Raises:
      ConfigError: a layer has no units.
    """
    if any(units < 1 for units in hidden_units):
        raise ConfigError(f"model.arguments.hidden_units {list(hidden_units)} must be positive")
    sizes = [int(np.prod(input_shape)), *hidden_units, num_classes or 1]
    depth = len(sizes) - 1

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for layer in range(depth):
            fan_in, fan_out = sizes[layer], sizes[layer + 1]
            # Without hidden layers the problem is convex and zero is as good a start as any, with no noise of its own.
            limit = np.sqrt(6.0 / (fan_in + fan_out)) if hidden_units else 0.0
            weights[f"dense_{layer}/kernel"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
            weights[f"dense_{layer}/bias"] = np.zeros(fan_out, np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = shift_and_scale(tf.reshape(x, [-1, sizes[0]]), input_shift, input_scale)
        for layer in range(depth):
            activations = layers.dense(weights, f"dense_{layer}", activations)
            if layer < depth - 1:
                activations = tf.nn.relu(activations)
        return activations if num_classes else activations[:, 0]

    last = depth - 1
    return Model(
        name="mlp" if hidden_units else "linear",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=(f"dense_{last}/kernel", f"dense_{last}/bias"),
        output_loss=softmax_cross_entropy if num_classes else half_squared_error,
    )


def build_linear(
    input_shape: Sequence[int], num_classes: int, *, input_shift: float = 0.0, input_scale: float = 1.0
) -> Model:
    """Builds multinomial logistic regression: one dense layer, all of it head; arguments as `build_mlp`.

    Raises:
      ConfigError: there are no classes; `linear_regression` is the model for that.
    """
    if not num_classes:
        raise ConfigError("model.name 'linear' needs classes, but data.num_classes is 0: use 'linear_regression'")
    return build_mlp(input_shape, num_classes, (), input_shift=input_shift, input_scale=input_scale)
