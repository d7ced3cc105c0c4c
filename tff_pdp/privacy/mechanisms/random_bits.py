"""Random bits for several clients at once, and Gaussians made from them.

A client's bits depend on its own seed alone: the same on every engine, alone or in a stack of clients. The generator is
Philox 4x32-10 in counter mode, TensorFlow's own (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011); a seed is its key and the upper half of its counter. It is no cryptographic generator; TensorFlow has none.
"""

import math
from typing import Any

import tensorflow as tf

_PHILOX = 1
# Draws of one seed lie 2**_PLACE_BITS blocks of 128 bits apart.
_PLACE_BITS = 40
# Clients whose bits are drawn in one step of the loop over clients. Unrolled, they run in parallel.
_UNROLLED = 32


def draw_bits(seed: tf.Tensor, size: tf.Tensor | int, place: tf.Tensor | int = 0) -> tf.Tensor:
    """Draws uint32 `[size]`; a longer draw from the same place begins with the shorter one.

    Args:
      seed: int64 `[2]`, secret.
      size: int32 scalar.
      place: int, at least 0 and below 2**23; another one for each use of a seed.
    """
    words = tf.bitcast(seed, tf.uint64)
    start = tf.cast(place, tf.uint64) * (1 << _PLACE_BITS)
    return _philox(words[:1], tf.stack([start, words[1]]), size)


def draw_bits_of_all(seeds: tf.Tensor, size: tf.Tensor | int) -> tf.Tensor:
    """Draws uint32 `[clients, size]`: what `draw_bits` draws at place 0 for each of the seeds, int64 `[clients, 2]`."""
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
    return 5 * math.ceil(size / 4)


def gaussians(bits: tf.Tensor, size: int, stddev: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Makes Gaussians of mean zero, float32 `[..., size]`, from uint32 `[..., bits_for_gaussians(size)]`.

    TensorFlow's own draws never exceed 5.68 standard deviations, and a bounded noise cannot hide all that an unbounded
    one does: with as many coordinates as a model has, and as many steps, a draw beyond that is no rarity. Here, in Box
    and Muller's transform ("A Note on the Generation of Random Normal Deviates", 1958), the radius comes from 56 bits.
    It reaches 8.89, beyond which a coordinate lies with a probability of 6e-19, and it is never zero.

    A pair takes two and a half words: 56 bits for its radius and 24, as many as float32 holds, for its angle. A size
    that is a multiple of four saves a copy.
    """
    pairs = 2 * math.ceil(size / 4)
    high, angle, low = tf.split(bits, [pairs, pairs, pairs // 2], axis=-1)
    # The angle's word lends its last 8 bits to the radius; the middle 16 are half of a word shared with another pair.
    low = tf.reshape(tf.bitcast(low, tf.uint16), tf.shape(high))
    last = tf.bitwise.bitwise_and(angle, 255)
    fraction = (_to_float(low) + (_to_float(last) + 0.5) * 2.0**-8) * 2.0**-16
    # Half below the last of the bits keeps the uniform number off zero. Close to one, float32 is coarse and would round
    # one pair in 2**25 up to it, whose radius were zero: no noise. They get float32's last number below one.
    uniform = tf.minimum((_to_float(high) + fraction) * 2.0**-32, 1.0 - 2.0**-24)
    radius = stddev * tf.sqrt(-2.0 * tf.math.log(uniform))
    angle = _to_float(tf.bitwise.right_shift(angle, 8)) * (2.0 * math.pi * 2.0**-24)
    draws = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=-1)
    return draws if size == 2 * pairs else tf.split(draws, [size, 2 * pairs - size], axis=-1)[0]


def _to_float(words: tf.Tensor) -> tf.Tensor:
    return tf.cast(words, tf.float32)
