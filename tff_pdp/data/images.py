"""Labelled images with a train and a test side, as published data sets come."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


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
    """A published data set: its train side, its test side, and what it was read from, as JSON has it."""

    train: Images
    test: Images
    origin: Sequence[Any]
