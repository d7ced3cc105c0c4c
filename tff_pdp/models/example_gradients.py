"""Represents examples' gradients w.r.t. one weight in the form that is cheapest for norms and weighted sums.

An example's gradient w.r.t. a kernel is a sum of outer products, `sum_t a_t g_t^T`, over T positions (such as pixels):
a_t are the layer's inputs, g_t the cotangents of the layer's output. With one position the gradient's squared norm is
`|a|^2 |g|^2` (Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799, 2015). With more positions
the squared norm is computed as `sum_{t,u} (a_t . a_u)(g_t . g_u)`, from two Gram matrices (Li et al., "Large Language
Models Can Be Strong Differentially Private Learners", arXiv:2110.05679, ICLR 2022), or from gradients held in memory.
The cheaper of the last two ways is chosen when the computation is built, as in mixed ghost clipping (Bu, Mao & Xu,
"Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy", arXiv:2205.10683,
NeurIPS 2022).

A `pull` is added to each example's gradient; norms and sums include the pull.

Norms and weighted sums are computed from the same float32 numbers. In the guarantee, products and sums of these numbers
are those of exact arithmetic, without rounding. Results are computed in float64, where no product of four float32
numbers overflows or underflows. Only the squares of held gradients, and of the two vectors of a single outer product,
are summed in float32, with an allowance for rounding. So a norm is never too small, and a sum's error is a known
multiple of 2**-53 times magnitudes that the norms bound:

Guarantee: let G_i be the gradient of example i, pull included. For a weight of fewer than 2**27 values and a layer with
  fewer than 2**20 inputs and outputs at one position:
  * `squared_norms()[i] >= |G_i|^2 * (1 - 2**-25)`, or it is not finite.
  * There is a magnitude M_i >= |G_i|, a function of example i alone, with
    `squared_norms()[i] >= (M_i / CANCELLATION)^2 * (1 - 2**-25)`.
  * `weighted_sum(w) = sum_i w_i G_i + e` with `|e| <= 2**-53 * (N + 20) * 1.01 * sum_i w_i M_i`, for finite G_i and
    float64 weights w_i >= 0. Here N, which must be below 2**40, is the number of positions of all examples with
    w_i > 0. An example with w_i = 0 adds exactly nothing, whatever G_i is.
  All of this holds whether or not a thread treats numbers below 2**-126 as zeros: TensorFlow's own threads do, other
  threads do not.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

# A gradient's norm counts as at least the summed length of the gradient's terms, divided by this number. Terms that
# cancel further would leave a sum of errors that is large compared with the gradient. With T positions without a
# common direction, the terms are about sqrt(T) times as long as their sum.
CANCELLATION = 256.0

# Bounds the errors of the Gram form in float64, relative to a squared magnitude: those of three sums of fewer than
# 2**20 terms, each of 2**-53.
_ALLOWANCE = 2.0**-31
_LONGEST_GRAM = 1024

# The smallest normal number of float32. TensorFlow's threads treat smaller numbers as zeros, other threads do not.
_SMALLEST = 2.0**-126

# Added to every square in a length. An input may be as large as float32 allows: with cotangents that are zero in a norm
# but not in a sum, a gradient might be larger than its norm by any factor. So cotangents count as 2**50 times their
# largest possible difference, which is then as small an error as float64's roundings.
_UNCERTAIN = 2.0**-152

# Largest number of squares that are summed in float32.
_LONGEST_FLOAT32_SUM = 1024


class ExampleGradients(Protocol):
    """The gradients of a batch's examples w.r.t. one weight; the module's docstring has the guarantee."""

    @property
    def positions(self) -> int:
        """Largest number of terms that one example adds to a weighted sum."""
        ...

    def squared_norms(self) -> tf.Tensor:
        """Returns an upper bound of each squared L2 norm, equal up to rounding: float64 `[batch]`."""
        ...

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns `sum_i factors_i G_i`, float64 of the shape of the weight, for factors float64 `[batch]`."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """Gradients held in memory; norms and sums are computed from the float32 numbers `values`.

    The magnitude M_i is the norm, or 2**-63 times the root of the number of values if this product is larger.

    Attributes:
      values: parts of the gradients, float32 `[batch, ...]`, in order along the weight's first axis.
      shape: shape of the weight.
    """

    values: tuple[tf.Tensor, ...]
    shape: Sequence[int]
    positions = 1

    def squared_norms(self) -> tf.Tensor:
        """Returns an upper bound of each squared L2 norm: float64 `[batch]`."""
        return tf.add_n([_squares(part) for part in self.values])

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns `sum_i factors_i G_i`, float64 of the shape of the weight."""
        sums = [_sum_of_rows(part, factors) for part in self.values]
        return tf.reshape(sums[0] if len(sums) == 1 else tf.concat(sums, axis=0), self.shape)


