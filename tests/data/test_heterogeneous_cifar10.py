"""CIFAR-10's silos: a few classes each, the same ones and in the same shares on both sides."""

import numpy as np
import pytest

from tff_pdp.data.heterogeneous_cifar10 import heterogeneous_cifar10
from tff_pdp.data.images import Images


def numbered(count):
    """Images that tell their number, ten classes in turn."""
    numbers = np.arange(count, dtype=np.uint32)
    x = np.zeros((count, 1, 4, 1), np.uint8)
    x[:, 0, :, 0] = numbers[:, np.newaxis].view(np.uint8).reshape(count, 4)
    return Images(x, numbers.astype(np.int64) % 10)


def numbers_of(silo, is_test):
    return np.ascontiguousarray(silo.x[silo.is_test == is_test]).reshape(-1, 4).view(np.uint32).ravel()


@pytest.fixture(scope="module")
def silos():
    return list(heterogeneous_cifar10(numbered(50_000), numbered(10_000), num_silos=30, classes_per_silo=5, seed=0))


def test_every_image_is_in_one_silo_with_its_label(silos):
    for is_test, count in ((False, 50_000), (True, 10_000)):
        numbers = np.concatenate([numbers_of(silo, is_test) for silo in silos])
        assert sorted(numbers) == list(range(count))
        labels = np.concatenate([silo.y[silo.is_test == is_test] for silo in silos])
        np.testing.assert_array_equal(labels, numbers % 10)


def test_each_silo_has_five_classes_in_the_same_shares_on_both_sides(silos):
    assert [silo.name for silo in silos] == [f"silo_{number:03d}" for number in range(30)]
    for silo in silos:
        train, test = (np.bincount(silo.y[silo.is_test == is_test], minlength=10) for is_test in (False, True))
        assert (train > 0).sum() == 5
        # 5,000 and 1,000 images of a class: the same share of both, up to a whole image.
        assert (np.abs(train / 5 - test) < 1.3).all()


def test_sizes_are_those_of_the_paper(silos):
    """Liu et al. report 1,515 to 1,839 training examples; other draws of the same kind come close."""
    sizes = [(~silo.is_test).sum() for silo in silos]
    assert sum(sizes) == 50_000 and 1450 < min(sizes) < 1580 and 1750 < max(sizes) < 1890


def test_the_seed_decides():
    made = [
        [silo.y.tolist() for silo in heterogeneous_cifar10(numbered(500), numbered(100), 10, 3, seed)]
        for seed in (0, 0, 1)
    ]
    assert made[0] == made[1] != made[2]
