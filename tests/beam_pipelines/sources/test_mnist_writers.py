"""MNIST's writers: who wrote what, rows that do not go with the images, and the real ones."""

import numpy as np
import pytest

from beam_pipelines.sources.images import Images
from beam_pipelines.sources.mnist import (
    MNIST_CLASSES,
    MNIST_TRAIN_FILES,
    WRITERS_FILE,
    find_writers,
    mnist_writers,
    read_labelled_images,
    read_writers,
)
from tests.beam_pipelines.sources.raw_images import write_idx, write_writers
from tff_pdp.errors import DataError

IMAGES = Images(np.arange(24, dtype=np.uint8).reshape(6, 2, 2, 1), np.array([3, 1, 4, 1, 5, 9]))
WRITERS = np.array([2349, 7, 2349, 7, 7, 0])


def test_each_writer_has_his_images_in_their_order(tmp_path):
    writers = read_writers(write_writers(tmp_path / "writers.gz", IMAGES.y, WRITERS), IMAGES)
    assert writers.dtype == np.int64 and writers.tolist() == WRITERS.tolist()
    clients = list(mnist_writers(IMAGES, writers, shrink=1))
    assert [client.name for client in clients] == ["writer_0000", "writer_0007", "writer_2349"]
    assert [client.y.tolist() for client in clients] == [[9], [1, 1, 5], [3, 4]]
    assert [client.x[:, 0, 0, 0].tolist() for client in clients] == [[20], [4, 12, 16], [0, 8]]
    assert clients[0].x.dtype == np.uint8 and clients[0].is_test is None
    (_, second, _) = mnist_writers(IMAGES, writers, shrink=2)
    # 4 to 7, 12 to 15 and 16 to 19: means of 5.5, 13.5 and 17.5, rounded to even.
    assert second.x.ravel().tolist() == [6, 14, 18]


def test_rows_that_do_not_go_with_the_images(tmp_path):
    path = write_writers(tmp_path / "writers.gz", np.array([3, 1, 4, 2, 5, 0]), WRITERS)
    with pytest.raises(DataError, match=r"writers\.gz: row 3 .* has label 2, but that image of MNIST has label 1; "):
        read_writers(path, IMAGES)
    with pytest.raises(DataError, match=r"writers\.gz: 5 rows for 6 training images"):
        read_writers(write_writers(path, IMAGES.y[:5], WRITERS[:5]), IMAGES)
    write_idx(path, IMAGES.y)
    with pytest.raises(DataError, match=r"writers\.gz: has shape \(6,\); QMNIST's file has a row of 8 numbers"):
        read_writers(path, IMAGES)


def test_where_the_file_is_looked_for(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    with pytest.raises(DataError, match=r"mnist/qmnist.* and .*/mnist_writers/qmnist.*: no such file; get QMNIST's"):
        find_writers(folder, None)
    beside = write_writers(tmp_path / "mnist_writers" / WRITERS_FILE, IMAGES.y, WRITERS)
    assert find_writers(folder, None) == beside
    inside = write_writers(folder / WRITERS_FILE, IMAGES.y, WRITERS)
    assert find_writers(folder, None) == inside
    assert find_writers(folder, str(beside)) == beside
    with pytest.raises(DataError, match="nowhere: no such file"):
        find_writers(folder, str(tmp_path / "nowhere"))


def test_real_writers(real_data):
    folder = real_data / "mnist"
    images = read_labelled_images(folder, *MNIST_TRAIN_FILES, MNIST_CLASSES)
    clients = list(mnist_writers(images, read_writers(find_writers(folder, None), images), shrink=2))
    sizes = [len(client.y) for client in clients]
    assert (len(sizes), min(sizes), max(sizes), sum(sizes), np.median(sizes)) == (539, 19, 131, 60_000, 116)
    assert [clients[0].name, clients[-1].name] == ["writer_0000", "writer_2349"]
    # The first images of MNIST, by the first rows of QMNIST's table.
    assert clients[[client.name for client in clients].index("writer_2154")].y[0] == 5
