"""Divides pooled images among artificial clients, the train and the test side in the same way.

| partition | clients | source |
|---|---|---|
| `classes` | a few classes each, in uneven shares | Shamsian et al., ICML 2021; Liu, 2023, appendix B.1 |
| `dirichlet` | as many images each, in mixes of classes drawn from a Dirichlet distribution | Hsu, Qi and Brown, 2019 |
| `uniform` | as many images each, drawn at random from all | McMahan et al., AISTATS 2017 ("IID") |

Shamsian et al., "Personalized Federated Learning using Hypernetworks"; Liu, "On Privacy and Personalization in Machine
Learning", CMU-RI-TR-23-17; Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification"; McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data".
Unlike in the published code of the first, no image is left over by rounding.

Rotated and masked MNIST has silos in clusters that are known, with as much difference inside a cluster as one likes
(Liu, appendix B.1). The images are shuffled and divided evenly; groups of silos of equal size get rotations of their
own; and each silo lays a mask of its own over all its images: patches of 2 x 2 white pixels, each there with a given
probability.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from beam_pipelines.sources.images import ImageDataset, Images, shrunk, shrunken_shape
from beam_pipelines.sources.partition import (
    draw_class_mixes,
    draw_class_shares,
    partition_by_class_mixes,
    partition_by_shares,
    uniform_partition,
)
from beam_pipelines.sources.silo_arrays import SiloArrays
from tff_pdp.errors import ConfigError

# Each has a random stream of its own: the test side is divided as before when the train side has other images.
_SHARES, _TRAIN, _TEST = range(3)
# The option that each partition needs, and no other takes.
_OPTION_OF = {"classes": "classes_per_client", "dirichlet": "concentration", "uniform": None}


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """How to divide images; `beam_pipelines.sources.builders.build_partitioned_images` explains each field.

    Raises:
      ConfigError: a value is out of range, or does not go with the partition.
    """

    partition: str
    num_clients: int
    classes_per_client: int | None = None
    concentration: float | None = None
    shrink: int = 1

    def __post_init__(self):
        if self.partition not in _OPTION_OF:
            known = ", ".join(_OPTION_OF)
            raise ConfigError(f"data.arguments.partition: {self.partition!r} is not known; known: {known}")
        for option in filter(None, _OPTION_OF.values()):
            is_needed, is_given = option == _OPTION_OF[self.partition], getattr(self, option) is not None
            if is_needed != is_given:
                problem = "needs" if is_needed else "does not take"
                raise ConfigError(f"data.arguments: partition {self.partition} {problem} {option}")
        rules = (
            (self.num_clients >= 1, "num_clients must be at least 1"),
            (self.concentration is None or 0 < self.concentration < np.inf, "concentration must be finite and above 0"),
        )
        for holds, rule in rules:
            if not holds:
                raise ConfigError(f"data.arguments: {rule}; got {self}")


def partitioned_images(dataset: ImageDataset, options: PartitionOptions, seed: int) -> Iterator[SiloArrays]:
    """Makes the clients `silo_000`, ..., one at a time.

    Args:
      dataset: its train images are divided among the clients as training examples, its test images as test examples.
      options: how.
      seed: the same arguments and seed give the same clients.

    Returns:
      The clients: x uint8 `[n, height / shrink, width / shrink, channels]`, y int64 `[n]`.

    Raises:
      ConfigError: the images cannot be divided among so many clients, or cannot be shrunk.
    """
    shrunken_shape(dataset.train.x.shape[1:], options.shrink)
    if options.num_clients > len(dataset.train.y):
        raise ConfigError(
            f"data.arguments: {len(dataset.train.y)} training images cannot be divided among {options.num_clients} "
            "clients; lower num_clients"
        )
    train_parts, test_parts = _divide_images(dataset, options, seed)
    width = max(3, len(str(options.num_clients - 1)))

    def clients() -> Iterator[SiloArrays]:
        for client, (train_part, test_part) in enumerate(zip(train_parts, test_parts, strict=True)):
            sides = (dataset.train[train_part], dataset.test[test_part])
            yield SiloArrays(
                # The name decides a client's random numbers in training: changed, it would change published results.
                f"silo_{client:0{width}d}",
                shrunk(np.concatenate([side.x for side in sides]), options.shrink),
                np.concatenate([side.y for side in sides]),
                np.arange(len(train_part) + len(test_part)) >= len(train_part),
            )

    return clients()


def _divide_images(
    dataset: ImageDataset, options: PartitionOptions, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each client the positions of its train images and of its test images."""
    num_clients, num_classes = options.num_clients, dataset.num_classes
    shares_stream, *streams = (np.random.default_rng([seed, purpose]) for purpose in (_SHARES, _TRAIN, _TEST))
    sides = list(zip((dataset.train.y, dataset.test.y), streams, strict=True))
    if options.classes_per_client is not None:
        if num_clients * options.classes_per_client % num_classes or not 1 <= options.classes_per_client <= num_classes:
            raise ConfigError(
                f"data.arguments: {num_clients} clients with {options.classes_per_client} of {num_classes} classes: "
                f"num_clients * classes_per_client must be a multiple of {num_classes}, so that every class is as "
                "frequent"
            )
        shares = draw_class_shares(num_clients, num_classes, options.classes_per_client, shares_stream)
        train, test = (partition_by_shares(labels, shares, stream) for labels, stream in sides)
    elif options.concentration is not None:
        mixes = draw_class_mixes(num_clients, num_classes, options.concentration, shares_stream)
        train, test = (partition_by_class_mixes(labels, mixes, stream) for labels, stream in sides)
    else:
        train, test = (uniform_partition(len(labels), num_clients, stream) for labels, stream in sides)
    return train, test


