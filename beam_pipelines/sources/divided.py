"""Divides pooled images among artificial clients; train images and test images are divided in the same way.

| partition | clients | source |
|---|---|---|
| `classes` | a few classes each, in uneven shares | Shamsian et al., ICML 2021; Liu, 2023, appendix B.1 |
| `dirichlet` | same number of images each, in Dirichlet-distributed mixes of classes | Hsu, Qi and Brown, 2019 |
| `uniform` | same number of images each, drawn at random from all images | McMahan et al., AISTATS 2017 ("IID") |

Shamsian et al., "Personalized Federated Learning using Hypernetworks"; Liu, "On Privacy and Personalization in Machine
Learning", CMU-RI-TR-23-17; Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification"; McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data".
Unlike the published code of Shamsian et al., `classes` assigns every image, in spite of rounding.

Rotated and masked MNIST has silos in known clusters, with an adjustable difference between the silos of a cluster (Liu,
appendix B.1). The images are shuffled and divided evenly. Silos form groups of equal size, and each group has its own
rotation. Each silo has one mask for all its images: on a grid of patches of 2 x 2 pixels, each patch is white with a
given probability.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from beam_pipelines.options import RawData, SourceSettings
from beam_pipelines.sources.cifar import read_cifar10, read_cifar100
from beam_pipelines.sources.images import ImageDataset, Images, shrunk, shrunken_shape
from beam_pipelines.sources.mnist import read_emnist, read_mnist
from beam_pipelines.sources.partition import (
    draw_class_mixes,
    draw_class_shares,
    partition_by_class_mixes,
    partition_by_shares,
    uniform_partition,
)
from beam_pipelines.sources.silo_files import SiloArrays, array_images
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count, CountOrZero, Fraction, Positive, Settings, to_plain

# Labels of one side of a data set, and the random stream that divides them.
Side = tuple[np.ndarray, np.random.Generator]

# Each has its own random stream: another train side does not change the division of the test side.
_SHARES, _TRAIN, _TEST = range(3)
_POOLED_IMAGES: dict[str, Callable[[str], ImageDataset]] = {
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "mnist": lambda source: read_mnist(Path(source)),
    "emnist": lambda source: read_emnist(Path(source)),
}


class ByClasses(Settings, tag_field="kind", tag="classes"):
    """Gives each client images of a few classes, in uneven shares.

    Attributes:
      num_clients: number of clients.
      classes_per_client: number of classes that each client has images of; its product with `num_clients` must be a
        multiple of the number of classes.
    """

    num_clients: Count
    classes_per_client: Count

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Divides train and test images (`sides`) by the same shares; returns the images' positions by side and client.

        Raises:
          ConfigError: the images cannot be divided in this way.
        """
        each = self.classes_per_client
        if self.num_clients * each % num_classes or each > num_classes:
            raise ConfigError(
                f"data.partition: {self.num_clients} clients with {each} of {num_classes} classes: num_clients * "
                f"classes_per_client must be a multiple of {num_classes}, and classes_per_client at most {num_classes}"
            )
        drawn = draw_class_shares(self.num_clients, num_classes, each, shares)
        return [partition_by_shares(labels, drawn, stream) for labels, stream in sides]


class Dirichlet(Settings, tag_field="kind", tag="dirichlet"):
    """Gives all clients the same number of images, each client in its own mix of classes.

    Attributes:
      num_clients: number of clients.
      concentration: Dirichlet parameter: small values (0.1) give each client few classes, large values (100) give all
        clients the same mix.
    """

    num_clients: Count
    concentration: Positive

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Returns the positions of each client's images for each side, as `ByClasses.divide` does."""
        mixes = draw_class_mixes(self.num_clients, num_classes, self.concentration, shares)
        return [partition_by_class_mixes(labels, mixes, stream) for labels, stream in sides]


class Uniform(Settings, tag_field="kind", tag="uniform"):
    """Gives all clients the same number of images, drawn at random from all images.

    Attributes:
      num_clients: number of clients.
    """

    num_clients: Count

    def divide(self, sides: Sequence[Side], num_classes: int, shares: np.random.Generator) -> list[list[np.ndarray]]:
        """Returns the positions of each client's images for each side, as `ByClasses.divide` does."""
        return [uniform_partition(len(labels), self.num_clients, stream) for labels, stream in sides]


