"""Which weights are used and shared: those of largest magnitude in each of a body's last layers."""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import map_weights
from tff_pdp.models.base import Weights


def masked_names(body: Weights, sparse_layers: int) -> list[str]:
    """Names of the kernels of the body's last layers, counted from its end; other weights are never masked."""
    kernels = [name for name, value in body.items() if len(value.shape) >= 2]
    return kernels[len(kernels) - min(sparse_layers, len(kernels)) :]


def magnitude_masks(body: Weights, names: Sequence[str], sparsity: float) -> Weights:
    """Ones where a weight is among the share `sparsity` of largest magnitude in its tensor, zeros elsewhere.

    Equal magnitudes at the border are all in. Weights without a name in `names` have ones everywhere.

    Args:
      body: by name, float32.
      names: of the masked ones.
      sparsity: in (0, 1], the share that is kept.
    """

    def mask(name: str, value: tf.Tensor) -> tf.Tensor:
        if name not in names:
            return tf.ones_like(value)
        sizes = tf.reshape(tf.abs(value), [-1])
        kept = math.ceil(sparsity * value.shape.num_elements() * (1 - 1e-9))
        smallest = tf.math.top_k(sizes, kept).values[-1]
        return tf.cast(tf.abs(value) >= smallest, tf.float32)

    return {name: mask(name, tf.convert_to_tensor(value)) for name, value in body.items()}


def apply_masks(body: Weights, masks: Weights) -> Weights:
    """The body with zeros where a mask is zero."""
    return map_weights(tf.multiply, body, masks)


def mask_size(masks: Weights) -> int:
    """How many weights the masks keep."""
    return sum(int(np.sum(np.asarray(mask))) for mask in masks.values())
