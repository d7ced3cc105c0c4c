"""CIFAR-10 divided among silos that each know a few of its classes, with random numbers of images of each.

Source: K. Z. Liu, "On Privacy and Personalization in Machine Learning", CMU-RI-TR-23-17, 2023, appendix B.1, which
follows the published code of Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021. Unlike
there, no image is left over by rounding.
"""

from collections.abc import Iterator

import numpy as np

from tff_pdp.data.cifar10 import CIFAR10_CLASSES
from tff_pdp.data.images import Images
from tff_pdp.data.partition import draw_class_shares, partition_by_shares
from tff_pdp.data.silo_arrays import SiloArrays

# Each has a random stream of its own: the test side is divided as before when the train side has other images.
_SHARES, _TRAIN, _TEST = range(3)


def heterogeneous_cifar10(
    train: Images, test: Images, num_silos: int, classes_per_silo: int, seed: int
) -> Iterator[SiloArrays]:
    """Makes the silos `silo_000`, ..., one at a time.

    Args:
      train: the images divided among the silos as training examples.
      test: those divided in the same shares of each class, marked as test examples.
      num_silos: number of silos; `num_silos * classes_per_silo` is a multiple of 10.
      classes_per_silo: how many classes each silo has.
      seed: the same arguments and seed give the same silos.

    Yields:
      x uint8 `[n, 32, 32, 3]`, y int64 `[n]`.
    """
    shares = draw_class_shares(num_silos, CIFAR10_CLASSES, classes_per_silo, np.random.default_rng([seed, _SHARES]))
    train_parts = partition_by_shares(train.y, shares, np.random.default_rng([seed, _TRAIN]))
    test_parts = partition_by_shares(test.y, shares, np.random.default_rng([seed, _TEST]))
    for silo, (train_part, test_part) in enumerate(zip(train_parts, test_parts, strict=True)):
        sides = (train[train_part], test[test_part])
        yield SiloArrays(
            f"silo_{silo:03d}",
            np.concatenate([side.x for side in sides]),
            np.concatenate([side.y for side in sides]),
            np.arange(len(train_part) + len(test_part)) >= len(train_part),
        )
