"""Logistic regression for two classes, with cross entropy or focal loss (`logistic_regression`)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models.average_precision import RANKING
from tff_pdp.models.base import Model
from tff_pdp.models.linear_svm import build_linear_svm
from tff_pdp.models.metrics import ACCURACY, AVERAGE_PRECISION

_RANKINGS = {ACCURACY.name: None, AVERAGE_PRECISION.name: RANKING}


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
    focal_gamma: float = 0.0,
    focal_alpha: float | None = None,
    metric: str = ACCURACY.name,
    input_shift: float = 0.0,
    input_scale: float = 1.0,
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
      ConfigError: there are not two classes, or another argument is none that it can have.
    """
    if num_classes != 2:
        raise ConfigError(
            f"model.name 'logistic_regression' separates 2 classes, but data.num_classes is {num_classes}"
        )
    if not _is_number(focal_gamma) or not 0 <= focal_gamma < math.inf:
        raise ConfigError(f"model.arguments.focal_gamma must be a number of at least 0, not {focal_gamma!r}")
    if focal_alpha is not None and (not _is_number(focal_alpha) or not 0 < focal_alpha < 1):
        raise ConfigError(f"model.arguments.focal_alpha must be null or between 0 and 1, not {focal_alpha!r}")
    if metric not in _RANKINGS:
        raise ConfigError(f"model.arguments.metric must be one of {', '.join(_RANKINGS)}, not {metric!r}")
    # Scores from zero, as outputs of two classes, are what it shares with the other linear classifier.
    scorer = build_linear_svm(input_shape, input_shift=input_shift, input_scale=input_scale)
    return dataclasses.replace(
        scorer,
        name="logistic_regression",
        output_loss=focal_loss(focal_gamma, focal_alpha),
        ranking=_RANKINGS[metric],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
