"""Reading idx files, sound and damaged."""

import gzip
import struct

import numpy as np
import pytest

from beam_pipelines.sources.mnist import read_idx, read_mnist
from tests.beam_pipelines.sources.raw_images import write_idx, write_mnist
from tff_pdp.errors import DataError


def compressed(content):
    # Names of tests are made of it: without the time, every process finds the same ones.
    return gzip.compress(content, mtime=0)


def test_images_and_labels(tmp_path):
    mnist = read_mnist(write_mnist(tmp_path, train=12, test=3))
    assert mnist.train.x.shape == (12, 4, 4, 1) and mnist.train.x.dtype == np.uint8
    assert mnist.train.x[:, 3, 1, 0].tolist() == list(range(12))
    assert mnist.train.y.tolist() == [*range(10), 0, 1] and mnist.train.y.dtype == np.int64
    assert len(mnist.test.y) == 3
    assert [file["name"] for file in mnist.origin][:2] == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_rows_come_before_columns(tmp_path):
    array = np.arange(12).reshape(1, 3, 4)
    write_idx(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz"), array)


def test_32_bit_integers(tmp_path):
    write_idx(tmp_path / "a.gz", np.array([[1, -2], [70_000, 4]]), dtype=">i4")
    assert read_idx(tmp_path / "a.gz").tolist() == [[1, -2], [70_000, 4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (compressed(struct.pack(">HBBI", 0, 8, 1, 5) + bytes(4)), "12 bytes, not the size that its header states"),
        (compressed(struct.pack(">HBB", 0, 8, 3)), "4 bytes, not the size that its header states"),
        (
            compressed(struct.pack(">HBBI", 0, 13, 1, 1) + bytes(4)),
            "not an idx file of unsigned bytes or 32-bit",
        ),
        (compressed(struct.pack(">HBBI", 0, 12, 1, 2) + bytes(7)), "15 bytes, not the size that its header states"),
        (compressed(b""), "not an idx file of .*: it begins with nothing"),
        (compressed(struct.pack(">HBBI", 0, 8, 1, 5) + bytes(5))[:-9], "truncated or damaged gzip file"),
        (b"plain", "truncated or damaged gzip file"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.gz: {message}"):
        read_idx(path)


def test_files_that_are_missing_or_do_not_match(tmp_path):
    folder = write_mnist(tmp_path, train=12, test=3)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros(4))
    with pytest.raises(DataError, match=r"t10k-images.*of shape \(3, 4, 4\) does not match.*of shape \(4,\)"):
        read_mnist(folder)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.array([1, 10, 3]))
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte\.gz: image 1 .* has label 10, which is not one of 0 to 9"
    ):
        read_mnist(folder)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"no t10k-labels-idx1-ubyte\.gz; data\.input must be the folder"):
        read_mnist(folder)
