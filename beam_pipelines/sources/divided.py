"""Pooled images divided among artificial clients, the train and the test side in the same way.

| partition | clients | source |
|---|---|---|
| `classes` | a few classes each, in uneven shares | Shamsian et al., ICML 2021; Liu, 2023, appendix B.1 |
| `dirichlet` | as many images each, in mixes of classes drawn from a Dirichlet distribution | Hsu, Qi and Brown, 2019 |
| `uniform` | as many images each, drawn at random from all | McMahan et al., AISTATS 2017 ("IID") |

Shamsian et al., "Personalized Federated Learning using Hypernetworks"; Liu, "On Privacy and Personalization in Machine
Learning", CMU-RI-TR-23-17; Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification"; McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data".
Unlike in the published code of the first, no image is left over by rounding.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from beam_pipelines.sources.partition import (
    draw_class_mixes,
    draw_class_shares,
    partition_by_class_mixes,
    partition_by_shares,
    uniform_partition,
)
from beam_pipelines.sources.silo_arrays import SiloArrays
from tff_pdp.data.images import ImageDataset, shrunk, shrunken_shape
from tff_pdp.errors import ConfigError

# Each has a random stream of its own: the test side is divided as before when the train side has other images.
_SHARES, _TRAIN, _TEST = range(3)
# The option that each partition needs, and no other takes.
_OPTION_OF = {"classes": "classes_per_client", "dirichlet": "concentration", "uniform": None}


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """How to divide images; `tff_pdp.data.datasets.build_partitioned_images` explains each field.

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
