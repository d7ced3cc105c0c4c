"""Linear regression with the squared error."""

import numpy as np
import tensorflow as tf

from tff_pdp.models import layers
from tff_pdp.models.base import InitialWeights, Model, Weights


def half_squared_error(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Loss of a regression for each example: half the squared error, float32 `[batch]`."""
    return 0.5 * tf.square(outputs - y)


def build_linear_regression(input_shape: tuple[int, ...]) -> Model:
    """Builds `x . kernel + bias`, from zero; all of it is head. Labels are float32."""
    size = int(np.prod(input_shape))

    def init(seed: int) -> InitialWeights:
        del seed
        return {"dense_0/kernel": np.zeros((size, 1), np.float32), "dense_0/bias": np.zeros(1, np.float32)}

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        return layers.dense(weights, "dense_0", tf.reshape(x, [-1, size]))[:, 0]

    return Model(
        name="linear_regression",
        input_shape=tuple(input_shape),
        num_classes=0,
        init=init,
        predict=predict,
        head=("dense_0/kernel", "dense_0/bias"),
        output_loss=half_squared_error,
    )
