"""Draws dropout masks: every example of a batch has a mask of its own, from random words of its own.

A mask depends on the step's key, on the example's place in its client's data, and on the number of the dropout layer.
It depends neither on the other examples of the batch nor on the example's place in the batch. So masks are equal for
one client and for stacks of clients, on all engines, and after a stopped run has been continued.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tff_pdp.generators import philox

# Dropout rates are rounded to multiples of 2**-16: a random word makes two decisions.
RATE_BITS = 16


@dataclasses.dataclass(frozen=True)
class RowDraws:
    """Random words for each example (row) of a batch.

    Attributes:
      key: int64 `[2]`, secret, and new in every step.
      rows: int64 `[batch]`, each example's place in its client's data.
      row_words: `(key, rows, size, place) -> uint32 [batch, size]`; each place, below 2**22, has words of its own.
    """

    key: tf.Tensor
    rows: tf.Tensor
    row_words: Callable[[tf.Tensor, tf.Tensor, int, int], tf.Tensor] = philox.row_words

    def words(self, size: int, place: int) -> tf.Tensor:
        """Draws `size` words for each example: uint32 `[batch, size]`."""
        return self.row_words(self.key, self.rows, size, place)


def dropout(
    x: tf.Tensor, rate: float, draws: RowDraws, place: int, mask_shape: Sequence[int] | None = None
) -> tf.Tensor:
    """Sets values of `x [batch, ...]` to zero with probability `rate`, and divides all others by `1 - rate`.

    The rate is rounded to a multiple of 2**-16, and the division is by the rounded probability: each value's mean over
    all masks is exactly the value.

    Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014.

    Args:
      x: float32, with sizes that are known when the computation is built, except for the batch size.
      rate: probability, from 0 to 1.
      draws: random words of the batch's examples.
      place: number of the dropout layer in its model; layers with different numbers have independent masks.
      mask_shape: shape of one example's mask, which is broadcast to the example; by default the example's shape.
    """
    threshold = round(rate * 2**RATE_BITS)
    if threshold == 0:
        return x
    if threshold == 2**RATE_BITS:
        return tf.zeros_like(x)
    sizes: list[Any] = list(x.shape[1:] if mask_shape is None else mask_shape)
    size = math.prod(sizes)
    words = draws.words(-(-size // 2), place)
    lower = tf.bitwise.bitwise_and(words, tf.constant(2**RATE_BITS - 1, tf.uint32))
    upper = tf.bitwise.right_shift(words, tf.constant(RATE_BITS, tf.uint32))
    # As float32, which every device compares; 16 bits fit.
    decisions = tf.cast(tf.concat([lower, upper], axis=1), tf.float32)[:, :size]
    factor = 2.0**RATE_BITS / (2**RATE_BITS - threshold)
    mask = tf.where(decisions >= float(threshold), factor, 0.0)
    return x * tf.reshape(mask, [-1, *sizes])
