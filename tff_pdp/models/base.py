"""What a model is to every other part: a frozen value of pure functions over named weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# By name: tensors inside a computation, arrays outside.
Weights = Mapping[str, Any]
InitialWeights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Model:
    """A classifier as pure functions; weights are data and live wherever the caller keeps them.

    Attributes:
      name: the model's name in `tff_pdp.registry.MODELS`.
      input_shape: shape of one example, without the batch dimension.
      num_classes: number of classes; labels are int64 in `[0, num_classes)`.
      init: `seed -> {name: float32 array}`; the same seed gives the same arrays. Initial weights are public.
      predict: `(weights, x [batch, *input_shape] float32) -> logits [batch, num_classes] float32`.
      head: names of the weights that form the last layer (what partial-sharing methods keep personal).
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    init: Callable[[int], InitialWeights]
    predict: Callable[[Weights, tf.Tensor], tf.Tensor]
    head: tuple[str, ...]

    def loss(self, weights: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Softmax cross-entropy of each example: float32 `[batch]`."""
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=self.predict(weights, x))

    def num_parameters(self) -> int:
        """Number of scalar weights."""
        return sum(int(array.size) for array in self.init(0).values())
