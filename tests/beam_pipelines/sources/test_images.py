"""Shrinking images, by hand."""

import numpy as np
import pytest

from beam_pipelines.sources.images import shrunk, shrunken_shape
from tff_pdp.errors import ConfigError


def test_shrunk_by_hand():
    image = np.array([[0, 10, 1, 1], [20, 31, 1, 0], [255, 255, 0, 0], [255, 255, 0, 200]], np.uint8)
    # Means of 15.25, 0.75, 255 and 50.
    assert shrunk(image[np.newaxis, ..., np.newaxis], 2)[0, ..., 0].tolist() == [[15, 1], [255, 50]]


def test_colours_are_not_mixed():
    image = np.zeros((1, 2, 2, 3), np.uint8)
    image[..., 1] = [[0, 0], [0, 100]]
    assert shrunk(image, 2).tolist() == [[[[0, 25, 0]]]]
    assert (shrunk(image, 1) == image).all()


def test_shapes():
    assert shrunken_shape((28, 14, 1), 7) == (4, 2, 1)
    with pytest.raises(ConfigError, match="shrink 4 does not divide images of 28 x 14 pixels"):
        shrunken_shape((28, 14, 1), 4)