@dataclasses.dataclass(frozen=True)
class OuterProducts:
    """Gradients `sum_t a_t g_t^T`, plus the pull if there is one; no gradient is held in memory.

    The magnitude M_i is `sum_t |a_t||g_t| + |pull|`, with `_UNCERTAIN` added to every square in these lengths.

    Attributes:
      inputs: a, float32 `[batch, T, in]`, or `[batch, in]` with one position.
      cotangent: g, float32 `[batch, T, out]` or `[batch, out]`.
      shape: shape of the weight, with in * out values.
      pull: float32 of the weight's shape; None for no pull.
    """

    inputs: tf.Tensor
    cotangent: tf.Tensor
    shape: Sequence[int]
    pull: tf.Tensor | None = None

    @property
    def positions(self) -> int:
        """Number of positions T, known when the computation is built."""
        return 1 if self._has_one_position else int(self.inputs.shape[1])  # type: ignore[arg-type]

    def squared_norms(self) -> tf.Tensor:
        """Returns an upper bound of each squared L2 norm: float64 `[batch]`."""
        if self._has_one_position and self.pull is None:
            return _squares(self.inputs) * _squares(self.cotangent)
        a, g = tf.cast(self.inputs, tf.float64), tf.cast(self.cotangent, tf.float64)
        # All terms are non-negative: errors are relative.
        lengths = _squared_lengths(a) * _squared_lengths(g)
        if self._has_one_position:
            squares, magnitudes = lengths, tf.sqrt(lengths)
        else:
            squares = tf.reduce_sum(tf.matmul(a, a, transpose_b=True) * tf.matmul(g, g, transpose_b=True), axis=[1, 2])
            magnitudes = tf.reduce_sum(tf.sqrt(lengths), axis=1)
        if self.pull is not None:
            pull = tf.reshape(tf.cast(self.pull, tf.float64), [a.shape[-1], g.shape[-1]])
            products = tf.reshape(tf.matmul(_as_rows(a), pull), tf.shape(g)) * g
            of_pull = tf.reduce_sum(_squared_lengths(pull))
            squares += 2.0 * tf.reduce_sum(products, axis=list(range(1, g.shape.rank))) + of_pull
            magnitudes += tf.sqrt(of_pull)
        # Terms of both signs: errors are relative to the squared magnitude, by the inequality of Cauchy and Schwarz.
        largest = tf.square(magnitudes)
        return tf.maximum(squares + _ALLOWANCE * largest, CANCELLATION**-2 * largest)

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns `sum_i factors_i G_i`, float64 of the shape of the weight."""
        a = tf.cast(keep(factors, self.inputs), tf.float64)
        weighted = tf.math.multiply_no_nan(tf.cast(self.cotangent, tf.float64), _as_column(factors, self.cotangent))
        total = tf.matmul(_as_rows(a), _as_rows(weighted), transpose_a=True)
        total = tf.reshape(total, self.shape)
        return total if self.pull is None else total + Repeated(self.pull).weighted_sum(factors)

    @property
    def _has_one_position(self) -> bool:
        return self.inputs.shape.rank == 2


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Gradients of a table of which each example reads one row at each position; no gradient is held in memory.

    These are outer products whose inputs a_t are one-hot: row `ids_t` of the gradient is the sum of g_t over the
    positions with this id, plus the pull. The magnitude M_i is `sum_t |g_t| + |pull|`, as in `OuterProducts`.

    Attributes:
      ids: rows read, int32 `[batch, T]`, inside of the table.
      cotangent: g, float32 `[batch, T, size]`.
      shape: shape of the table, rows and size.
      pull: float32 of the table's shape; None for no pull.
    """

    ids: tf.Tensor
    cotangent: tf.Tensor
    shape: Sequence[int]
    pull: tf.Tensor | None = None

    @property
    def positions(self) -> int:
        """Number of positions T, known when the computation is built."""
        return int(self.ids.shape[1])  # type: ignore[arg-type]

    def squared_norms(self) -> tf.Tensor:
        """Returns an upper bound of each squared L2 norm: float64 `[batch]`."""
        g = tf.cast(self.cotangent, tf.float64)
        lengths = _squared_lengths(g)
        same = tf.cast(tf.equal(self.ids[:, :, tf.newaxis], self.ids[:, tf.newaxis, :]), tf.float64)
        # Products of rows that differ count for nothing, even if they are not finite: the lengths are not finite then.
        squares = tf.reduce_sum(tf.math.multiply_no_nan(tf.matmul(g, g, transpose_b=True), same), axis=[1, 2])
        magnitudes = tf.reduce_sum(tf.sqrt(lengths), axis=1)
        if self.pull is not None:
            pull = tf.cast(self.pull, tf.float64)
            of_pull = tf.reduce_sum(_squared_lengths(pull))
            squares += 2.0 * tf.reduce_sum(tf.gather(pull, self.ids) * g, axis=[1, 2]) + of_pull
            magnitudes += tf.sqrt(of_pull)
        largest = tf.square(magnitudes)
        return tf.maximum(squares + _ALLOWANCE * largest, CANCELLATION**-2 * largest)

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns `sum_i factors_i G_i`, float64 of the shape of the table."""
        weighted = tf.math.multiply_no_nan(tf.cast(self.cotangent, tf.float64), _as_column(factors, self.cotangent))
        total = tf.math.unsorted_segment_sum(_as_rows(weighted), tf.reshape(self.ids, [-1]), self.shape[0])
        return total if self.pull is None else total + Repeated(self.pull).weighted_sum(factors)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """One gradient G for all examples: the pull on a weight that no loss depends on. The magnitude M_i is |G|.

    Attributes:
      pull: G, float32 of the weight's shape.
    """

    pull: tf.Tensor
    positions = 1

    def squared_norms(self) -> tf.Tensor:
        """Returns an upper bound of the squared L2 norm: float64 scalar."""
        return tf.reduce_sum(_squared_lengths(tf.cast(self.pull, tf.float64)[tf.newaxis]))

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns `sum_i factors_i G`: zero if all factors are zero, even if G is not finite."""
        return tf.math.multiply_no_nan(tf.cast(self.pull, tf.float64), tf.reduce_sum(factors))


