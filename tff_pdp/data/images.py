"""Labelled images with a train and a test side, as published data sets come, and how they are made smaller."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_pdp.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Images:
    """Some labelled images: `x` uint8 `[n, height, width, channels]`, `y` int64 `[n]`."""

    x: np.ndarray
    y: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> "Images":
        """The images at these positions, int64 `[m]`."""
        return Images(self.x[chosen], self.y[chosen])


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """A published data set.

    Attributes:
      train: its train side.
      test: its test side.
      num_classes: labels are integers in `[0, num_classes)`.
      origin: what it was read from, as JSON has it.
    """

    train: Images
    test: Images
    num_classes: int
    origin: Sequence[Any]


def shrunk(images: np.ndarray, factor: int) -> np.ndarray:
    """Averages squares of `factor * factor` pixels, rounded.

    Args:
      images: uint8 `[n, height, width, channels]`.
      factor: divides height and width; see `shrunken_shape`.

    Returns:
      uint8 `[n, height / factor, width / factor, channels]`.
    """
    number, height, width, channels = images.shape
    squares = images.reshape(number, height // factor, factor, width // factor, factor, channels)
    return np.rint(squares.mean(axis=(2, 4))).astype(np.uint8)


def shrunken_shape(shape: tuple[int, ...], factor: int) -> tuple[int, int, int]:
    """The shape `(height, width, channels)` of images of this one after `shrunk`.

    Raises:
      ConfigError: the factor is below 1, or does not divide the height or the width.
    """
    height, width, channels = shape
    if factor < 1:
        raise ConfigError(f"data.arguments: shrink must be at least 1; got {factor}")
    if height % factor or width % factor:
        raise ConfigError(f"data.arguments: shrink {factor} does not divide images of {height} x {width} pixels")
    return height // factor, width // factor, channels
