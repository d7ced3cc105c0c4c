"""Defines layers over named weights for a model's `predict`, and draws their initial kernels.

With a plain mapping of weights a layer only computes. With `RecordingWeights` it also records a `Use`, from which
`tff_pdp.privacy.mechanisms.per_example` computes each example's gradient w.r.t. the layer's weights, given the
cotangent of the layer's output. Axis 0 of a layer's inputs and output is the axis of examples.

Initial kernels are drawn from a NumPy generator: the same seed gives the same arrays.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tff_pdp.models import example_gradients
from tff_pdp.models.base import Weights
from tff_pdp.models.example_gradients import ExampleGradients


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random float32 of variance `2 / (fan_in + fan_out)`, for a kernel `[..., in, out]`.

    Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010.
    """
    window = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (window * (shape[-2] + shape[-1])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def he_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random float32 of variance `2 / fan_in`, for a kernel `[..., in, out]` whose inputs come from a ReLU.

    He et al., "Delving Deep into Rectifiers", ICCV 2015.
    """
    return rng.normal(0.0, math.sqrt(2.0 / math.prod(shape[:-1])), shape).astype(np.float32)


# Pulls on a layer's weights, one for each weight, which are added to the gradients; None for no pull.
Pulls = Sequence[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The functions of a layer, which treat each example by itself.

    Attributes:
      apply: `(inputs [batch, ...], *weights) -> output [batch, ...]`, before any activation function.
      example_gradients: `(inputs, cotangent of output, *weights, pulls) -> ExampleGradients` for each of the layer's
        weights. `pulls`, one per weight, are added to the gradients; by default none.
      is_positional: whether several uses of the same weights, with inputs `[batch, in]`, are one use at several
        positions, with inputs `[batch, uses, in]`.
      needs_sizes: whether `example_gradients` needs inputs whose sizes, except the batch size, are known when the
        computation is built.
    """

    apply: Callable[..., tf.Tensor]
    example_gradients: Callable[..., tuple[ExampleGradients, ...]]
    is_positional: bool = False
    needs_sizes: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """One application of a layer to `inputs`, with `weights` that have these `names`."""

    layer: Layer
    names: tuple[str, ...]
    weights: tuple[tf.Tensor, ...]
    inputs: tf.Tensor
    output: tf.Tensor


class RecordingWeights(Mapping[str, Any]):
    """Weights that record how layers use them; a weight that is read outside of a layer is recorded as untracked.

    Attributes:
      uses: recorded applications of layers, in order.
    """

    def __init__(self, weights: Weights, tape: tf.GradientTape | None = None):
        self.uses: list[Use] = []
        self._weights = {name: tf.convert_to_tensor(value) for name, value in dict(weights).items()}
        self._tape = tape
        self._untracked: set[str] = set()
        self._graph = tf.compat.v1.get_default_graph()

    def __getitem__(self, name: str) -> tf.Tensor:
        self._untracked.add(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def use(self, layer: Layer, names: tuple[str, ...], inputs: tf.Tensor) -> tf.Tensor:
        """Applies the layer and records the use; the tape, if there is one, watches the output."""
        weights = tuple(self._weights[name] for name in names)
        output = layer.apply(inputs, *weights)
        if tf.compat.v1.get_default_graph() is not self._graph:
            # Inside a loop or a function of the model: code outside cannot reach the tensors or count the iterations.
            self._untracked.update(names)
            return output
        if self._tape is not None:
            self._tape.watch(output)
        self.uses.append(Use(layer, names, weights, inputs, output))
        return output

    def groups(self) -> list[list[Use]]:
        """Returns the uses by weights: each group has the uses of one set of weights, in order."""
        found: dict[tuple[str, ...], list[Use]] = {}
        for one in self.uses:
            found.setdefault(one.names, []).append(one)
        return list(found.values())

    def without_closed_form(self) -> list[str]:
        """Returns the names of the weights that were read outside of layers, or used more than once.

        Several uses of a layer such as `dense`, at one position each, count as one use.
        """
        groups = self.groups()
        counts = collections.Counter(name for group in groups for name in group[0].names)
        repeated = {name for group in groups if not _are_positions(group) for name in group[0].names}
        return sorted(self._untracked | repeated | {name for name, count in counts.items() if count > 1})


def _are_positions(group: Sequence[Use]) -> bool:
    first = group[0]
    return len(group) == 1 or all(
        one.layer == first.layer and one.layer.is_positional and one.inputs.shape.rank == 2 for one in group
    )


def dense(weights: Weights, name: str, x: tf.Tensor) -> tf.Tensor:
    """Returns `x @ kernel + bias` over the last axis: float32 `[batch, ..., out]`, for `x [batch, ..., in]`.

    Weights: `name/kernel` `[in, out]`, `name/bias` `[out]`.
    """
    return use(DENSE, weights, (f"{name}/kernel", f"{name}/bias"), x)


def conv2d(
    weights: Weights, name: str, x: tf.Tensor, strides: int = 1, padding: Literal["VALID", "SAME"] = "VALID"
) -> tf.Tensor:
    """Returns the convolution of `x [batch, height, width, in]`, plus bias: float32 `[batch, height', width', out]`.

    Weights: `name/kernel` `[height, width, in, out]`, `name/bias` `[out]`.

    Args:
      weights: weights by name.
      name: name of the layer.
      x: float32; the closed form needs a height and width that are known when the computation is built.
      strides: stride in height and in width.
      padding: `VALID` or `SAME`, as in TensorFlow.
    """
    return use(convolution(strides, padding), weights, (f"{name}/kernel", f"{name}/bias"), x)


def embedding(weights: Weights, name: str, ids: tf.Tensor) -> tf.Tensor:
    """Returns a row of a table for each id: float32 `[batch, ..., size]`, for `ids [batch, ...]`.

    Ids are whole numbers from 0, integers or float32 below 2**24. An id outside of the table counts as the nearest id
    in the table, so no example can stop a run.

    Weights: `name/embeddings` `[ids, size]`.
    """
    return use(EMBEDDING, weights, (f"{name}/embeddings",), ids)


# Keeps a group of equal values from dividing by zero.
_ADDED_VARIANCE = 1e-5


def group_norm(weights: Weights, name: str, x: tf.Tensor, groups: int) -> tf.Tensor:
    """Returns `x [batch, ..., channels]` normalised, times scale, plus bias: float32, of the same shape.

    Mean and variance are taken over one group of neighbouring channels of one example, at all positions (Wu & He,
    "Group Normalization", ECCV 2018): batch statistics would make an example's gradient depend on other examples.

    Weights: `name/scale` and `name/bias`, both `[channels]`.

    Args:
      weights: weights by name.
      name: name of the layer.
      x: float32; all sizes except the batch size must be known when the computation is built.
      groups: number of groups, which must divide the number of channels.
    """
    normalised = normalised_in_groups(x, groups, _ADDED_VARIANCE)
    return use(SCALE, weights, (f"{name}/scale", f"{name}/bias"), normalised)


def normalised_in_groups(x: tf.Tensor, groups: int, added_variance: float) -> tf.Tensor:
    """Returns `x [batch, ..., channels]` with mean 0 and variance 1 in each group of channels of each example.

    `added_variance` keeps a group of equal values from dividing by zero.
    """
    sizes: list[Any] = x.shape.as_list()
    *positions, channels = sizes[1:]
    flat = tf.reshape(x, [-1, math.prod(positions), channels])

    def mean_of_group(values: tf.Tensor) -> tf.Tensor:
        # Positions first, then channels: one reduction over both axes takes several times as long.
        of_channels = tf.reshape(tf.reduce_mean(values, axis=1), [-1, groups, channels // groups])
        of_groups = tf.reduce_mean(of_channels, axis=2, keepdims=True)
        return tf.reshape(tf.tile(of_groups, [1, 1, channels // groups]), [-1, 1, channels])

    centred = flat - mean_of_group(flat)
    variance = mean_of_group(tf.square(centred))
    return tf.reshape(centred * tf.math.rsqrt(variance + added_variance), [-1, *x.shape[1:]])


def use(layer: Layer, weights: Weights, names: tuple[str, ...], inputs: tf.Tensor) -> tf.Tensor:
    """Applies a layer to inputs and to the weights of these names, and records the use if the weights record."""
    if isinstance(weights, RecordingWeights) and not (layer.needs_sizes and None in inputs.shape[1:].as_list()):
        return weights.use(layer, names, inputs)
    return layer.apply(inputs, *(weights[name] for name in names))


def _dense(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
    if x.shape.rank == 2:
        return _plus(x @ kernel, bias)
    # As one product: the gradient of a batched product would hold a kernel for each example.
    rows = _plus(tf.reshape(x, [-1, kernel.shape[0]]) @ kernel, bias)
    return tf.reshape(rows, [*tf.unstack(tf.shape(x))[:-1], kernel.shape[1]])


def _plus(values: tf.Tensor, bias: Sequence[tf.Tensor]) -> tf.Tensor:
    # Not `tf.nn.bias_add`: whether oneDNN fuses its gradient, and so its last bits, depends on the rest of the graph.
    return values + bias[0] if bias else values


def _dense_gradients(
    x: tf.Tensor, cotangent: tf.Tensor, _: tf.Tensor, *bias: tf.Tensor, pulls: Pulls = (None, None)
) -> tuple[ExampleGradients, ...]:
    return example_gradients.dense_kernel(x, cotangent, pulls[0]), *_bias_gradients(cotangent, bias, pulls)


def _bias_gradients(cotangent: tf.Tensor, bias: Sequence[tf.Tensor], pulls: Pulls) -> tuple[ExampleGradients, ...]:
    return (example_gradients.bias(cotangent, pulls[1]),) if bias else ()


def _conv2d(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor, strides: int, padding: Any) -> tf.Tensor:
    return _plus(tf.nn.conv2d(x, kernel, strides, padding), bias)


def _conv2d_gradients(
    x: tf.Tensor,
    cotangent: tf.Tensor,
    kernel: tf.Tensor,
    *bias: tf.Tensor,
    strides: int,
    padding: str,
    pulls: Pulls = (None, None),
) -> tuple[ExampleGradients, ...]:
    window: list[Any] = kernel.shape.as_list()[:2]
    of_kernel = example_gradients.conv2d_kernel(x, cotangent, window, strides, padding, pulls[0])
    return of_kernel, *_bias_gradients(cotangent, bias, pulls)


def _embedding(ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, _places(ids, table))


def _embedding_gradients(
    ids: tf.Tensor, cotangent: tf.Tensor, table: tf.Tensor, pulls: Pulls = (None,)
) -> tuple[ExampleGradients, ...]:
    size: Any = table.shape[0]
    return (example_gradients.embedding_table(_places(ids, table), cotangent, size, pulls[0]),)


def _places(ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Returns ids as int32 places in the table."""
    rows: Any = table.shape[0]
    last = rows - 1
    if ids.dtype.is_integer:
        return tf.cast(tf.clip_by_value(ids, tf.cast(0, ids.dtype), tf.cast(last, ids.dtype)), tf.int32)
    # Before the cast, which has no defined result for large values and NaN.
    inside = tf.clip_by_value(tf.where(tf.math.is_finite(ids), ids, tf.zeros_like(ids)), 0.0, float(last))
    return tf.cast(inside, tf.int32)


def _scale(normalised: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    return normalised * scale + bias


def _scale_gradients(
    normalised: tf.Tensor, cotangent: tf.Tensor, *_: tf.Tensor, pulls: Pulls = (None, None)
) -> tuple[ExampleGradients, ...]:
    return example_gradients.bias(cotangent * normalised, pulls[0]), example_gradients.bias(cotangent, pulls[1])


def _shift(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    return x + tf.reshape(bias, [-1])


def _shift_gradients(
    x: tf.Tensor, cotangent: tf.Tensor, bias: tf.Tensor, pulls: Pulls = (None,)
) -> tuple[ExampleGradients, ...]:
    shape: list[Any] = bias.shape.as_list()
    pull = None if pulls[0] is None else tf.reshape(pulls[0], [-1])
    return (dataclasses.replace(example_gradients.bias(cotangent, pull), shape=shape),)


# Weights: kernel `[in, out]` and, if there is one, bias `[out]`.
DENSE = Layer(_dense, _dense_gradients, is_positional=True)
# Weights: scale and bias, both `[channels]`.
SCALE = Layer(_scale, _scale_gradients)
# Weights: a bias of any shape, which is added, flat, to inputs `[batch, values]`.
SHIFT = Layer(_shift, _shift_gradients, is_positional=True)
# Weights: table `[ids, size]`.
EMBEDDING = Layer(_embedding, _embedding_gradients)


def convolution(strides: int, padding: Literal["VALID", "SAME"]) -> Layer:
    """Returns the layer of `conv2d`: weights are a kernel `[height, width, in, out]` and, if there is one, a bias."""
    return Layer(
        functools.partial(_conv2d, strides=strides, padding=padding),
        functools.partial(_conv2d_gradients, strides=strides, padding=padding),
        needs_sizes=True,
    )
