"""Builds convolutional networks for small images: `cnn`, `lenet` and `tutorial_cnn`.

`cnn` has convolutions, with pooling after each or only after the last, and dense layers. `lenet` is LeNet, the target
network of the hypernetwork paper. `tutorial_cnn` is the network of TensorFlow Privacy's tutorial.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import tensorflow as tf
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.models import layers
from tff_pdp.models.base import InitialWeights, Model, Weights, default_loss, shift_and_scale
from tff_pdp.models.layers import glorot_uniform
from tff_pdp.settings import Count, CountOrZero, Finite

PoolAfter = Literal["each", "last"]
Padding = Literal["valid", "same"]
Channels = Annotated[Sequence[Count], Meta(min_length=1)]


def build_cnn(
    input_shape: Sequence[int],
    num_classes: int,
    channels: Channels = (32, 64),
    kernel_size: Count = 3,
    hidden_units: CountOrZero | Sequence[Count] = 128,
    *,
    pool_after: PoolAfter = "last",
    padding: Padding = "valid",
    group_norm_groups: CountOrZero = 0,
    input_shift: Finite = 0.0,
    input_scale: Finite = 1.0,
) -> Model:
    """Builds a CNN: convolutions with ReLU and 2x2 max pooling, optional dense layers with ReLU, and a dense layer.

    Convolutions have stride 1; pooling has stride 2. The input is `(x + input_shift) * input_scale`, with public
    constants: fitting them to private data would cost budget. Initial kernels are Glorot-uniform, biases zero, scales
    one. The last dense layer is the head. A model without classes is a regression of one value, with half the squared
    error as its loss.

    With 62 classes the defaults are the EMNIST network of Reddi et al. ("Adaptive Federated Optimization",
    arXiv:2003.00295, ICLR 2021) without its dropout. `hidden_units=0, pool_after="each"` is the ConvNet that Liu ("On
    Privacy and Personalization in Machine Learning", CMU-RI-TR-23-17, 2023, appendix B.1) trains on MNIST and CIFAR-10;
    with `kernel_size=5` as well, the network is Liu's ConvNet for ADNI.

    `kernel_size=5, hidden_units=512, pool_after="each", padding="same"` is the CNN of McMahan et al.
    ("Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section 3), with two
    convolutions and two dense layers: 1,663,370 weights on MNIST, as in the paper, and 2,156,490 on CIFAR-10.

    Args:
      input_shape: height, width and channels of one example.
      num_classes: number of classes; 0 for a regression.
      channels: number of channels of each convolution.
      kernel_size: height and width of every kernel.
      hidden_units: number of units of the dense layer before the head, or a list for several; 0 for none.
      pool_after: whether pooling follows `each` convolution, or only the `last`.
      padding: padding of the convolutions: `valid` for none, `same` for zeros that keep height and width.
      group_norm_groups: number of groups of a GroupNorm between each convolution and its ReLU; 0 for none.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: the groups do not divide the channels, or the input is not an image, or too small.
    """
    # What a convolution without padding takes from height and width is what its kernel has beyond one value.
    shrinkage = kernel_size - 1 if padding == "valid" else 0
    _check(input_shape, channels, kernel_size, shrinkage, pool_after, group_norm_groups)
    hidden_sizes = ([hidden_units] if hidden_units else []) if isinstance(hidden_units, int) else hidden_units
    depth = len(channels)
    is_pooled = [pool_after == "each" or index == depth - 1 for index in range(depth)]
    height, width = (_size_after(size, shrinkage, is_pooled) for size in input_shape[:2])
    flat_size = height * width * channels[-1]
    convolutions = list(zip([input_shape[2], *channels], channels, strict=False))
    dense_sizes = list(itertools.pairwise([flat_size, *hidden_sizes, num_classes or 1]))
    head = f"dense_{len(hidden_sizes)}"

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for index, (size_in, size_out) in enumerate(convolutions):
            weights[f"conv_{index}/kernel"] = glorot_uniform(rng, (kernel_size, kernel_size, size_in, size_out))
            weights[f"conv_{index}/bias"] = np.zeros(size_out, np.float32)
            if group_norm_groups:
                weights[f"norm_{index}/scale"] = np.ones(size_out, np.float32)
                weights[f"norm_{index}/bias"] = np.zeros(size_out, np.float32)
        for index, shape in enumerate(dense_sizes):
            weights[f"dense_{index}/kernel"] = glorot_uniform(rng, shape)
            weights[f"dense_{index}/bias"] = np.zeros(shape[1], np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = shift_and_scale(x, input_shift, input_scale)
        for index in range(depth):
            activations = layers.conv2d(weights, f"conv_{index}", activations, padding=_PADDINGS[padding])
            if group_norm_groups:
                activations = layers.group_norm(weights, f"norm_{index}", activations, group_norm_groups)
            if is_pooled[index]:
                # Pooling and ReLU commute, gradients included; pooling first leaves a quarter of the values.
                activations = tf.nn.max_pool2d(activations, ksize=2, strides=2, padding="VALID")
            activations = tf.nn.relu(activations)
        activations = tf.reshape(activations, [-1, flat_size])
        for index in range(len(hidden_sizes)):
            activations = tf.nn.relu(layers.dense(weights, f"dense_{index}", activations))
        outputs = layers.dense(weights, head, activations)
        return outputs if num_classes else outputs[:, 0]

    return Model(
        name="cnn",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=(f"{head}/kernel", f"{head}/bias"),
        output_loss=default_loss(num_classes),
    )


# TensorFlow's names.
_PADDINGS: Mapping[Padding, Literal["VALID", "SAME"]] = {"valid": "VALID", "same": "SAME"}


def _size_after(size: int, shrinkage: int, is_pooled: Sequence[bool]) -> int:
    for pooled in is_pooled:
        size -= shrinkage
        size = size // 2 if pooled else size
    return size


def _check_is_image(input_shape: Sequence[int]) -> None:
    if len(input_shape) != 3:
        raise ConfigError(f"convolutions need examples of height x width x channels, not of shape {list(input_shape)}")


def _check(
    input_shape: Sequence[int],
    channels: Sequence[int],
    kernel_size: int,
    shrinkage: int,
    pool_after: str,
    group_norm_groups: int,
) -> None:
    _check_is_image(input_shape)
    if group_norm_groups and any(size % group_norm_groups for size in channels):
        raise ConfigError(
            f"model.group_norm_groups {group_norm_groups} must divide every one of channels {list(channels)}"
        )
    smallest = _smallest_input(len(channels), shrinkage, pool_after)
    if min(input_shape[:2]) < smallest:
        raise ConfigError(
            f"{len(channels)} convolutions with kernel_size {kernel_size} and pooling need examples of at least "
            f"{smallest} x {smallest}, not {input_shape[0]} x {input_shape[1]}"
        )


def _smallest_input(depth: int, shrinkage: int, pool_after: str) -> int:
    """Returns the height that leaves one row after all layers."""
    if pool_after == "last":
        return 2 + depth * shrinkage
    return 2**depth + (2**depth - 1) * shrinkage


def build_lenet(
    input_shape: Sequence[int],
    num_classes: int,
    channels: Channels = (16, 32),
    kernel_size: Count = 5,
    hidden_units: Sequence[Count] = (120, 84),
    *,
    input_shift: Finite = 0.0,
    input_scale: Finite = 1.0,
) -> Model:
    """Builds LeNet: convolutions, each with 2x2 max pooling and ReLU, two dense layers with ReLU, and a dense layer.

    The defaults are the target network of Shamsian et al. ("Personalized Federated Learning using Hypernetworks",
    arXiv:2103.04628, ICML 2021): LeNet-5 (LeCun et al., "Gradient-Based Learning Applied to Document Recognition",
    Proc. IEEE 1998) with more channels, ReLU and max pooling. Everything else is as in `build_cnn`.

    Args:
      input_shape: height, width and channels of one example.
      num_classes: number of classes; 0 for a regression.
      channels: number of channels of each convolution.
      kernel_size: height and width of every kernel.
      hidden_units: number of units of each dense layer before the head.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: the input is not an image, or too small (16 x 16 is enough for the defaults).
    """
    model = build_cnn(
        input_shape,
        num_classes,
        channels,
        kernel_size,
        hidden_units,
        pool_after="each",
        input_shift=input_shift,
        input_scale=input_scale,
    )
    return dataclasses.replace(model, name="lenet")


# The smallest height and width that leave one value after both convolutions and both poolings: 10 -> 5 -> 4 -> 1 is
# too small to be pooled; 11 -> 6 -> 5 -> 1 too; 13 -> 7 -> 6 -> 2 -> 1.
_SMALLEST_OF_TUTORIAL = 13
_TUTORIAL_CONVOLUTIONS: Sequence[tuple[str, Padding]] = (("conv_0", "same"), ("conv_1", "valid"))


def build_tutorial_cnn(
    input_shape: Sequence[int], num_classes: int, *, input_shift: Finite = 0.0, input_scale: Finite = 1.0
) -> Model:
    """Builds the CNN of TensorFlow Privacy's tutorial: two strided convolutions and two dense layers.

    The layers are: 16 kernels of 8 x 8, stride 2, padded; ReLU; max pooling 2 x 2 of stride 1; 32 kernels of 4 x 4,
    stride 2, without padding; ReLU; max pooling 2 x 2 of stride 1; 32 units with ReLU; the head. On MNIST the network
    has 26,010 weights. Everything else is as in `build_cnn`.

    Source: `tutorials/mnist_dpsgd_tutorial.py` of TensorFlow Privacy; Liu, Lou, Xiong, Liu and Meng, "Projected
    Federated Averaging with Heterogeneous Differential Privacy", VLDB 2021, train the same network.

    Args:
      input_shape: height, width and channels of one example.
      num_classes: number of classes; 0 for a regression.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: the input is not an image, or smaller than 13 x 13.
    """
    _check_is_image(input_shape)
    if min(input_shape[:2]) < _SMALLEST_OF_TUTORIAL:
        raise ConfigError(
            f"model.kind 'tutorial_cnn' needs examples of at least {_SMALLEST_OF_TUTORIAL} x {_SMALLEST_OF_TUTORIAL}, "
            f"not {input_shape[0]} x {input_shape[1]}"
        )
    height, width = (_size_in_tutorial(size) for size in input_shape[:2])
    flat_size = height * width * 32
    kernels = {
        "conv_0": (8, 8, input_shape[2], 16),
        "conv_1": (4, 4, 16, 32),
        "dense_0": (flat_size, 32),
        "dense_1": (32, num_classes or 1),
    }

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights: InitialWeights = {}
        for name, shape in kernels.items():
            weights[f"{name}/kernel"] = glorot_uniform(rng, shape)
            weights[f"{name}/bias"] = np.zeros(shape[-1], np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = shift_and_scale(x, input_shift, input_scale)
        for name, padding in _TUTORIAL_CONVOLUTIONS:
            activations = tf.nn.relu(layers.conv2d(weights, name, activations, strides=2, padding=_PADDINGS[padding]))
            activations = tf.nn.max_pool2d(activations, ksize=2, strides=1, padding="VALID")
        activations = tf.reshape(activations, [-1, flat_size])
        activations = tf.nn.relu(layers.dense(weights, "dense_0", activations))
        outputs = layers.dense(weights, "dense_1", activations)
        return outputs if num_classes else outputs[:, 0]

    return Model(
        name="tutorial_cnn",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=("dense_1/kernel", "dense_1/bias"),
        output_loss=default_loss(num_classes),
    )


def _size_in_tutorial(size: int) -> int:
    """Returns the height after both convolutions and both poolings of `tutorial_cnn`."""
    # Poolings of two pixels take one pixel; the second convolution has kernels of four pixels and no padding.
    first_pooled = -(-size // 2) - 1
    second_convolved = (first_pooled - 4) // 2 + 1
    return second_convolved - 1
