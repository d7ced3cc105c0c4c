"""Builds residual networks for small images (`resnet20`), with GroupNorm."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import tensorflow as tf
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.models import layers
from tff_pdp.models.base import InitialWeights, Model, Weights, default_loss, shift_and_scale
from tff_pdp.models.layers import he_normal
from tff_pdp.settings import Count, Finite


def build_resnet20(
    input_shape: Sequence[int],
    num_classes: int,
    blocks_per_stage: Count = 3,
    channels: Annotated[Sequence[Count], Meta(min_length=1)] = (16, 32, 64),
    *,
    group_norm_groups: Count = 8,
    input_shift: Finite = 0.0,
    input_scale: Finite = 1.0,
) -> Model:
    """Builds a ResNet: a 3x3 convolution, stages of basic residual blocks, a mean over positions, and a dense layer.

    The defaults are ResNet-20 for CIFAR-10 (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016,
    section 4.2), with GroupNorm (Wu & He, "Group Normalization", ECCV 2018) in place of batch norm, whose statistics
    over all examples would bypass clip and noise. Each stage after the first halves height and width; its first
    shortcut takes every second pixel and adds channels of zeros (option A), so shortcuts have no weights. Unlike in the
    original, convolutions have biases, as everywhere in this package; 0.25 % of the weights are biases. GroupNorm does
    not cancel the bias, since the channels of a group share one mean. The dense layer is the head.

    The input is `(x + input_shift) * input_scale`, with public constants: fitting them to private data would cost
    budget. Initial kernels are He-normal, biases zero, scales one. A model without classes is a regression of one
    value, with half the squared error as its loss. Weights are in the order from input to output.

    Args:
      input_shape: height, width and channels of one example.
      num_classes: number of classes; 0 for a regression.
      blocks_per_stage: number of residual blocks per stage, of two convolutions each; 5, 7, 9 make ResNet-32, -44, -56.
      channels: number of channels of each stage.
      group_norm_groups: number of groups of every GroupNorm.
      input_shift: public constant, added to the features.
      input_scale: public constant, factor of the shifted features.

    Raises:
      ConfigError: channels decrease, the groups do not divide the channels, or the input is not an image, or too small.
    """
    _check(input_shape, channels, group_norm_groups)
    blocks = _blocks(blocks_per_stage, channels)

    def init(seed: int) -> InitialWeights:
        rng = np.random.default_rng(seed)
        weights = _initial_conv_and_norm(rng, "conv", "norm", input_shape[2], channels[0])
        for block in blocks:
            for index, size_in in enumerate((block.channels_in, block.channels_out)):
                conv, norm = f"{block.name}/conv_{index}", f"{block.name}/norm_{index}"
                weights |= _initial_conv_and_norm(rng, conv, norm, size_in, block.channels_out)
        weights["dense/kernel"] = he_normal(rng, (channels[-1], num_classes or 1))
        weights["dense/bias"] = np.zeros(num_classes or 1, np.float32)
        return weights

    def predict(weights: Weights, x: tf.Tensor) -> tf.Tensor:
        activations = _conv3x3(weights, "conv", shift_and_scale(x, input_shift, input_scale))
        activations = tf.nn.relu(layers.group_norm(weights, "norm", activations, group_norm_groups))
        for block in blocks:
            activations = _apply_block(weights, block, activations, group_norm_groups)
        outputs = layers.dense(weights, "dense", tf.reduce_mean(activations, axis=[1, 2]))
        return outputs if num_classes else outputs[:, 0]

    return Model(
        name="resnet20",
        input_shape=tuple(input_shape),
        num_classes=num_classes,
        init=init,
        predict=predict,
        head=("dense/kernel", "dense/bias"),
        output_loss=default_loss(num_classes),
    )


class _Block(NamedTuple):
    """A basic block: two convolutions, and a shortcut around them."""

    name: str
    channels_in: int
    channels_out: int
    strides: int


def _blocks(blocks_per_stage: int, channels: Sequence[int]) -> list[_Block]:
    blocks = []
    for stage, size in enumerate(channels):
        for index in range(blocks_per_stage):
            is_first = stage > 0 and index == 0
            size_in, strides = (channels[stage - 1], 2) if is_first else (size, 1)
            blocks.append(_Block(f"stage_{stage}/block_{index}", size_in, size, strides))
    return blocks


def _initial_conv_and_norm(
    rng: np.random.Generator, conv: str, norm: str, size_in: int, size_out: int
) -> InitialWeights:
    return {
        f"{conv}/kernel": he_normal(rng, (3, 3, size_in, size_out)),
        f"{conv}/bias": np.zeros(size_out, np.float32),
        f"{norm}/scale": np.ones(size_out, np.float32),
        f"{norm}/bias": np.zeros(size_out, np.float32),
    }


def _apply_block(weights: Weights, block: _Block, x: tf.Tensor, groups: int) -> tf.Tensor:
    hidden = _conv3x3(weights, f"{block.name}/conv_0", x, block.strides)
    hidden = tf.nn.relu(layers.group_norm(weights, f"{block.name}/norm_0", hidden, groups))
    hidden = _conv3x3(weights, f"{block.name}/conv_1", hidden)
    hidden = layers.group_norm(weights, f"{block.name}/norm_1", hidden, groups)
    return tf.nn.relu(hidden + _shortcut(block, x))


def _shortcut(block: _Block, x: tf.Tensor) -> tf.Tensor:
    if block.strides == 1:
        return x
    added = block.channels_out - block.channels_in
    return tf.pad(x[:, :: block.strides, :: block.strides], [[0, 0], [0, 0], [0, 0], [0, added]])


def _conv3x3(weights: Weights, name: str, x: tf.Tensor, strides: int = 1) -> tf.Tensor:
    if strides == 1:
        return layers.conv2d(weights, name, x, padding="SAME")
    # For even sizes `SAME` pads only after; the windows' centres would be the pixels that the shortcut leaves out.
    return layers.conv2d(weights, name, tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), strides)


def _check(input_shape: Sequence[int], channels: Sequence[int], group_norm_groups: int) -> None:
    if len(input_shape) != 3:
        raise ConfigError(f"convolutions need examples of height x width x channels, not of shape {list(input_shape)}")
    if list(channels) != sorted(channels):
        raise ConfigError(f"model.channels {list(channels)} must not decrease: shortcuts can only add channels")
    if any(size % group_norm_groups for size in channels):
        raise ConfigError(
            f"model.group_norm_groups {group_norm_groups} must divide every one of channels {list(channels)}"
        )
    smallest = 2 ** (len(channels) - 1)
    if min(input_shape[:2]) < smallest:
        raise ConfigError(
            f"{len(channels)} stages need examples of at least {smallest} x {smallest}, not {input_shape[0]} x "
            f"{input_shape[1]}"
        )
