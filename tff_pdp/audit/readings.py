"""Reads a silo's noise multiplier from one upload of the silo and from public parameters.

DP-SGD noise hides single records, not its own strength. Coordinates without signal show the noise directly; and because
most of an upload is noise at strict budgets, the median over all coordinates is a second estimate.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

# The median of |x| for a standard Gaussian x.
_MEDIAN_OF_GAUSSIAN = 0.6744897501960817
# A signal only adds to the coordinates that were taken to be quiet; an excess over the median shows that there is one.
_EXCESS = 1.15
# Fewer coordinates have a standard error of more than a tenth.
_LEAST_QUIET = 50

Estimator = Literal["quiet", "median"]


class Reading(NamedTuple):
    """The noise that an observer reads in an upload.

    Attributes:
      stddev: standard deviation of the noise on one coordinate of the upload.
      estimator: `quiet`, from coordinates without signal; `median`, from the median of absolute values.
      num_values: number of coordinates that the estimate is made from.
    """

    stddev: float
    estimator: Estimator
    num_values: int


def read_noise(upload: Mapping[str, np.ndarray], quiet: Mapping[str, np.ndarray] | None = None) -> Reading:
    """Estimates the standard deviation of the noise on an upload.

    The estimate `quiet` is the root mean square over coordinates without signal, whose noise has mean zero; its
    relative standard error is `1 / sqrt(2 n)` for n coordinates. The estimate `median` is `median(|upload|) / 0.6745`
    over all coordinates, and is too large where the signal is not small beside the noise. `median` is used if there are
    fewer than 50 quiet coordinates, or if `quiet` is more than 15 % above `median`: the quiet coordinates then carry a
    signal after all.

    Args:
      upload: difference between a silo's upload and the upload without any gradient: float arrays by name of weights.
      quiet: for some of the names, bool arrays of the same shape: true where the silo's examples have no effect.

    Raises:
      ValueError: the upload has no coordinates.
    """
    values = np.concatenate([np.asarray(value, np.float64).ravel() for value in upload.values()] or [np.empty(0)])
    if not values.size:
        raise ValueError("an upload without coordinates shows no noise")
    by_median = Reading(float(np.median(np.abs(values))) / _MEDIAN_OF_GAUSSIAN, "median", values.size)
    silent = [np.asarray(upload[name], np.float64)[mask] for name, mask in (quiet or {}).items() if name in upload]
    without_signal = np.concatenate([*silent, np.empty(0)])
    if without_signal.size < _LEAST_QUIET:
        return by_median
    by_quiet = Reading(float(np.sqrt(np.mean(np.square(without_signal)))), "quiet", without_signal.size)
    return by_median if by_quiet.stddev > _EXCESS * by_median.stddev else by_quiet


def noise_multiplier_of(stddev: float, gain: float, clip_norm: float, expected_batch_size: float) -> float:
    """Returns the noise multiplier z for which an upload has noise of a given standard deviation.

    A gradient of DP-SGD has noise of standard deviation `z C / B` on each coordinate, and an upload has
    `gain * z C / B`. For tau plain steps of rate eta the gain is `eta sqrt(tau)`, so that
    `z = stddev * B / (eta C sqrt(tau))`.

    Args:
      stddev: standard deviation of the noise on one coordinate of the upload.
      gain: root of the sum of squares of the factors with which the round's gradients enter the upload, positive.
      clip_norm: C, L2 bound on each example's gradient, positive.
      expected_batch_size: B, the constant that noised sums are divided by, positive.

    >>> noise_multiplier_of(0.1 * 2.0 * 1.0 * math.sqrt(100) / 64, 0.1 * math.sqrt(100), 1.0, 64.0)
    2.0
    """
    return stddev * expected_batch_size / (gain * clip_norm)


def frame_of(input_shape: tuple[int, ...], width: int) -> np.ndarray | None:
    """Returns a bool array of `input_shape` that is true in the outer frame of an image, `width` pixels wide.

    The result is None for inputs that are not images (`[height, width]`, with or without channels), for images without
    an interior, and for a frame of width 0.
    """
    if not width or len(input_shape) not in (2, 3) or min(input_shape[:2]) <= 2 * width:
        return None
    frame = np.ones(input_shape, bool)
    frame[width:-width, width:-width] = False
    return frame


def relative_error(found: float, true: float) -> float:
    """Returns `found / true - 1`; 0 for equal values; infinity for different values if `true` is 0 or infinite.

    >>> relative_error(1.1, 1.0) < 0.11, relative_error(math.inf, math.inf), relative_error(2.0, 0.0)
    (True, 0.0, inf)
    """
    if found == true:
        return 0.0
    return found / true - 1 if true and math.isfinite(true) else math.inf
