"""The noise of earlier versions, kept only as the thing that attacks must break.

It is Box and Muller's transform in float32, added in float32 to a float32 sum. Nothing may be protected by it: an angle
is one of 2**24, two coordinates share it, and a sum in float32 lies on a grid that depends on the sum.
"""

import math

import numpy as np
import tensorflow as tf


def old_bits_for_gaussians(size: int) -> int:
    """Returns how many 32-bit words `old_gaussians` takes to make `size` of them."""
    return 5 * math.ceil(size / 4)


def old_gaussians(bits: tf.Tensor, size: int, stddev: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Makes float32 `[..., size]` from uint32 `[..., old_bits_for_gaussians(size)]`, as `gaussians` once did."""
    pairs = 2 * math.ceil(size / 4)
    high, angle, low = tf.split(bits, [pairs, pairs, pairs // 2], axis=-1)
    low = tf.reshape(tf.bitcast(low, tf.uint16), tf.shape(high))
    last = tf.bitwise.bitwise_and(angle, 255)
    fraction = (_to_float(low) + (_to_float(last) + 0.5) * 2.0**-8) * 2.0**-16
    uniform = tf.minimum((_to_float(high) + fraction) * 2.0**-32, 1.0 - 2.0**-24)
    radius = stddev * tf.sqrt(-2.0 * tf.math.log(uniform))
    angle = _to_float(tf.bitwise.right_shift(angle, 8)) * (2.0 * math.pi * 2.0**-24)
    draws = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=-1)
    return draws if size == 2 * pairs else tf.split(draws, [size, 2 * pairs - size], axis=-1)[0]


def _to_float(words: tf.Tensor) -> tf.Tensor:
    return tf.cast(words, tf.float32)


def old_noised_silo_sum(total: np.ndarray, stddev: float, rng: np.random.Generator) -> np.ndarray:
    """Noises sums `[cases, values]` as DP-SGD once did in silos: by standard Gaussians in whole fours."""
    cases, values = total.shape
    size = 4 * math.ceil(values / 4)
    noise = old_gaussians(_bits(cases, size, rng), size) * tf.constant(stddev, tf.float32)
    return np.asarray(tf.constant(total, tf.float32) + noise[:, :values])


def old_noised_user_sum(total: np.ndarray, stddev: float, rng: np.random.Generator) -> np.ndarray:
    """Noises sums `[cases, values]` as a server once noised those of users' updates."""
    cases, values = total.shape
    noise = old_gaussians(_bits(cases, values, rng), values, tf.constant(stddev, tf.float32))
    return np.asarray(tf.constant(total, tf.float32) + noise)


def _bits(cases: int, size: int, rng: np.random.Generator) -> tf.Tensor:
    # Of which generator the bits are makes no difference to the attacks.
    return tf.constant(rng.integers(0, 2**32, (cases, old_bits_for_gaussians(size)), np.uint32))