def dense_kernel(inputs: tf.Tensor, cotangent: tf.Tensor, pull: tf.Tensor | None = None) -> ExampleGradients:
    """Returns a kernel's gradients, from `inputs [batch, ..., in]`, `cotangent [batch, ..., out]`, `pull [in, out]`."""
    shape: list[Any] = [inputs.shape[-1], cotangent.shape[-1]]
    if inputs.shape.rank == 2:
        return OuterProducts(inputs, cotangent, shape, pull)
    a, g = _flatten_positions(inputs), _flatten_positions(cotangent)
    positions, size_in = _sizes(a)
    if _gram_is_cheaper(positions, size_in, _sizes(g)[-1]):
        return OuterProducts(a, g, shape, pull)
    return Held((_pulled(tf.matmul(a, g, transpose_a=True), pull),), shape)


def embedding_table(
    ids: tf.Tensor, cotangent: tf.Tensor, num_rows: int, pull: tf.Tensor | None = None
) -> ExampleGradients:
    """Returns gradients w.r.t. a table, from which each id reads one row.

    Args:
      ids: int32 `[batch, ...]`, at least 0 and below `num_rows`.
      cotangent: cotangent of the rows read, `[batch, ..., size]`.
      num_rows: number of rows of the table.
      pull: pull on the table, `[num_rows, size]`; None for no pull.
    """
    shape: list[Any] = [num_rows, cotangent.shape[-1]]
    g = tf.expand_dims(cotangent, 1) if cotangent.shape.rank == 2 else _flatten_positions(cotangent)
    flat = tf.reshape(ids, tf.shape(g)[:2])
    positions, size = _sizes(g)
    flat.set_shape([None, positions])
    if positions is not None and positions < _LONGEST_GRAM:
        return TableRows(flat, g, shape, pull)
    num_examples = tf.shape(g)[0]
    # Each example's own table, one below the other.
    own = flat + num_rows * tf.range(num_examples)[:, tf.newaxis]
    tables = tf.math.unsorted_segment_sum(_as_rows(g), tf.reshape(own, [-1]), num_rows * num_examples)
    return Held((_pulled(tf.reshape(tables, [num_examples, num_rows, size]), pull),), shape)