_PATCH = 2
_WHITE = 255
# Each has a random stream of its own: masks do not move when the number of images changes.
_SHUFFLE_TRAIN, _SHUFFLE_TEST, _GROUPS, _MASKS = range(4)


@dataclasses.dataclass(frozen=True)
class RotatedMnistOptions:
    """How to divide and change the images; `beam_pipelines.sources.builders.build_rotated_mnist` explains each field.

    Raises:
      ConfigError: a value is out of range.
    """

    num_silos: int
    num_rotations: int
    mask_fraction: float
    train_per_silo: int
    test_per_silo: int
    shrink: int = 1

    def __post_init__(self):
        rules = (
            (min(self.num_silos, self.train_per_silo) >= 1, "num_silos and train_per_silo must be at least 1"),
            (self.test_per_silo >= 0, "test_per_silo must be at least 0"),
            (1 <= self.num_rotations <= 4, "num_rotations must be 1 to 4: 0, 90, 180 and 270 degrees"),
            (0 <= self.mask_fraction <= 1, "mask_fraction must lie in [0, 1]"),
        )
        for holds, rule in rules:
            if not holds:
                raise ConfigError(f"data.arguments: {rule}; got {self}")
        if self.num_silos % self.num_rotations:
            raise ConfigError(
                f"data.arguments: num_silos {self.num_silos} must be a multiple of num_rotations {self.num_rotations}, "
                "so that the groups have the same size"
            )


def rotated_mnist(
    train: Images, test: Images, options: RotatedMnistOptions, seed: int
) -> tuple[dict[str, int], Iterator[SiloArrays]]:
    """Makes the silos.

    Args:
      train: where each silo's first `train_per_silo` examples come from.
      test: where its other `test_per_silo` examples come from, marked as test examples.
      options: how.
      seed: the same arguments and seed give the same silos.

    Returns:
      The group of each silo, by its name (`silo_000`, ...): group g is rotated by 90 g degrees, counter-clockwise. And
      the silos, made one at a time: x uint8 `[n, height / shrink, width / shrink, 1]`, y int64 `[n]`.

    Raises:
      ConfigError: there are too few images, or images of their shape cannot be rotated or shrunk.
    """
    height, width = train.x.shape[1:3]
    # Judged here: the silos are made only when they are asked for.
    shrunken_shape(train.x.shape[1:], options.shrink)
    if options.num_rotations > 1 and height != width:
        raise ConfigError(f"data.arguments: images of {height} x {width} pixels cannot be rotated by 90 degrees")
    train_parts = _divide_rotations(train, options.num_silos, options.train_per_silo, "train", [seed, _SHUFFLE_TRAIN])
    test_parts = _divide_rotations(test, options.num_silos, options.test_per_silo, "test", [seed, _SHUFFLE_TEST])
    order = np.random.default_rng([seed, _GROUPS]).permutation(options.num_silos)
    groups = {_name(silo): int(rank) % options.num_rotations for silo, rank in enumerate(order)}

    def silos() -> Iterator[SiloArrays]:
        for silo, parts in enumerate(zip(train_parts, test_parts, strict=True)):
            mask = patch_mask((height, width), options.mask_fraction, np.random.default_rng([seed, _MASKS, silo]))
            sides = [side[part] for side, part in zip((train, test), parts, strict=True)]
            rotated = np.rot90(np.concatenate([side.x for side in sides]), groups[_name(silo)], axes=(1, 2))
            yield SiloArrays(
                _name(silo),
                shrunk(np.where(mask[..., np.newaxis], np.uint8(_WHITE), rotated), options.shrink),
                np.concatenate([side.y for side in sides]),
                np.arange(len(rotated)) >= len(parts[0]),
            )

    return groups, silos()


def patch_mask(shape: tuple[int, int], fraction: float, generator: np.random.Generator) -> np.ndarray:
    """Draws a mask of patches of 2 x 2 pixels that lie on a grid, each there with probability `fraction`.

    Args:
      shape: height and width of an image; at an odd edge, patches are cut.
      fraction: the expected share of the area.
      generator: draws the patches.

    Returns:
      Bool `shape`, true where the image is masked.
    """
    height, width = shape
    patches = generator.random((-(-height // _PATCH), -(-width // _PATCH))) < fraction
    return np.kron(patches, np.ones((_PATCH, _PATCH), bool))[:height, :width]


def _divide_rotations(images: Images, num_silos: int, per_silo: int, side: str, seed: list[int]) -> np.ndarray:
    """Positions of each silo's images: int64 `[num_silos, per_silo]`."""
    wanted = num_silos * per_silo
    if wanted > len(images.y):
        raise ConfigError(
            f"data.arguments: {num_silos} silos with {per_silo} {side} images each need {wanted}, and there are "
            f"{len(images.y)}; lower num_silos or {side}_per_silo"
        )
    return np.random.default_rng(seed).permutation(len(images.y))[:wanted].reshape(num_silos, per_silo)


def _name(silo: int) -> str:
    return f"silo_{silo:03d}"
