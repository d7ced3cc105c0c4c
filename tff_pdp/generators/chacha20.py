"""Computes ChaCha20 by TensorFlow on many blocks at once: a cryptographic generator inside graphs.

Engines can run only TensorFlow's own operations, and none of these is a cryptographic generator. So the cipher is
written with additions, shifts and exclusive ors of uint32. These have kernels on CPUs and GPUs, and converters for
`tf.vectorized_map`. (On a GPU, additions of int32 would go through the host's memory.)

Source: Bernstein, "ChaCha, a variant of Salsa20", 2008, also for the form with keys of 128 bits; RFC 8439.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# The rows of a state of 4 x 4 words: constants, both halves of the key, and counter and nonce.
Rows = Sequence[tf.Tensor]

_DOUBLE_ROUNDS = 10
_WORDS_OF_A_BLOCK = 16
# The constants of keys of 128 bits, which fill both halves of a state's key.
_CONSTANTS = np.frombuffer(b"expand 16-byte k", "<u4").astype(np.uint32)


def keystreams(seeds: tf.Tensor, size: tf.Tensor | int, nonce: tf.Tensor | int) -> tf.Tensor:
    """Draws the first words of each seed's key stream, uint32 `[seeds, size]`, in the order of the cipher.

    Guarantee: row k is the key stream of ChaCha20 with the 128 bits of seed k as its key, the 64 bits of `nonce`, and a
      counter of 64 bits that begins at zero; all numbers are little-endian. Row k depends on nothing else.
    Assumes: `size` is below 2**31.

    Args:
      seeds: int64 `[seeds, 2]`, secret.
      size: number of words, int32 scalar.
      nonce: int, at least 0: one for all seeds, or int64 `[seeds]`.
    """
    num_seeds, num_blocks = tf.shape(seeds)[0], -(-size // _WORDS_OF_A_BLOCK)
    key = tf.transpose(tf.reshape(halves(seeds), [num_seeds, 4]))[:, :, tf.newaxis]
    nonces = tf.reshape(halves(tf.cast(nonce, tf.int64)), [-1, 1, 2])
    counter = tf.cast(tf.range(num_blocks), tf.uint32)[tf.newaxis]
    # The upper half of the counter: there are fewer than 2**32 blocks.
    zeros = tf.zeros_like(nonces[:, :, 0] + counter)
    place = tf.stack([zeros + counter, zeros, zeros + nonces[:, :, 0], zeros + nonces[:, :, 1]])
    blocks = block_words([tf.constant(_CONSTANTS)[:, tf.newaxis, tf.newaxis], key, key, place])
    return tf.reshape(tf.transpose(blocks, [1, 2, 0]), [num_seeds, _WORDS_OF_A_BLOCK * num_blocks])[:, :size]


def row_words(key: tf.Tensor, rows: tf.Tensor, size: tf.Tensor | int, place: int) -> tf.Tensor:
    """Draws words for each row of a batch: uint32 `[rows, size]`.

    Guarantee: row k has the key stream of `key` with the nonce `place * 2**40 + rows[k]`.

    Args:
      key: int64 `[2]`, secret.
      rows: int64 `[rows]`, numbers of the rows, each at least 0 and below 2**40.
      size: number of words for each row, int32 scalar.
      place: int, at least 0 and below 2**23.
    """
    return keystreams(key + tf.zeros_like(rows)[:, tf.newaxis], size, rows + place * 2**40)


def block_words(rows: Rows) -> tf.Tensor:
    """Computes ChaCha20's block function: uint32 `[16, ...]`, the words of each block.

    Args:
      rows: the four rows of the blocks' states, each uint32 `[4, ...]`; axes after the first broadcast.
    """
    # The first double round is outside of the loop, whose variables then have the shape that rows broadcast to.
    _, *mixed = tf.while_loop(
        lambda number, *_: number < _DOUBLE_ROUNDS,
        lambda number, *state: (number + 1, *_double_round(state)),
        (tf.constant(1), *_double_round(rows)),
        parallel_iterations=1,
    )
    return tf.concat([before + after for before, after in zip(rows, mixed, strict=True)], axis=0)


def halves(numbers: tf.Tensor) -> tf.Tensor:
    """Splits int64 `[...]` into halves, the lower one first: uint32 `[..., 2]`."""
    # The result is that of a bitcast, for which vectorized_map has no converter.
    shifted = tf.stack([numbers, tf.bitwise.right_shift(numbers, tf.constant(32, tf.int64))], axis=-1)
    return tf.cast(tf.bitwise.bitwise_and(shifted, tf.constant(2**32 - 1, tf.int64)), tf.uint32)


def _double_round(rows: Rows) -> Rows:
    """Does a round on columns, and a round on diagonals, which are columns once rows have been turned."""
    a, b, c, d = _quarter_rounds(*rows)
    a, b, c, d = _quarter_rounds(a, _turn(b, 1), _turn(c, 2), _turn(d, 3))
    return a, _turn(b, 3), _turn(c, 2), _turn(d, 1)


def _quarter_rounds(a: Any, b: Any, c: Any, d: Any) -> Rows:
    """Does quarter rounds of all four columns."""
    a = a + b
    d = _rotate(tf.bitwise.bitwise_xor(d, a), 16)
    c = c + d
    b = _rotate(tf.bitwise.bitwise_xor(b, c), 12)
    a = a + b
    d = _rotate(tf.bitwise.bitwise_xor(d, a), 8)
    c = c + d
    b = _rotate(tf.bitwise.bitwise_xor(b, c), 7)
    return a, b, c, d


def _rotate(words: tf.Tensor, bits: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(words, tf.constant(bits, tf.uint32))
    return tf.bitwise.bitwise_or(left, tf.bitwise.right_shift(words, tf.constant(32 - bits, tf.uint32)))


def _turn(row: tf.Tensor, columns: int) -> tf.Tensor:
    return tf.concat([row[columns:], row[:columns]], axis=0)