Partition = ByClasses | Dirichlet | Uniform


class PartitionedImages(SourceSettings):
    """Divides pooled images among artificial clients; `beam_pipelines.sources.divided` cites the partitions' sources.

    | images | `input` |
    |---|---|
    | `cifar10`, `cifar100` | the python version's archive, its extracted folder, or `tfds` for TensorFlow Datasets |
    | `mnist` | the folder of MNIST's four `idx.gz` files, or of data in that format, such as Fashion-MNIST |
    | `emnist` | the folder of one split's four `idx.gz` files, or one split's file of train images |

    The data set's own test images are divided in the same way and are the test examples; `test_fraction` is not used.
    `seed` decides which client gets which images.

    Attributes:
      images: image data set; `cifar100` has its 100 fine classes.
      partition: how the images are divided among the clients.
      shrink: side, in pixels, of the squares that are each averaged to one pixel; 1 keeps the images unchanged.
    """

    images: Literal["cifar10", "cifar100", "mnist", "emnist"]
    partition: Partition
    shrink: Count = 1

    def build(self, workspace: Path) -> RawData:
        """Writes the clients' images to `workspace/partitioned_images.npz`; errors as in `SourceSettings.build`."""
        dataset = _POOLED_IMAGES[self.images](self.input)
        self.check_features(shrunken_shape(dataset.train.x.shape[1:], self.shrink), dataset.num_classes)
        clients = partitioned_images(dataset, self.partition, self.shrink, self.seed)
        given = dict.fromkeys(("num_clients", "classes_per_client", "concentration")) | to_plain(self.partition)
        parameters = {"images": self.images, "partition": given.pop("kind"), **given, "shrink": self.shrink}
        parameters["origin"] = dataset.origin
        return array_images("partitioned_images", workspace, clients, self.num_classes, parameters)


def partitioned_images(dataset: ImageDataset, partition: Partition, shrink: int, seed: int) -> Iterator[SiloArrays]:
    """Makes the clients `silo_000`, ..., one at a time; the same arguments give the same clients.

    Returns:
      Clients: x uint8 `[n, height / shrink, width / shrink, channels]`, y int64 `[n]`; test images are test examples.

    Raises:
      ConfigError: the images cannot be divided among this number of clients.
    """
    num_clients = partition.num_clients
    if num_clients > len(dataset.train.y):
        raise ConfigError(
            f"data.partition: {len(dataset.train.y)} training images cannot be divided among {num_clients} clients; "
            "lower num_clients"
        )
    shares_stream, *streams = (np.random.default_rng([seed, purpose]) for purpose in (_SHARES, _TRAIN, _TEST))
    sides = list(zip((dataset.train.y, dataset.test.y), streams, strict=True))
    train_parts, test_parts = partition.divide(sides, dataset.num_classes, shares_stream)
    width = max(3, len(str(num_clients - 1)))
    # A client's name decides its random numbers in training: another name would change published results.
    names = (f"silo_{client:0{width}d}" for client in range(num_clients))
    return (
        _silo(name, dataset.train[train_part], dataset.test[test_part], lambda x: shrunk(x, shrink))
        for name, train_part, test_part in zip(names, train_parts, test_parts, strict=True)
    )


def _silo(name: str, train: Images, test: Images, change: Callable[[np.ndarray], np.ndarray]) -> SiloArrays:
    x = np.concatenate([train.x, test.x])
    return SiloArrays(name, change(x), np.concatenate([train.y, test.y]), np.arange(len(x)) >= len(train.y))


_PATCH = 2
_WHITE = 255
# Each has its own random stream: another number of images does not change the masks.
_SHUFFLE_TRAIN, _SHUFFLE_TEST, _GROUPS, _MASKS = range(4)


class RotatedMnist(SourceSettings):
    """Divides MNIST among silos, and rotates and masks the images (Liu, CMU-RI-TR-23-17, 2023, appendix B.1).

    `input` is the folder of MNIST's four `idx.gz` files, or of data in that format with ten classes. The manifest's
    parameter `rotation_groups` is each silo's group, the true clustering. MNIST's own test images are the test
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
        return array_images("rotated_mnist", workspace, silos, self.num_classes, parameters)


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
            yield _silo(_name(silo), train[train_part], test[test_part], change)

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
