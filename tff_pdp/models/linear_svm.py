"""Linear support vector machine for two classes (`linear_svm`)."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model, Weights
from tff_pdp.models.linear_regression import build_linear_regression


def hinge(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Hinge loss of each example, `max(0, 1 - (2 y - 1) score)`: float32 `[batch]`.

    Args:
      outputs: float32 `[batch, 2]`, of which only the difference counts: the second minus the first is the score.
      y: int64 `[batch]`, 0 or 1.
    """
    signs = tf.cast(2 * y - 1, outputs.dtype)
    return tf.nn.relu(1.0 - signs * (outputs[:, 1] - outputs[:, 0]))


def build_linear_svm(
    input_shape: Sequence[int], num_classes: int = 2, *, input_shift: float = 0.0, input_scale: float = 1.0
) -> Model:
    """Builds a linear SVM, `score = x . kernel + bias` from zero, with x the flattened `(x + shift) * scale`.

    One kernel serves both classes: the outputs are `[0, score]`, so the class with the larger output is that of the
    score's sign. Their softmax is the logistic function of the score, which the hinge loss does not fit to be a
    probability. There is no term for the margin's width: a weight penalty is the algorithm's business. All of the
    model is head. Shift and scale are public constants.

    Raises:
      ConfigError: there are not two classes.
    """
    if num_classes != 2:
        raise ConfigError(f"model.name 'linear_svm' separates 2 classes, but data.num_classes is {num_classes}")
    scores = build_linear_regression(input_shape, input_shift=input_shift, input_scale=input_scale)

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        score = scores.predict(weights, x)
        return tf.stack([tf.zeros_like(score), score], axis=1)

    return dataclasses.replace(scores, name="linear_svm", num_classes=2, predict=predict, output_loss=hinge)
