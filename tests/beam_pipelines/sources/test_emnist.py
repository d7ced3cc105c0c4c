"""Reading EMNIST's splits: upright, with labels from 0."""

import numpy as np
import pytest

from beam_pipelines.sources.mnist import read_emnist
from tests.beam_pipelines.sources.raw_images import write_emnist, write_idx
from tff_pdp.errors import DataError

# Columns where MNIST has rows: the first four bytes are the left edge.
STORED = np.array([[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]], np.uint8)
UPRIGHT = [[1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [4, 8, 12, 16]]


@pytest.mark.parametrize(
    ("split", "first", "last", "num_classes"),
    [
        ("byclass", 0, 61, 62),
        ("bymerge", 0, 46, 47),
        ("balanced", 0, 46, 47),
        ("letters", 1, 26, 26),
        ("digits", 0, 9, 10),
        ("mnist", 0, 9, 10),
    ],
)
def test_every_split(tmp_path, split, first, last, num_classes):
    folder = write_emnist(tmp_path, split, np.repeat(STORED, 2, axis=0), np.array([first, last]))
    emnist = read_emnist(folder)
    assert emnist.num_classes == num_classes and emnist.train.y.tolist() == [0, num_classes - 1]
    assert emnist.train.x.shape == (2, 4, 4, 1) and emnist.test.x[1, ..., 0].tolist() == UPRIGHT
    assert emnist.origin[3]["name"] == f"emnist-{split}-test-labels-idx1-ubyte.gz"


def test_one_of_several_splits(tmp_path):
    for split, label in (("digits", 3), ("letters", 3)):
        write_emnist(tmp_path, split, STORED, np.array([label]))
    with pytest.raises(DataError, match=r"several splits of EMNIST: digits, letters; .*emnist-digits-train-images"):
        read_emnist(tmp_path)
    assert read_emnist(tmp_path / "emnist-letters-train-images-idx3-ubyte.gz").test.y.tolist() == [2]


@pytest.mark.parametrize(("split", "label"), [("letters", 0), ("letters", 27), ("mnist", 10)])
def test_labels_out_of_range(tmp_path, split, label):
    write_emnist(tmp_path, split, STORED, np.array([label]))
    with pytest.raises(
        DataError, match=rf"emnist-{split}-train-labels.*: image 0 .* has label {label}, which is not one"
    ):
        read_emnist(tmp_path)


def test_missing_and_damaged(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read_emnist(tmp_path / "nowhere")
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", STORED)
    with pytest.raises(DataError, match=r"no emnist-<split>-train-images.*byclass, bymerge"):
        read_emnist(tmp_path)
    (write_emnist(tmp_path, "digits", STORED, np.array([1])) / "emnist-digits-test-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"emnist-digits-test-labels-idx1-ubyte\.gz: no such file"):
        read_emnist(tmp_path)
