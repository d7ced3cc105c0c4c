"""Builds models of dense layers: linear ones, and networks with hidden layers.

| name | model |
|---|---|
| `linear`, `mlp` | multinomial logistic regression; with one or more hidden layers |
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
    """Builds dense layers with ReLU between them, over the flattened example `(x + input_shift) * input_scale`.

    Shift and scale are public constants: fitting them to private data would cost budget. Kernels are Glorot-uniform
    (zero without hidden layers), biases zero. The last layer is the head. Without classes it is a regression of one
    value, with half the squared error as its loss.

    Args:
      input_shape: of one example.
      num_classes: number of classes; 0 for a regression.
      hidden_units: of each hidden layer.
      input_shift: added to features, a public constant.
      input_scale: multiplies the sum, a public constant.
    """
    sizes = [int(np.prod(input_shape)), *hidden_units, num_classes or 1]
    depth = len(sizes) - 1

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for layer in range(depth):
            shape = sizes[layer], sizes[layer + 1]
            # Without hidden layers the problem is convex and zero is as good a start as any, with no noise of its own.
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
    """Builds multinomial logistic regression: one dense layer, all of it head.

    Args:
      input_shape: of one example.
      num_classes: number of classes.
      input_shift: added to features, a public constant.
      input_scale: multiplies the sum, a public constant.

    Raises:
      ConfigError: there are no classes; `linear_regression` is the model for that.
    """
    if not num_classes:
        raise ConfigError("model.kind 'linear' needs classes, but data.num_classes is 0: use 'linear_regression'")
    return build_mlp(input_shape, num_classes, (), input_shift=input_shift, input_scale=input_scale)


def build_linear_regression(
    input_shape: Sequence[int], num_classes: int = 0, *, input_shift: Finite = 0.0, input_scale: Finite = 1.0
) -> Model:
    """Builds `x . kernel + bias` from zero, with x the flattened `(x + input_shift) * input_scale`; all of it is head.

    Labels are float32.

    Args:
      input_shape: of one example.
      num_classes: 0.
      input_shift: added to features, a public constant.
      input_scale: multiplies the sum, a public constant.

    Raises:
      ConfigError: the labels are classes.
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
      outputs: float32 `[batch, 2]`, of which only the difference counts: the second minus the first is the score.
      y: int64 `[batch]`, 0 or 1.
    """
    signs = tf.cast(2 * y - 1, outputs.dtype)
    return tf.nn.relu(1.0 - signs * (outputs[:, 1] - outputs[:, 0]))


def build_linear_svm(
    input_shape: Sequence[int], num_classes: int = 2, *, input_shift: Finite = 0.0, input_scale: Finite = 1.0
) -> Model:
    """Builds a linear SVM, `score = x . kernel + bias` from zero, with x the flattened `(x + shift) * scale`.

    One kernel serves both classes: the outputs are `[0, score]`, so the class with the larger output is that of the
    score's sign. Their softmax is the logistic function of the score, which the hinge loss does not fit to be a
    probability. There is no term for the margin's width: a weight penalty is the algorithm's business. All of the
    model is head.

    Args:
      input_shape: of one example.
      num_classes: 2.
      input_shift: added to features, a public constant.
      input_scale: multiplies the sum, a public constant.

    Raises:
      ConfigError: there are not two classes.
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

    p_t is the probability of the example's own class, the logistic function of its margin, and alpha_t is alpha for
    class 1 and `1 - alpha` for class 0. With gamma 0 and no alpha it is the binary cross entropy. Loss and gradient are
    finite wherever the margin is: both powers are taken from log-probabilities.

    Source: Lin, Goyal, Girshick, He and Dollár, "Focal loss for dense object detection", ICCV 2017, equation 5.

    Args:
      gamma: at least 0; the larger, the less examples count that are classified well.
      alpha: between 0 and 1; None for no weights.

    Returns:
      A function of outputs float32 `[batch, 2]`, of which only the difference counts, the second minus the first, and
      labels int64 `[batch]`, 0 or 1.
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
    """Builds logistic regression, `score = x . kernel + bias` from zero, with x the flattened `(x + shift) * scale`.

    One kernel serves both classes: the outputs are `[0, score]`, whose softmax is the logistic function of the score.
    Trained with focal loss or weights of classes, that is no estimate of a probability any more, but still a ranking.
    All of the model is head. Shift and scale are public constants.

    Args:
      input_shape: of one example.
      num_classes: 2.
      focal_gamma: gamma of `focal_loss`.
      focal_alpha: alpha of `focal_loss`, a public constant.
      metric: what the model is judged by, `accuracy` or `average_precision`.
      input_shift: added to features.
      input_scale: multiplies them afterwards.

    Raises:
      ConfigError: there are not two classes.
    """
    if num_classes != 2:
        raise ConfigError(
            f"model.kind 'logistic_regression' separates 2 classes, but data.num_classes is {num_classes}"
        )
    # Scores from zero, as outputs of two classes, are what it shares with the other linear classifier.
    scorer = build_linear_svm(input_shape, input_shift=input_shift, input_scale=input_scale)
    ranking = RANKING if metric == RANKING.metric.name else None
    return dataclasses.replace(
        scorer, name="logistic_regression", output_loss=focal_loss(focal_gamma, focal_alpha), ranking=ranking
    )
