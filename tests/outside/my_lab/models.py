"""A model of somebody else: dense layers whose hidden values a gate lets through in part."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_pdp.models.base import InitialWeights, Model, Weights, half_squared_error, softmax_cross_entropy
from tff_pdp.settings import Count


def build_gated(input_shape: Sequence[int], num_classes: int, *, width: Count = 8) -> Model:
    """Builds `tanh(x A) * sigmoid(x B)`, and a linear head over it.

    Args:
      input_shape: of one example.
      num_classes: number of classes; 0 for a regression.
      width: hidden values.
    """
    inputs, outputs = int(np.prod(input_shape)), num_classes or 1

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        shapes = {"value/kernel": (inputs, width), "gate/kernel": (inputs, width), "head/kernel": (width, outputs)}
        return {
            **{name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()},
            "head/bias": np.zeros(outputs, np.float32),
        }

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(x, [-1, inputs])
        hidden = tf.tanh(flat @ weights["value/kernel"]) * tf.sigmoid(flat @ weights["gate/kernel"])
        values = hidden @ weights["head/kernel"] + weights["head/bias"]
        return values if num_classes else values[:, 0]

    return Model(
        name="gated",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=("head/kernel", "head/bias"),
        output_loss=softmax_cross_entropy if num_classes else half_squared_error,
    )
