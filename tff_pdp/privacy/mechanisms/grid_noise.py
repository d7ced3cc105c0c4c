"""Adds Gaussian noise to sums on a public grid, so that floating point reveals no more than the ideal mechanism.

The grid consists of the multiples of a step, a power of two that follows from public numbers alone. The sum is rounded
to the grid, and so is the noise, a Gaussian of the full standard deviation. Whole numbers of steps below 2**53 are
added up in float64 without rounding. A sum of whole steps plus a rounded Gaussian equals the sum plus the Gaussian,
rounded. So the result is post-processing of the ideal Gaussian mechanism. (For attacks on noise without a grid see
Mironov, "On significance of the least significant bits for differential privacy", CCS 2012.)

Two roundings have a cost. First, if two sums are rounded, their difference may become longer by up to
`sqrt(size) * step`. Where records cannot be rounded before they are added up, clip norms are reduced by this length
(`clip_norm_on_grid`; Casacuberta et al., "Widespread underestimation of sensitivity in differentially private libraries
and how to fix it", CCS 2022). Second, the noise is computed by floating-point functions, which move a few draws to a
neighbouring step; `accounting.grid_distance` charges for the difference between the distributions.
"""

import math

import tensorflow as tf

from tff_pdp.privacy.accounting.grid_distance import MOST_STEPS

# A step is at most this share of the standard deviation, or of the clip norm if that is larger, and more than half of
# this share: a standard deviation has at most `grid_distance.MOST_STEPS` steps.
_FINE = 2.0 / MOST_STEPS
# A step that is below all float32 numbers and their products, and whose inverse is a float64.
_NO_GRID = 2.0**-400
# Leaves the mantissa's bits out of a float64: the largest power of two that is no larger.
_EXPONENT = 0x7FF0000000000000


def grid_step(clip_norm: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
    """Chooses the grid's step, a power of two: float64, a scalar or one step for each pair of arguments.

    The step is public, because all arguments are public. With an infinite clip norm nothing is protected, and the step
    is so small that rounding changes no float32 number. A clip norm that is NaN gives an infinite step, which makes all
    values NaN.

    Args:
      clip_norm: L2 bound on what one record adds to the sum.
      stddev: standard deviation of the noise; may be zero.
    """
    clip, noise = tf.cast(clip_norm, tf.float64), tf.cast(stddev, tf.float64)
    step = tf.maximum(clip, noise) * _FINE
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(step, tf.int64), _EXPONENT), tf.float64)
    return tf.where(tf.math.is_inf(clip), tf.constant(_NO_GRID, tf.float64), power)


def clip_norm_on_grid(clip_norm: tf.Tensor, step: tf.Tensor, size: int, margin: float) -> tf.Tensor:
    """Reduces a clip norm so that rounded sums still differ by at most the given `clip_norm`: float64 of its shape.

    Guarantee: let two sums differ in L2 norm by at most the result, apart from an error of `margin * clip_norm / 2` in
      each sum. After `whole_steps`, which moves each value by at most half a step, the two sums differ by at most
      `clip_norm`.

    Args:
      clip_norm: L2 bound on what one record may add.
      step: step of the grid.
      size: number of values in a sum.
      margin: fraction of the clip norm that is reserved for other errors, well above 2**-50.
    """
    shorter = tf.cast(clip_norm, tf.float64) * (1.0 - margin) - step * (math.sqrt(size) * (1.0 + 2.0**-50))
    # With far too much noise nothing is left of the clip norm, and nothing is released.
    return tf.maximum(shorter, 0.0)


def whole_steps(values: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Rounds float64 values to the grid: the nearest whole numbers of steps, as float64."""
    return tf.round(values * (1.0 / step))


def whole_steps_within(values: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Rounds float64 values toward zero to the grid: returns the whole numbers of steps, as float64.

    Rounding toward zero does not increase a record's norm, so it costs no privacy.
    """
    scaled = values * (1.0 / step)
    # GPUs have no ceiling of float64.
    return tf.where(scaled < 0.0, -tf.floor(-scaled), tf.floor(scaled))


def noise_in_steps(gaussians: tf.Tensor, stddev: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Makes noise from standard Gaussians: whole numbers of steps, float64; zeros where the standard deviation is zero.

    Guarantee: the distribution is that of ideal Gaussians rounded to the grid, up to a distance that
      `accounting.grid_distance` charges for.
    Assumes: as in the function `random_bits.gaussians`, which made the argument `gaussians`; `stddev` is a float32
      number or a product of two, so that dividing by a power of two is exact.
    """
    return tf.round(gaussians * (tf.cast(stddev, tf.float64) / step))
