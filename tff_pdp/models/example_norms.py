"""Closed forms of each example's squared gradient norm for one layer, from its inputs and the cotangent of its output.

An example's kernel gradient is a sum of outer products, `sum_t a_t g_t^T` over its T positions. With one position its
squared norm is `|a|^2 |g|^2` (Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799, 2015). With
more it is `sum_{t,u} (a_t . a_u)(g_t . g_u)`, from two Gram matrices (Li et al., "Large Language Models Can Be Strong
Differentially Private Learners", arXiv:2110.05679, ICLR 2022), or the norm of the sum itself, held for this layer only;
the cheaper of the two is chosen when the computation is built, as in mixed ghost clipping (Bu, Mao & Xu, "Scalable and
Efficient Training of Large Convolutional Neural Networks with Differential Privacy", arXiv:2205.10683, NeurIPS 2022).

With a `pull`, which is added to the gradient of every example, the norm is that of the sum, held for this layer only:
from `|g|^2 + 2 <g, pull> + |pull|^2`, where the terms may cancel, it could come out too small.

Everything returns float64 `[batch]`. A product of two squares leaves float32's range where the gradient itself does
not, and the T^2 signed terms of the Gram form cancel: in float32 a norm could come out far below the true one, and the
example would not be clipped.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Values below this have squares that float32 flushes to zero.
_LARGEST_LOST = 2.0**-63


def dense_kernel(inputs: tf.Tensor, cotangent: tf.Tensor, pull: tf.Tensor | None = None) -> tf.Tensor:
    """For `inputs [batch, ..., in]`, `cotangent [batch, ..., out]` and `pull [in, out]`."""
    if inputs.shape.rank == 2 and pull is None:
        return _squares(inputs) * _squares(cotangent)
    a, g = _flatten_positions(inputs), _flatten_positions(cotangent)
    positions, size_in = _sizes(a)
    if pull is None and _gram_is_cheaper(positions, size_in, _sizes(g)[-1]):
        return _gram_form(a, g)
    return _squares(_pulled(tf.matmul(a, g, transpose_a=True), pull))


def conv2d_kernel(
    inputs: tf.Tensor,
    cotangent: tf.Tensor,
    window: Sequence[int],
    strides: int,
    padding: str,
    pull: tf.Tensor | None = None,
) -> tf.Tensor:
    """For `inputs [batch, height, width, in]`, `cotangent [batch, height', width', out]` and `pull [*window, in, out]`.

    The other arguments are as in `layers.conv2d`.
    """
    *sizes_in, channels_in = _sizes(inputs)
    *sizes_out, channels_out = _sizes(cotangent)
    if padding == "SAME":
        inputs = tf.pad(inputs, [[0, 0], *map(_same_padding, sizes_in, sizes_out, window, [strides] * 2), [0, 0]])
    reach = [strides * (size - 1) + 1 for size in sizes_out]
    # What each offset of the kernel sees: the convolution is a dense layer over all of them side by side.
    seen = [
        inputs[:, i : i + reach[0] : strides, j : j + reach[1] : strides]
        for i in range(window[0])
        for j in range(window[1])
    ]
    g = _flatten_positions(cotangent)
    if pull is None and _gram_is_cheaper(math.prod(sizes_out), len(seen) * channels_in, channels_out):
        return _gram_form(_flatten_positions(tf.concat(seen, axis=-1)), g)
    shares = [None] * len(seen) if pull is None else tf.unstack(tf.reshape(pull, [-1, channels_in, channels_out]))
    # Offset by offset is faster than one product over all patches, and holds only one offset's share at a time.
    return tf.add_n(
        [
            _squares(_pulled(tf.matmul(_flatten_positions(a), g, transpose_a=True), share))
            for a, share in zip(seen, shares, strict=True)
        ]
    )


def bias(cotangent: tf.Tensor, pull: tf.Tensor | None = None) -> tf.Tensor:
    """For `cotangent [batch, ..., out]` of a bias added at every position, and `pull [out]`."""
    positions = list(range(1, cotangent.shape.rank - 1))
    return _squares(_pulled(tf.reduce_sum(cotangent, axis=positions) if positions else cotangent, pull))


def embedding_table(ids: tf.Tensor, cotangent: tf.Tensor, pull: tf.Tensor | None = None) -> tf.Tensor:
    """For `ids [batch, ...]` and `cotangent [batch, ..., dim]`; an id may occur many times in one example.

    With `pull [vocabulary, dim]` it holds a table for each example.
    """
    if ids.shape.rank == 1 and pull is None:
        return _squares(cotangent)
    batch, positions = tf.shape(ids)[0], tf.reduce_prod(tf.shape(ids)[1:])
    ids = tf.reshape(ids, tf.stack([batch, positions]))
    g = _flatten_positions(cotangent)
    if pull is not None:
        shape: list[Any] = pull.shape.as_list()
        segments = tf.cast(ids, tf.int32) + shape[0] * tf.range(batch)[:, tf.newaxis]
        tables = tf.math.unsorted_segment_sum(g, segments, batch * shape[0])
        return _squares(_pulled(tf.reshape(tables, [-1, *shape]), pull))
    # Equal ids become neighbours and share a segment; a table of gradients for each example would be far larger.
    order = tf.argsort(ids, axis=1)
    ids, g = tf.gather(ids, order, batch_dims=1), tf.gather(g, order, batch_dims=1)
    is_new = tf.pad(tf.cast(tf.not_equal(ids[:, 1:], ids[:, :-1]), tf.int32), [[0, 0], [1, 0]])
    segments = tf.cumsum(is_new, axis=1) + positions * tf.range(batch)[:, tf.newaxis]
    sums = tf.math.unsorted_segment_sum(g, segments, batch * positions)
    return _squares(tf.reshape(sums, tf.shape(g)))


def _pulled(gradients: tf.Tensor, pull: tf.Tensor | None) -> tf.Tensor:
    return gradients if pull is None else gradients + pull


def _gram_form(a: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
    """`sum_{t,u} (a_t . a_u)(g_t . g_u)` for `a [batch, T, in]` and `g [batch, T, out]`."""
    a, g = tf.cast(a, tf.float64), tf.cast(g, tf.float64)
    # Rounding may leave a sum of zero slightly below it.
    total = tf.reduce_sum(tf.matmul(a, a, transpose_b=True) * tf.matmul(g, g, transpose_b=True), axis=[1, 2])
    return tf.maximum(total, 0.0)


def _gram_is_cheaper(positions: int | None, size_in: int, size_out: int) -> bool:
    """Compares multiplications, those in float64 as two; without a known length, the form that is linear in it."""
    return positions is not None and 2 * positions * (size_in + size_out) < size_in * size_out


def _sizes(values: tf.Tensor) -> list[Any]:
    """Every size but the batch's, None where it is not known when the computation is built."""
    return values.shape.as_list()[1:]


def _flatten_positions(values: tf.Tensor) -> tf.Tensor:
    """`[batch, ..., size]` to `[batch, T, size]`, also for an empty batch, of which no size can be inferred."""
    *positions, size = _sizes(values)
    num_positions = tf.reduce_prod(tf.shape(values)[1:-1]) if None in positions else math.prod(positions)
    return tf.reshape(values, [tf.shape(values)[0], num_positions, size])


def _squares(values: tf.Tensor) -> tf.Tensor:
    """Sum of the squares of each example's values, `[batch, ...]`, in float64; never too small by underflow.

    Squares are taken in float32, for speed. What underflows is made up for by as much as it can have been; what
    overflows is infinite. Either way an example counts as larger than it is, and is clipped more.
    """
    axes = list(range(1, values.shape.rank))
    roots = tf.sqrt(tf.cast(tf.reduce_sum(tf.square(values), axis=axes), tf.float64))
    size = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float64)
    return tf.square(roots + _LARGEST_LOST * tf.sqrt(size))


def _same_padding(size_in: int, size_out: int, window: int, strides: int) -> list[int]:
    """What TensorFlow adds before and after; the odd one goes after."""
    total = max((size_out - 1) * strides + window - size_in, 0)
    return [total // 2, total - total // 2]