def conv2d_kernel(
    inputs: tf.Tensor,
    cotangent: tf.Tensor,
    window: Sequence[int],
    strides: int,
    padding: str,
    pull: tf.Tensor | None = None,
) -> ExampleGradients:
    """Returns gradients w.r.t. a convolution's kernel.

    Args:
      inputs: inputs of the layer, `[batch, height, width, in]`.
      cotangent: cotangent of the layer's output, `[batch, height', width', out]`.
      window: height and width of the kernel.
      strides: stride in height and in width.
      padding: `VALID` or `SAME`, as in TensorFlow.
      pull: pull on the kernel, `[*window, in, out]`; None for no pull.
    """
    *sizes_in, channels_in = _sizes(inputs)
    *sizes_out, channels_out = _sizes(cotangent)
    shape = [*window, channels_in, channels_out]
    if padding == "SAME":
        inputs = tf.pad(inputs, [[0, 0], *map(same_padding, sizes_in, sizes_out, window, [strides] * 2), [0, 0]])
    g = _flatten_positions(cotangent)
    is_gram = _gram_is_cheaper(math.prod(sizes_out), math.prod(window) * channels_in, channels_out)
    if not is_gram and strides > 1 and not any(side % strides for side in window):
        return Held((_pulled(_gradients_by_squares(inputs, g, sizes_out, window, strides), pull),), shape)
    seen = inputs_by_offset(inputs, sizes_out, window, strides)
    if is_gram:
        return OuterProducts(_flatten_positions(tf.concat(seen, axis=-1)), g, shape, pull)
    shares = [None] * len(seen) if pull is None else tf.unstack(tf.reshape(pull, [-1, channels_in, channels_out]))
    # Offset by offset is faster than one product over all patches.
    gradients = [
        _pulled(tf.matmul(_flatten_positions(a), g, transpose_a=True), share)
        for a, share in zip(seen, shares, strict=True)
    ]
    return Held(tuple(gradients), shape)


def inputs_by_offset(
    inputs: tf.Tensor, sizes_out: Sequence[int], window: Sequence[int], strides: int
) -> list[tf.Tensor]:
    """Returns the inputs that each offset of a kernel meets: the convolution is a dense layer over all, side by side.

    Args:
      inputs: inputs of the layer, padded, `[batch, height, width, in]`.
      sizes_out: height and width of the output.
      window: height and width of the kernel.
      strides: stride in height and in width.

    Returns:
      Tensors `[batch, *sizes_out, in]`, for the offsets of the kernel row by row.
    """
    grids = _grids(inputs, window, strides)
    return [
        grids[i % strides][j % strides][
            :, i // strides : i // strides + sizes_out[0], j // strides : j // strides + sizes_out[1]
        ]
        for i in range(window[0])
        for j in range(window[1])
    ]


