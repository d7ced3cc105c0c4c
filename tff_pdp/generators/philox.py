"""Computes Philox 4x32-10 by elementwise operations of TensorFlow, on many blocks of many seeds at once.

TensorFlow's own operation for this generator takes one key. For several clients it has to be called in a loop, whose
lists of uint32 and uint64 have no kernels on a GPU. Multiplications, shifts and exclusive ors of uint32 and uint64 have
kernels on CPUs and GPUs, and converters for `tf.vectorized_map`. On a CPU, TensorFlow's own operation is faster.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp.generators.chacha20 import halves

_ROUNDS = 10
_WORDS_OF_A_BLOCK = 4
# The factors of the first and the third word of a counter, and what is added to both words of a key in every round.
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def keystreams(seeds: tf.Tensor, size: tf.Tensor | int, place: tf.Tensor | int) -> tf.Tensor:
    """Draws the first words of each seed's stream at a place: uint32 `[seeds, size]`.

    Guarantee: row k has the bits that TensorFlow's operation gives for seed k: the first number of a seed is the key,
      the second one is the upper half of the counter, and the lower half begins at `place * 2**40`. Row k depends on
      nothing else.
    Assumes: `size` is below 2**31.

    Args:
      seeds: int64 `[seeds, 2]`, secret.
      size: number of words, int32 scalar.
      place: int, at least 0 and below 2**23.
    """
    num_blocks: Any = -(-size // _WORDS_OF_A_BLOCK)
    key_low, key_high, upper_low, upper_high = (
        halves(seeds)[:, number, half, tf.newaxis] for number in (0, 1) for half in (0, 1)
    )
    block = tf.cast(tf.range(num_blocks), tf.uint32)[tf.newaxis]
    # 2**40 is 2**8 in the second word: there are fewer than 2**32 blocks.
    second = tf.cast(tf.cast(place, tf.int32) * 2**8, tf.uint32)
    words = (block, second, upper_low, upper_high)
    for number in range(_ROUNDS):
        of_first, of_third = (_product(word, factor) for word, factor in zip(words[::2], _FACTORS, strict=True))
        first_key, second_key = (
            key + tf.constant(number * step % 2**32, tf.uint32)
            for key, step in zip((key_low, key_high), _KEY_STEPS, strict=True)
        )
        words = (
            _xor(_xor(of_third.upper, words[1]), first_key),
            of_third.lower,
            _xor(_xor(of_first.upper, words[3]), second_key),
            of_first.lower,
        )
    blocks = tf.concat([tf.expand_dims(word, -1) for word in words], axis=-1)
    return tf.reshape(blocks, [tf.shape(seeds)[0], _WORDS_OF_A_BLOCK * num_blocks])[:, :size]


def row_words(key: tf.Tensor, rows: tf.Tensor, size: tf.Tensor | int, place: tf.Tensor | int) -> tf.Tensor:
    """Draws words for each row of a batch: uint32 `[rows, size]`.

    Guarantee: a row's words depend on the key, the row's number and the place alone; rows with different numbers have
      different counters.

    Args:
      key: int64 `[2]`, secret.
      rows: int64 `[rows]`, numbers of the rows.
      size: number of words for each row, int32 scalar, below 2**31.
      place: int, at least 0 and below 2**23.
    """
    return keystreams(tf.stack([key[0] + tf.zeros_like(rows), key[1] + rows], axis=1), size, place)


class _Product(NamedTuple):
    lower: tf.Tensor
    upper: tf.Tensor


def _product(word: tf.Tensor, factor: int) -> _Product:
    """Multiplies 32 bits by 32 bits: both halves of the product, uint32."""
    product = tf.cast(word, tf.uint64) * tf.constant(factor, tf.uint64)
    upper = tf.bitwise.right_shift(product, tf.constant(32, tf.uint64))
    return _Product(tf.cast(product, tf.uint32), tf.cast(upper, tf.uint32))


def _xor(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(one, other)
