"""Builds models of dense layers: linear ones, and networks with hidden layers.

| name | model |
|---|---|
| `linear`, `mlp` | multinomial logistic regression: without hidden layers (`linear`), and with hidden layers (`mlp`) |
| `linear_regression` | linear regression with half the squared error |
| `linear_svm` | linear support vector machine for two classes |
| `logistic_regression` | logistic regression for two classes, with cross entropy or focal loss |
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models import layers
from tff_pdp.models.average_precision import RANKING
from tff_pdp.models.base import InitialWeights, Model, Weights, default_loss, shift_and_scale
from tff_pdp.settings import Count, Finite, NotNegative, Share


def build_mlp(
    input_shape: Sequence[int],
    num_classes: int,
    hidden_units: Sequence[Count] = (64,),
    *,
    input_shift: Finite = 0.0,
    input_scale: Finite = 1.0,
) -> Model:
    """Builds an MLP: dense layers with ReLU between them, over the flattened example `(x + input_shift) * input_scale`.

    Shift and scale are public constants: fitting them to private data would cost budget. Initial kernels are
    Glorot-uniform (zero without hidden layers), biases zero. The last layer is the head. A model without classes is a
    regression of one value, with half the squared error as its loss.

    Args:
      input_shape: shape of one example.
      num_classes: number of classes; 0 for a regression.
      hidden_units: number of units of each hidden layer.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.
    """
    sizes = [int(np.prod(input_shape)), *hidden_units, num_classes or 1]
    depth = len(sizes) - 1

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for layer in range(depth):
            shape = sizes[layer], sizes[layer + 1]
            # Without hidden layers the problem is convex: zero is as good a start as any, and has no randomness.
            kernel = layers.glorot_uniform(rng, shape) if hidden_units else np.zeros(shape, np.float32)
            weights[f"dense_{layer}/kernel"] = kernel
            weights[f"dense_{layer}/bias"] = np.zeros(shape[1], np.float32)
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
        output_loss=default_loss(num_classes),
    )


def build_linear(
    input_shape: Sequence[int], num_classes: int, *, input_shift: Finite = 0.0, input_scale: Finite = 1.0
) -> Model:
    """Builds multinomial logistic regression: one dense layer, which is the head.

    Args:
      input_shape: shape of one example.
      num_classes: number of classes.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: `num_classes` is 0; use `linear_regression` for labels that are numbers.
    """
    if not num_classes:
        raise ConfigError("model.kind 'linear' needs classes, but data.num_classes is 0: use 'linear_regression'")
    return build_mlp(input_shape, num_classes, (), input_shift=input_shift, input_scale=input_scale)


def build_linear_regression(
    input_shape: Sequence[int], num_classes: int = 0, *, input_shift: Finite = 0.0, input_scale: Finite = 1.0
) -> Model:
    """Builds linear regression: `u . kernel + bias`, with u the flattened `(x + input_shift) * input_scale`.

    Labels are float32. Weights start from zero; all weights belong to the head.

    Args:
      input_shape: shape of one example.
      num_classes: must be 0.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: `num_classes` is not 0.
    """
    if num_classes:
        raise ConfigError(
            f"model.kind 'linear_regression' has float labels, but data.num_classes is {num_classes}: set it to 0, or "
            "use 'linear'"
        )
    model = build_mlp(input_shape, 0, (), input_shift=input_shift, input_scale=input_scale)
    return dataclasses.replace(model, name="linear_regression")


def hinge(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the hinge loss of each example, `max(0, 1 - (2 y - 1) score)`: float32 `[batch]`.

    Args:
      outputs: float32 `[batch, 2]`; the score is the second output minus the first.
      y: int64 `[batch]`, 0 or 1.
    """
    signs = tf.cast(2 * y - 1, outputs.dtype)
    return tf.nn.relu(1.0 - signs * (outputs[:, 1] - outputs[:, 0]))


