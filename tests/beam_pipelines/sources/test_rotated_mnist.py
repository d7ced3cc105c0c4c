"""Rotated and masked silos, by hand on small images."""

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from beam_pipelines.sources.images import Images
from beam_pipelines.sources.rotated_mnist import RotatedMnist, patch_mask, rotated_mnist
from tff_pdp.errors import ConfigError
from tff_pdp.settings import read_settings

OPTIONS = RotatedMnist(
    kind="rotated_mnist",
    input="raw",
    num_silos=8,
    num_rotations=4,
    mask_fraction=0.0,
    train_per_silo=3,
    test_per_silo=1,
)
CORNER = np.array([[10, 20], [30, 40]], np.uint8)
TURNED = {
    0: [[10, 20], [30, 40]],
    1: [[20, 40], [10, 30]],
    2: [[40, 30], [20, 10]],
    3: [[30, 10], [40, 20]],
}


def numbered(count, size=2):
    """Images whose label is their number, the same in all of them but for what a test adds."""
    x = np.zeros((count, size, size, 1), np.uint8)
    x[:, :2, :2, 0] = CORNER
    return Images(x, np.arange(count))


def make(options=OPTIONS, seed=0, size=2, train=30, test=10):
    groups, silos = rotated_mnist(numbered(train, size), numbered(test, size), replace(options, seed=seed))
    return groups, list(silos)


def test_rotations_by_hand():
    groups, silos = make()
    assert list(groups) == [silo.name for silo in silos] == [f"silo_{number:03d}" for number in range(8)]
    assert sorted(groups.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    for silo in silos:
        for image in silo.x:
            assert image[..., 0].tolist() == TURNED[groups[silo.name]]


def test_images_are_divided_evenly_and_none_twice():
    _, silos = make()
    train = np.concatenate([silo.y[~silo.is_test] for silo in silos])
    test = np.concatenate([silo.y[silo.is_test] for silo in silos])
    assert len(set(train)) == len(train) == 24 and len(set(test)) == len(test) == 8
    assert all((~silo.is_test).sum() == 3 and silo.is_test.sum() == 1 for silo in silos)
    assert train.tolist() != sorted(train)


def test_the_same_seed_gives_the_same_silos_and_another_one_others():
    options = replace(OPTIONS, mask_fraction=0.5)
    (groups, silos), (same_groups, same), (other_groups, other) = (make(options, seed, size=8) for seed in (5, 5, 6))
    assert groups == same_groups and groups != other_groups
    assert all(
        np.array_equal(one.x, two.x) and np.array_equal(one.y, two.y) for one, two in zip(silos, same, strict=True)
    )
    assert any(not np.array_equal(one.y, two.y) for one, two in zip(silos, other, strict=True))


def test_a_silo_has_one_mask_for_all_its_images_and_other_silos_have_others():
    blank = Images(np.zeros((40, 8, 8, 1), np.uint8), np.arange(40))
    _, silos = rotated_mnist(blank, blank, replace(OPTIONS, mask_fraction=0.5))
    masks = []
    for silo in silos:
        assert (silo.x == silo.x[0]).all() and set(np.unique(silo.x)) == {0, 255}
        masks.append(silo.x[0].tobytes())
    assert len(set(masks)) == 8


def test_masks_do_not_move_with_the_number_of_images():
    options = replace(OPTIONS, mask_fraction=0.5)
    (_, many), (_, few) = make(options, size=8), make(replace(options, train_per_silo=1), size=8)
    assert all(np.array_equal(one.x[0] == 255, two.x[0] == 255) for one, two in zip(many, few, strict=True))


def test_mask_by_hand():
    class Drawn:
        def random(self, shape):
            assert shape == (2, 2)
            return np.array([[0.1, 0.9], [0.4, 0.2]])

    assert patch_mask((4, 4), 0.4, Drawn()).astype(int).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 1, 1],
    ]
    assert patch_mask((3, 3), 0.4, Drawn()).astype(int).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_silos_are_shrunk_after_their_masks():
    options = replace(OPTIONS, mask_fraction=0.5)
    (groups, whole), (same, small) = (make(replace(options, shrink=shrink), size=8) for shrink in (1, 2))
    assert groups == same
    for one, two in zip(whole, small, strict=True):
        assert two.x.shape == (4, 4, 4, 1) and two.x.dtype == np.uint8
        assert ((two.x == 255) == (one.x[:, ::2, ::2] == 255)).all()


def test_share_of_the_masked_area():
    generator = np.random.default_rng(0)
    share = np.mean([patch_mask((28, 28), 0.3, generator).mean() for _ in range(100)])
    # 19,600 patches: four standard deviations are 0.013.
    assert abs(share - 0.3) < 0.013
    assert not patch_mask((28, 28), 0.0, generator).any() and patch_mask((28, 28), 1.0, generator).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_silos": 0}, "num_silos must be a whole number of at least 1, not 0"),
        ({"train_per_silo": 0}, "train_per_silo must be a whole number of at least 1, not 0"),
        ({"num_silos": 6}, "num_silos 6 must be a multiple of num_rotations 4"),
        ({"num_rotations": 5}, "num_rotations must be a whole number of at least 1 and at most 4, not 5"),
        ({"mask_fraction": 1.5}, r"mask_fraction must be a number of at least 0 and at most 1, not 1\.5"),
        ({"mask_fraction": float("nan")}, "mask_fraction must be a number of at least 0 and at most 1, not nan"),
        ({"shrink": 0}, "shrink must be a whole number of at least 1, not 0"),
        ({"test_per_silo": -1}, "test_per_silo must be a whole number of at least 0, not -1"),
        ({"train_per_silo": 4}, "8 silos with 4 train images each need 32 images, but there are 30"),
        ({"test_per_silo": 2}, "8 silos with 2 test images each need 16 images, but there are 10"),
    ],
)
def test_options_out_of_range(change, message):
    with pytest.raises(ConfigError, match=message):
        make(read_settings(RotatedMnist, {**asdict(OPTIONS), **change}, "experiment.yaml", "data"))


def test_images_that_are_not_square_cannot_be_rotated():
    wide = Images(np.zeros((30, 2, 4, 1), np.uint8), np.arange(30))
    with pytest.raises(ConfigError, match="2 x 4 pixels cannot be rotated"):
        rotated_mnist(wide, wide, OPTIONS)
    _, silos = rotated_mnist(wide, wide, replace(OPTIONS, num_rotations=1))
    assert all(silo.x.shape[1:] == (2, 4, 1) for silo in silos)
