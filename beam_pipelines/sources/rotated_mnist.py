"""Divides MNIST among silos in known clusters: rotated and masked MNIST.

Source: Liu, "On Privacy and Personalization in Machine Learning", CMU-RI-TR-23-17, 2023, appendix B.1. The images are
shuffled and divided evenly. The clusters are groups of silos of equal size, and each group has its own rotation. Each
silo has one mask for all its images: on a grid of patches of 2 x 2 pixels, each patch is white with a given
probability. This probability adjusts how much the silos of a group differ.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from beam_pipelines.options import RawData, SourceSettings
from beam_pipelines.sources.divided import silo_of
from beam_pipelines.sources.images import Images, shrunk, shrunken_shape
from beam_pipelines.sources.mnist import read_mnist
from beam_pipelines.sources.silo_files import SiloArrays, array_data
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count, CountOrZero, Fraction

_PATCH = 2
_WHITE = 255
# Each has its own random stream: another number of images does not change the masks.
_SHUFFLE_TRAIN, _SHUFFLE_TEST, _GROUPS, _MASKS = range(4)


class RotatedMnist(SourceSettings):
    """Divides MNIST among silos, and rotates and masks the images (Liu, CMU-RI-TR-23-17, 2023, appendix B.1).

    `input` is the folder of MNIST's four `idx.gz` files, or of data in that format with ten classes. The manifest's
    parameter `rotation_groups` has each silo's group, the true clustering. MNIST's own test images are the test
    examples; `test_fraction` is not used. `seed` decides which silo gets which images, rotation and mask.

    Attributes:
      num_silos: number of silos, a multiple of `num_rotations`.
      num_rotations: number of groups of silos; the images of group g = 0, 1, ... are rotated by 90 g degrees.
      mask_fraction: probability that a patch of 2 x 2 pixels is white in all images of a silo; 0 for no masks.
      train_per_silo: number of images of each silo for training and validation.
      test_per_silo: number of test images of each silo.
      shrink: side, in pixels, of the squares that are each averaged to one pixel after masking; 1 changes nothing.
    """

    num_silos: Count = 40
    num_rotations: Annotated[int, Meta(ge=1, le=4)] = 4
    mask_fraction: Fraction = 0.0
    train_per_silo: Count = 1500
    test_per_silo: CountOrZero = 250
    shrink: Count = 1

    def __post_init__(self):
        super().__post_init__()
        if self.num_silos % self.num_rotations:
            raise ValueError(
                f"num_silos {self.num_silos} must be a multiple of num_rotations {self.num_rotations}, so that the "
                "groups have the same size"
            )

    def build(self, workspace: Path) -> RawData:
        """Writes the silos' images to `workspace/rotated_mnist.npz`; errors as in `SourceSettings.build`."""
        mnist = read_mnist(Path(self.input))
        self.check_features(shrunken_shape(mnist.train.x.shape[1:], self.shrink), mnist.num_classes)
        groups, silos = rotated_mnist(mnist.train, mnist.test, self)
        own = {name: getattr(self, name) for name in RotatedMnist.__annotations__}
        parameters = {**own, "rotation_groups": groups, "origin": mnist.origin}
        return array_data("rotated_mnist", workspace, silos, self.num_classes, parameters)


def rotated_mnist(train: Images, test: Images, options: RotatedMnist) -> tuple[dict[str, int], Iterator[SiloArrays]]:
    """Makes silos of `train_per_silo` examples and `test_per_silo` test examples; equal options give equal silos.

    Returns:
      The group of each silo by the silo's name (`silo_000`, ...), and the silos, made one at a time. Group g is rotated
      by 90 g degrees, counter-clockwise. Silos: x uint8 `[n, height / shrink, width / shrink, 1]`, y int64 `[n]`.

    Raises:
      ConfigError: there are too few images, or the images are not square and cannot be rotated.
    """
    (height, width), seed = train.x.shape[1:3], options.seed
    if options.num_rotations > 1 and height != width:
        raise ConfigError(f"data: images of {height} x {width} pixels cannot be rotated by 90 degrees: not square")
    train_parts = _divide_rotations(train, options.num_silos, options.train_per_silo, "train", [seed, _SHUFFLE_TRAIN])
    test_parts = _divide_rotations(test, options.num_silos, options.test_per_silo, "test", [seed, _SHUFFLE_TEST])
    order = np.random.default_rng([seed, _GROUPS]).permutation(options.num_silos)
    groups = {_name(silo): int(rank) % options.num_rotations for silo, rank in enumerate(order)}

    def silos() -> Iterator[SiloArrays]:
        for silo, (train_part, test_part) in enumerate(zip(train_parts, test_parts, strict=True)):
            mask = patch_mask((height, width), options.mask_fraction, np.random.default_rng([seed, _MASKS, silo]))
            change = functools.partial(_masked, groups[_name(silo)], mask, options.shrink)
            yield silo_of(_name(silo), train[train_part], test[test_part], change)

    return groups, silos()


def _masked(turns: int, mask: np.ndarray, shrink: int, x: np.ndarray) -> np.ndarray:
    return shrunk(np.where(mask[..., np.newaxis], np.uint8(_WHITE), np.rot90(x, turns, axes=(1, 2))), shrink)


def patch_mask(shape: tuple[int, int], fraction: float, generator: np.random.Generator) -> np.ndarray:
    """Draws a mask: each patch of 2 x 2 pixels (fewer at odd edges) is masked with probability `fraction`.

    Returns:
      Bool `[height, width]`, true where the image is masked.
    """
    height, width = shape
    patches = generator.random((-(-height // _PATCH), -(-width // _PATCH))) < fraction
    return np.kron(patches, np.ones((_PATCH, _PATCH), bool))[:height, :width]


def _divide_rotations(images: Images, num_silos: int, per_silo: int, side: str, seed: list[int]) -> np.ndarray:
    """Draws the positions of each silo's images: int64 `[num_silos, per_silo]`."""
    wanted = num_silos * per_silo
    if wanted > len(images.y):
        raise ConfigError(
            f"data: {num_silos} silos with {per_silo} {side} images each need {wanted} images, but there are "
            f"{len(images.y)}; lower num_silos or {side}_per_silo"
        )
    return np.random.default_rng(seed).permutation(len(images.y))[:wanted].reshape(num_silos, per_silo)


def _name(silo: int) -> str:
    return f"silo_{silo:03d}"
