"""Defines a model: a frozen value of pure functions over named weights.

Three functions prepare batches: `at_least_one_row` pads empty batches, `pad` pads labels and features, and
`shift_and_scale` rescales features.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.models.dropout import RowDraws
from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR, ExampleMetric, Metric, Ranking

# By name: tensors inside a computation, arrays outside.
Weights = Mapping[str, Any]
InitialWeights = dict[str, np.ndarray]


def softmax_cross_entropy(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the loss of a classifier for each example: float32 `[batch]`, from logits `[batch, num_classes]`."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=outputs)


def half_squared_error(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the loss of a regression for each example: half the squared error, float32 `[batch]`."""
    return 0.5 * tf.square(outputs - y)


def default_loss(num_classes: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the loss function of a classifier, or of a regression if there are no classes."""
    return softmax_cross_entropy if num_classes else half_squared_error


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as pure functions of weights, which the caller stores.

    Attributes:
      name: the model's name in `tff_pdp.experiment.kinds.MODELS`.
      input_shape: shape of one example, without the batch dimension.
      num_classes: number of classes; labels are int64 in `[0, num_classes)`. 0 for a regression, with float32 labels.
      init: `seed -> {name: float32 array}`; the same seed gives the same arrays. Initial weights are public.
      predict: `(weights, x [batch, *input_shape] float32) -> outputs float32`: logits `[batch, num_classes]`, or values
        `[batch]` of a regression.
      head: names of the last layer's weights; with partial sharing each client has a head of its own.
      output_loss: `(outputs, y [batch]) -> loss of each example [batch]`.
      ranking: metric of a two-class model, in place of accuracy; None for accuracy.
      training_predict: `(weights, x, draws) -> outputs`, in place of `predict` for gradients of a model with dropout;
        all that is random comes from `draws`, of each example for itself. None for a model that predicts alike in
        training. Evaluation, private choices and served models use `predict`.
      example_metric: metric that is a mean over examples, in place of accuracy or the squared error; None for these.
        Private choices of models and searches go by accuracy or squared error all the same, whose bounds are known.
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    init: Callable[[int], InitialWeights]
    predict: Callable[[Weights, tf.Tensor], tf.Tensor]
    head: tuple[str, ...]
    output_loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = softmax_cross_entropy
    ranking: Ranking | None = None
    training_predict: Callable[[Weights, tf.Tensor, RowDraws], tf.Tensor] | None = None
    example_metric: ExampleMetric | None = None

    @property
    def label_dtype(self) -> type[np.generic]:
        """NumPy type of the labels."""
        return np.int64 if self.num_classes else np.float32

    @property
    def metric(self) -> Metric:
        """Metric that judges the model on a client's examples."""
        if self.ranking is not None:
            return self.ranking.metric
        if self.example_metric is not None:
            return self.example_metric.metric
        return ACCURACY if self.num_classes else MEAN_SQUARED_ERROR

    def answers(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns answers for users, float32: probabilities `[batch, num_classes]`, or regression values `[batch]`."""
        return tf.nn.softmax(outputs) if self.num_classes else outputs

    def loss(self, weights: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each example: float32 `[batch]`."""
        return self.output_loss(self.predict(weights, x), y)

    def training_loss(self, weights: Weights, x: tf.Tensor, y: tf.Tensor, draws: RowDraws | None = None) -> tf.Tensor:
        """Returns the loss of each example in training, float32 `[batch]`: with dropout, if the model has dropout.

        Without `draws` there is no dropout.
        """
        if self.training_predict is None or draws is None:
            return self.loss(weights, x, y)
        return self.output_loss(self.training_predict(weights, x, draws), y)

    def scores(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the scores by which a model of two classes ranks examples, larger for class 1: float32 `[batch]`.

        A score is the difference of the outputs. For large differences, probabilities would round to equal numbers.
        """
        return outputs[:, 1] - outputs[:, 0]

    def example_metrics(self, weights: Weights, x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns metrics of each example, float32 `[batch]`: `accuracy` (or `squared_error`), `loss`, and its own."""
        return self.output_metrics(self.predict(weights, x), y)

    def output_metrics(self, outputs: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the metrics of `example_metrics`, from the model's outputs and labels."""
        if self.num_classes:
            measured = {ACCURACY.example_name: tf.cast(tf.equal(tf.argmax(outputs, axis=-1), y), tf.float32)}
        else:
            measured = {MEAN_SQUARED_ERROR.example_name: tf.square(outputs - y)}
        if self.example_metric is not None:
            measured[self.example_metric.metric.example_name] = self.example_metric.figure(outputs, y)
        return collections.OrderedDict({**measured, "loss": self.output_loss(outputs, y)})

    def num_parameters(self) -> int:
        """Counts the scalar weights."""
        return sum(int(array.size) for array in self.init(0).values())


def at_least_one_row(values: tf.Tensor) -> tf.Tensor:
    """Pads an empty batch with a row of zeros, because oneDNN's convolutions give an empty batch a wrong shape."""
    if values.shape[0]:
        return values
    missing = tf.maximum(1 - tf.shape(values)[0], 0)
    paddings: Any = [[0, missing], *[[0, 0]] * (values.shape.rank - 1)]
    return pad(values, paddings)


def pad(values: tf.Tensor, paddings: Any) -> tf.Tensor:
    """Pads with zeros, as `tf.pad` does, which has no kernel for int64 on a GPU; int64 values are below 2**53."""
    if values.dtype != tf.int64:
        return tf.pad(values, paddings)
    return tf.cast(tf.pad(tf.cast(values, tf.float64), paddings), tf.int64)


def shift_and_scale(x: tf.Tensor, shift: float, scale: float) -> tf.Tensor:
    """Returns `(x + shift) * scale`, with public constants; a constant that changes nothing adds no operation."""
    shifted = x + shift if shift != 0 else x
    return shifted * scale if scale != 1 else shifted
