"""Convolutional networks for small images (`cnn`): convolutions, one pooling, one hidden dense layer."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_pdp.errors import ConfigError
from tff_pdp.models import layers
from tff_pdp.models.base import InitialWeights, Model, Weights


def build_cnn(
    input_shape: Sequence[int],
    num_classes: int,
    channels: Sequence[int] = (32, 64),
    kernel_size: int = 3,
    hidden_units: int = 128,
    *,
    group_norm_groups: int = 0,
    input_shift: float = 0.0,
    input_scale: float = 1.0,
) -> Model:
    """Builds convolutions with ReLU, 2x2 max pooling after the last one, a dense layer with ReLU, and a dense layer.

    Convolutions have stride 1 and no padding. The input is `(x + input_shift) * input_scale`, by public constants:
    fitting them to private data would cost budget. Kernels are Glorot-uniform, biases zero, scales one. The last dense
    layer is the head. With 62 classes the defaults are the EMNIST network of Reddi et al. ("Adaptive Federated
    Optimization", arXiv:2003.00295, ICLR 2021) without its dropout.

    Args:
      input_shape: height, width and channels of one example.
      num_classes: number of classes.
      channels: of each convolution.
      kernel_size: height and width of every kernel.
      hidden_units: of the dense layer before the head.
      group_norm_groups: where positive, a GroupNorm of so many groups stands between each convolution and its ReLU.
      input_shift: added to x.
      input_scale: multiplies the sum.

    Raises:
      ConfigError: a size is not positive, the groups do not divide the channels, or the input is too small.
    """
    _check(input_shape, channels, kernel_size, hidden_units, group_norm_groups)
    height, width = (size - len(channels) * (kernel_size - 1) for size in input_shape[:2])
    flat_size = (height // 2) * (width // 2) * channels[-1]
    convolutions = list(zip([input_shape[2], *channels], channels, strict=False))
    dense_sizes = [(flat_size, hidden_units), (hidden_units, num_classes)]

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for index, (size_in, size_out) in enumerate(convolutions):
            weights[f"conv_{index}/kernel"] = _glorot_uniform(rng, (kernel_size, kernel_size, size_in, size_out))
            weights[f"conv_{index}/bias"] = np.zeros(size_out, np.float32)
            if group_norm_groups:
                weights[f"norm_{index}/scale"] = np.ones(size_out, np.float32)
                weights[f"norm_{index}/bias"] = np.zeros(size_out, np.float32)
        for index, shape in enumerate(dense_sizes):
            weights[f"dense_{index}/kernel"] = _glorot_uniform(rng, shape)
            weights[f"dense_{index}/bias"] = np.zeros(shape[1], np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = (x + input_shift) * input_scale
        for index in range(len(channels)):
            activations = layers.conv2d(weights, f"conv_{index}", activations)
            if group_norm_groups:
                activations = layers.group_norm(weights, f"norm_{index}", activations, group_norm_groups)
            activations = tf.nn.relu(activations)
        pooled = tf.nn.max_pool2d(activations, ksize=2, strides=2, padding="VALID")
        hidden = tf.nn.relu(layers.dense(weights, "dense_0", tf.reshape(pooled, [-1, flat_size])))
        return layers.dense(weights, "dense_1", hidden)

    return Model(
        name="cnn",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=("dense_1/kernel", "dense_1/bias"),
    )


def _check(
    input_shape: Sequence[int], channels: Sequence[int], kernel_size: int, hidden_units: int, group_norm_groups: int
) -> None:
    if len(input_shape) != 3:
        raise ConfigError(f"model cnn needs examples of height x width x channels, not of shape {list(input_shape)}")
    if not channels or any(size < 1 for size in channels):
        raise ConfigError(f"model.arguments.channels {list(channels)} must be positive, at least one")
    for name, size in (("kernel_size", kernel_size), ("hidden_units", hidden_units)):
        if size < 1:
            raise ConfigError(f"model.arguments.{name} {size} must be positive")
    if group_norm_groups < 0:
        raise ConfigError(f"model.arguments.group_norm_groups {group_norm_groups} must not be negative")
    if group_norm_groups and any(size % group_norm_groups for size in channels):
        raise ConfigError(
            f"model.arguments.group_norm_groups {group_norm_groups} must divide every one of channels {list(channels)}"
        )
    smallest = len(channels) * (kernel_size - 1) + 2
    if min(input_shape[:2]) < smallest:
        raise ConfigError(
            f"model cnn with {len(channels)} convolutions of kernel_size {kernel_size} needs examples of at least "
            f"{smallest} x {smallest}, not {input_shape[0]} x {input_shape[1]}"
        )


def _glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    window = int(np.prod(shape[:-2]))
    limit = np.sqrt(6.0 / (window * (shape[-2] + shape[-1])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)