def build_linear_svm(
    input_shape: Sequence[int], num_classes: int = 2, *, input_shift: Finite = 0.0, input_scale: Finite = 1.0
) -> Model:
    """Builds a linear SVM: `score = u . kernel + bias`, with u the flattened `(x + input_shift) * input_scale`.

    One kernel serves both classes: the outputs are `[0, score]`, so the sign of the score is the predicted class. The
    softmax of the outputs is the logistic function of the score, but after training by the hinge loss this number does
    not estimate a probability. The loss has no term for the margin's width: weight penalties belong to algorithms.
    Weights start from zero; all weights belong to the head.

    Args:
      input_shape: shape of one example.
      num_classes: must be 2.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: `num_classes` is not 2.
    """
    if num_classes != 2:
        raise ConfigError(f"model.kind 'linear_svm' separates 2 classes, but data.num_classes is {num_classes}")
    scores = build_linear_regression(input_shape, input_shift=input_shift, input_scale=input_scale)

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        score = scores.predict(weights, x)
        return tf.stack([tf.zeros_like(score), score], axis=1)

    return dataclasses.replace(scores, name="linear_svm", num_classes=2, predict=predict, output_loss=hinge)


def focal_loss(gamma: float = 0.0, alpha: float | None = None) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Builds the focal loss of each example, `-alpha_t (1 - p_t)^gamma log(p_t)`: `(outputs, y) -> float32 [batch]`.

    p_t is the probability of the example's own class: the logistic function of the margin, which is the score for class
    1 and minus the score for class 0. alpha_t is alpha for class 1 and `1 - alpha` for class 0. With gamma 0 and no
    alpha the loss is binary cross entropy. Loss and gradient are finite for every finite margin, as both powers are
    computed from log-probabilities.

    Source: Lin, Goyal, Girshick, He and Dollár, "Focal loss for dense object detection", ICCV 2017, equation 5.

    Args:
      gamma: focusing parameter, at least 0; a larger gamma lowers the weight of examples that are classified well.
      alpha: weight of class 1, between 0 and 1; None for unweighted classes.

    Returns:
      A function of outputs float32 `[batch, 2]`, whose score is the second output minus the first, and of labels int64
      `[batch]`, 0 or 1.
    """

    def loss(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        is_positive = tf.cast(y, outputs.dtype)
        margin = (2.0 * is_positive - 1.0) * (outputs[:, 1] - outputs[:, 0])
        losses = tf.nn.softplus(-margin)
        if gamma:
            losses *= tf.exp(-gamma * tf.nn.softplus(margin))
        if alpha is not None:
            losses *= alpha * is_positive + (1.0 - alpha) * (1.0 - is_positive)
        return losses

    return loss


def build_logistic_regression(
    input_shape: Sequence[int],
    num_classes: int = 2,
    *,
    focal_gamma: NotNegative = 0.0,
    focal_alpha: Share | None = None,
    metric: Literal["accuracy", "average_precision"] = "accuracy",
    input_shift: Finite = 0.0,
    input_scale: Finite = 1.0,
) -> Model:
    """Builds logistic regression: `score = u . kernel + bias`, with u the flattened `(x + input_shift) * input_scale`.

    One kernel serves both classes: the outputs are `[0, score]`, whose softmax is the logistic function of the score.
    After training with focal loss or class weights, the softmax still ranks examples, but no longer estimates a
    probability. Weights start from zero; all weights belong to the head.

    Args:
      input_shape: shape of one example.
      num_classes: must be 2.
      focal_gamma: gamma of the focal loss; a larger gamma lowers the weight of examples that are classified well.
      focal_alpha: weight of class 1 in the focal loss, a public constant; class 0 has `1 - focal_alpha`.
      metric: metric that judges the model, `accuracy` or `average_precision`.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: `num_classes` is not 2.
    """
    if num_classes != 2:
        raise ConfigError(
            f"model.kind 'logistic_regression' separates 2 classes, but data.num_classes is {num_classes}"
        )
    # The SVM has the same scores and outputs; only its loss differs.
    scorer = build_linear_svm(input_shape, input_shift=input_shift, input_scale=input_scale)
    ranking = RANKING if metric == RANKING.metric.name else None
    return dataclasses.replace(
        scorer, name="logistic_regression", output_loss=focal_loss(focal_gamma, focal_alpha), ranking=ranking
    )