def _grids(inputs: tf.Tensor, window: Sequence[int], strides: int) -> list[list[tf.Tensor]]:
    """Returns every `strides`-th row and column of `[batch, height, width, in]`, by the first row and first column.

    Grids that no offset of the kernel begins on are left out. The values are reshaped into squares of rows and columns
    first: slices with a stride, one for each offset, take several times as long.
    """
    if strides == 1:
        return [[inputs]]
    sizes = _sizes(inputs)[:2]
    squares = [-(-size // strides) for size in sizes]
    missing = [[0, strides * count - size] for count, size in zip(squares, sizes, strict=True)]
    channels: Any = inputs.shape[-1]
    padded = tf.pad(inputs, [[0, 0], *missing, [0, 0]])
    # Columns of a square stand beside each other, in the axis of channels.
    rows = tf.reshape(padded, [-1, squares[0], strides, squares[1], strides * channels])
    return [
        [rows[:, :, i, :, j * channels : (j + 1) * channels] for j in range(min(strides, window[1]))]
        for i in range(min(strides, window[0]))
    ]


def _gradients_by_squares(
    inputs: tf.Tensor, g: tf.Tensor, sizes_out: Sequence[int], window: Sequence[int], strides: int
) -> tf.Tensor:
    """Returns gradients w.r.t. the kernel of a strided convolution without padding, by a convolution of stride 1.

    Each square of `strides` x `strides` pixels counts as one pixel with the channels of all of them, so the kernel has
    fewer offsets and the computation fewer operations. The products and their sums are the same.

    Args:
      inputs: inputs of the layer, `[batch, height, width, in]`.
      g: cotangent of the layer's output, `[batch, positions, out]`.
      sizes_out: height and width of the output, whose product is the number of positions.
      window: height and width of the kernel, multiples of `strides`.
      strides: stride in height and in width.

    Returns:
      float32 `[batch, *window, in, out]`.
    """
    offsets = [side // strides for side in window]
    high, wide = (size + count - 1 for size, count in zip(sizes_out, offsets, strict=True))
    channels_in, channels_out = _sizes(inputs)[-1], _sizes(g)[-1]
    pixels = tf.reshape(inputs[:, : high * strides, : wide * strides], [-1, high, strides, wide, strides, channels_in])
    squares = tf.reshape(tf.transpose(pixels, [0, 1, 3, 2, 4, 5]), [-1, high, wide, strides**2 * channels_in])
    gradients = [
        tf.matmul(_flatten_positions(squares[:, i : i + sizes_out[0], j : j + sizes_out[1]]), g, transpose_a=True)
        for i in range(offsets[0])
        for j in range(offsets[1])
    ]
    by_square = tf.reshape(tf.stack(gradients, axis=1), [-1, *offsets, strides, strides, channels_in, channels_out])
    return tf.reshape(tf.transpose(by_square, [0, 1, 3, 2, 4, 5, 6]), [-1, *window, channels_in, channels_out])


def bias(cotangent: tf.Tensor, pull: tf.Tensor | None = None) -> Held:
    """Returns gradients of a bias that is added at all positions, from `cotangent [batch, ..., out]`, `pull [out]`."""
    positions = list(range(1, cotangent.shape.rank - 1))
    values = tf.reduce_sum(cotangent, axis=positions) if positions else cotangent
    shape: list[Any] = [cotangent.shape[-1]]
    return Held((_pulled(values, pull),), shape)


def keep(factors: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Sets rows of `values [batch, ...]` to zeros where the factor is zero: infinity or NaN times zero would be NaN."""
    # Zeros of the same shape: a scalar branch stops TensorFlow's optimizer of layouts on a GPU.
    return tf.where(_as_column(factors > 0, values), values, tf.zeros_like(values))


def _pulled(gradients: tf.Tensor, pull: tf.Tensor | None) -> tf.Tensor:
    return gradients if pull is None else gradients + pull


def _gram_is_cheaper(positions: int | None, size_in: int, size_out: int) -> bool:
    """Compares numbers of multiplications, float64 counted twice; false for an unknown number of positions."""
    if positions is None or positions >= _LONGEST_GRAM:
        return False
    return 2 * positions * (size_in + size_out) < size_in * size_out


def _sizes(values: tf.Tensor) -> list[Any]:
    """Returns every size except the batch's; None for sizes that are unknown when the computation is built."""
    return values.shape.as_list()[1:]


def _flatten_positions(values: tf.Tensor) -> tf.Tensor:
    """Reshapes `[batch, ..., size]` to `[batch, T, size]`, also an empty batch, where -1 for T would be ambiguous."""
    *positions, size = _sizes(values)
    num_positions = tf.reduce_prod(tf.shape(values)[1:-1]) if None in positions else math.prod(positions)
    return tf.reshape(values, [tf.shape(values)[0], num_positions, size])


def _squared_lengths(values: tf.Tensor) -> tf.Tensor:
    """Returns squared lengths over the last axis of float64 `[..., size]`, never too small for float32 values."""
    size: Any = values.shape[-1]
    return tf.reduce_sum(tf.square(values), axis=-1) + size * _UNCERTAIN


def _squares(values: tf.Tensor) -> tf.Tensor:
    """Sums the squares of each example's values, float32 `[batch, ..., size]`, in float64; never too small.

    Squares are taken in float32, for speed, and summed in float32 over one axis if that is short. An allowance covers
    the largest possible loss by rounding; overflow gives infinity. Both only make the result larger.
    """
    size = values.shape[-1]
    if size is None or size > _LONGEST_FLOAT32_SUM:
        size, squares = 1, tf.cast(tf.square(values), tf.float64)
    else:
        squares = tf.cast(tf.reduce_sum(tf.square(values), axis=-1), tf.float64)
    positions = list(range(1, squares.shape.rank))
    total = tf.reduce_sum(squares, axis=positions) if positions else squares
    sizes = _sizes(values)
    count = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float64) if None in sizes else float(math.prod(sizes))
    # A square and the additions after it round `size` times, by 2**-24 each, and 1 / (1 - n u) <= 1 + (n + 1) u here.
    # Squares below the smallest normal number, of values below 2**-63, are lost.
    return (total + _SMALLEST * count) * (1.0 + (size + 1) * 2.0**-24)


def _sum_of_rows(values: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns `sum_i factors_i values_i` for `values [batch, ...]`, flat, in float64."""
    sizes = _sizes(values)
    rows = tf.reshape(values, [tf.shape(values)[0], math.prod(sizes)]) if len(sizes) != 1 else values
    return tf.linalg.matvec(tf.cast(keep(factors, rows), tf.float64), factors, transpose_a=True)


def _as_column(per_example: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Reshapes `per_example [batch]` to the rank of `values [batch, ...]`."""
    return tf.reshape(per_example, [-1] + [1] * (values.shape.rank - 1))


def _as_rows(values: tf.Tensor) -> tf.Tensor:
    """Reshapes `[batch, ..., size]` to `[batch * ..., size]`."""
    return values if values.shape.rank == 2 else tf.reshape(values, [-1, values.shape[-1]])


def same_padding(size_in: int, size_out: int, window: int, strides: int) -> list[int]:
    """Returns TensorFlow's padding before and after; an odd total has the larger part after."""
    total = max((size_out - 1) * strides + window - size_in, 0)
    return [total // 2, total - total // 2]
