"""Random bits for several clients at once, and Gaussians made from them.

A client's bits depend on its own seed alone: the same on every engine, alone or in a stack of clients. There are two
generators. `philox` is Philox 4x32-10 in counter mode, TensorFlow's own (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011); a seed is its key and the upper half of its counter. It is no cryptographic generator.
`chacha20` is one, at several times the cost (`chacha20`); a seed is its key.
"""

import math
from typing import Any

import tensorflow as tf

from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms import chacha20

_PHILOX = 1
# Draws of one seed lie 2**_PLACE_BITS blocks of 128 bits apart.
_PLACE_BITS = 40
# Three words of 64 bits, each of two of 32.
_WORDS_OF_A_PAIR = 6
# Clients whose bits are drawn in one step of the loop over clients. Unrolled, they run in parallel.
_UNROLLED = 32


def draw_bits(
    seed: tf.Tensor, size: tf.Tensor | int, place: tf.Tensor | int = 0, generator: Generator = "philox"
) -> tf.Tensor:
    """Draws uint32 `[size]`; a longer draw from the same place begins with the shorter one.

    Args:
      seed: int64 `[2]`, secret.
      size: int32 scalar.
      place: int, at least 0 and below 2**23; another one for each use of a seed.
      generator: of the bits.
    """
    if generator == "chacha20":
        return chacha20.keystreams(seed[tf.newaxis], size, place)[0]
    words = tf.bitcast(seed, tf.uint64)
    start = tf.cast(place, tf.uint64) * (1 << _PLACE_BITS)
    return _philox(words[:1], tf.stack([start, words[1]]), size)


def draw_bits_of_all(seeds: tf.Tensor, size: tf.Tensor | int, generator: Generator = "philox") -> tf.Tensor:
    """Draws uint32 `[clients, size]`: what `draw_bits` draws at place 0 for each of the seeds, int64 `[clients, 2]`."""
    if generator == "chacha20":
        return chacha20.keystreams(seeds, size, nonce=0)
    if seeds.shape[0] == 1:
        return draw_bits(seeds[0], size)[tf.newaxis]
    num_clients: Any = tf.shape(seeds)[0]
    padded = tf.pad(seeds, [[0, -num_clients % _UNROLLED], [0, 0]])
    words = tf.reshape(tf.bitcast(padded, tf.uint64), [-1, _UNROLLED, 2])

    def draw_block(block: tf.Tensor) -> tf.Tensor:
        keys = tf.unstack(block[:, :1])
        counters = tf.unstack(tf.concat([tf.zeros([_UNROLLED, 1], tf.uint64), block[:, 1:]], axis=1))
        return tf.stack([_philox(key, counter, size) for key, counter in zip(keys, counters, strict=True)])

    blocks = tf.map_fn(
        draw_block,
        words,
        fn_output_signature=tf.TensorSpec([_UNROLLED, None], tf.uint32),
        parallel_iterations=1,
    )
    return tf.reshape(blocks, [-1, size])[:num_clients]


def _philox(key: tf.Tensor, counter: tf.Tensor, size: tf.Tensor | int) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[size], key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )


def bits_for_gaussians(size: int) -> int:
    """How many 32-bit words `gaussians` takes to make `size` of them."""
    return _WORDS_OF_A_PAIR * math.ceil(size / 2)


def gaussians(bits: tf.Tensor, size: int) -> tf.Tensor:
    """Makes standard Gaussians, float64 `[..., size]`, from uint32 `[..., bits_for_gaussians(size)]`.

    Box and Muller's transform ("A Note on the Generation of Random Normal Deviates", 1958) makes two of them from a
    radius and an angle, of 128 and of 64 random bits that no other pair has. TensorFlow's own draws end at 5.68
    standard deviations; these end at 13.4.

    Guarantee: let the bits be the first digits of ideal uniform numbers, and x the ideal pair that these make. The pair
      made here is within `grid_distance.ROUNDING * |x|` of x, if |x| is at most 10.6.

      With u = 2**-53, the uniform number v of the radius has a relative error of 3 u at either end of (0, 1): its
      distance from the nearer end is what is computed with, and what the bits are the digits of. The exponential
      variable -log(v) then has one of 8.4 u, where TensorFlow's log and log1p are right to 4 u; the radius has 5.2 u,
      the angle 3 u of at most pi, sine and cosine 4 u each, and products u. Along the radius and across it that makes
      sqrt(5.2^2 + (3 pi)^2) + 6 < 17 times u |x|, to which the digits that are not drawn add less than 1 u |x| up to
      there.
    Assumes: bits are uniform and independent; TensorFlow's float64 `log`, `log1p`, `sin` and `cos` are right to 4 u.
    """
    pairs = math.ceil(size / 2)
    words = tf.reshape(bits, tf.concat([tf.shape(bits)[:-1], [3 * pairs, 2]], axis=0))
    # As float64, in which lists are split on GPUs too. Signed: the sign says which end of (0, 1) is the nearer one.
    numbers = tf.cast(tf.bitcast(words, tf.int64), tf.float64)
    numbers = tf.ensure_shape(numbers, [*bits.shape[:-1], 3 * pairs])
    high, low, angle = tf.split(numbers, 3, axis=-1)
    # Both words count from zero up, so that no digit of a small distance is rounded away. The half of a last digit
    # keeps it off zero.
    low = tf.where(low < 0, low + 2.0**64, low) + 0.5
    distance = tf.where(high < 0, -1.0 - high, high) * 2.0**-64 + low * 2.0**-128
    logs = tf.where(high < 0, tf.math.log1p(-distance), tf.math.log(distance))
    radius, angle = tf.sqrt(-2.0 * logs), angle * (math.pi * 2.0**-63)
    draws = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=-1)
    return draws if size == 2 * pairs else tf.split(draws, [size, 1], axis=-1)[0]
