"""Reads MNIST and data in MNIST's format (Fashion-MNIST), MNIST by writer, and splits of EMNIST.

Images and labels are gzipped idx files (LeCun et al., 1998), in EMNIST too (Cohen et al., "EMNIST: an extension of
MNIST to handwritten letters", 2017).

Source of the writers: C. Yadav and L. Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019. Their QMNIST names the
NIST record, and so the writer, of every image of MNIST: `qmnist-train-labels-idx2-int.gz` has one row for each training
image of MNIST, in MNIST's order, with 539 writers. Other people wrote MNIST's test images.
"""

import dataclasses
import gzip
import math
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from beam_pipelines.options import RawData, SourceSettings
from beam_pipelines.sources.images import ImageDataset, Images, shrunk, shrunken_shape
from beam_pipelines.sources.silo_files import SiloArrays, array_data
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import DataError
from tff_pdp.settings import Count

MNIST_CLASSES = 10
# Folder of the four files in Debian's package dataset-fashion-mnist.
FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"
MNIST_TRAIN_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
# Types of the numbers, by the third byte of the file.
_DTYPES = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}


def read_mnist(folder: Path) -> ImageDataset:
    """Reads MNIST's four files: images uint8 `[n, height, width, 1]`, ink bright (255) on black (0).

    Raises:
      DataError: a file is missing or damaged, the numbers of labels and images differ, or a label is out of range.
    """
    return _read_four_files(folder, "data.input must be the folder of MNIST's four .gz files")


def read_fashion_mnist(folder: Path) -> ImageDataset:
    """Reads Fashion-MNIST's four files: images uint8 `[n, 28, 28, 1]`, clothes bright (255) on black (0).

    Raises:
      DataError: as in `read_mnist`; the message names Debian's package of the files if a file is missing.
    """
    return _read_four_files(
        folder,
        "install Debian's package dataset-fashion-mnist (apt-get install dataset-fashion-mnist), or name the folder of "
        "Fashion-MNIST's four .gz files in data.input",
    )


def _read_four_files(folder: Path, advice: str) -> ImageDataset:
    names = (*MNIST_TRAIN_FILES, *_TEST_FILES)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: no {', '.join(missing)}; {advice}")
    return _read_sides(folder, MNIST_TRAIN_FILES, _TEST_FILES, MNIST_CLASSES)


def _read_sides(
    folder: Path, train: tuple[str, str], test: tuple[str, str], num_classes: int, first_label: int = 0
) -> ImageDataset:
    return ImageDataset(
        read_labelled_images(folder, *train, num_classes, first_label),
        read_labelled_images(folder, *test, num_classes, first_label),
        num_classes,
        origin=[dataclasses.asdict(FileRecord.of(folder, name)) for name in (*train, *test)],
    )


def read_labelled_images(
    folder: Path, images_file: str, labels_file: str, num_classes: int, first_label: int = 0
) -> Images:
    """Reads the gzipped idx files of images and of their labels; `first_label` is the label of class 0 in the file.

    Returns:
      Images uint8 `[n, height, width, 1]`, labels int64 `[n]` in `[0, num_classes)`.

    Raises:
      DataError: a file is missing or damaged, the numbers of labels and images differ, or a label is out of range.
    """
    x, y = read_idx(folder / images_file), read_idx(folder / labels_file)
    if x.ndim != 3 or x.dtype != np.uint8 or y.shape != x.shape[:1]:
        raise DataError(f"{folder}: {images_file} of shape {x.shape} does not match {labels_file} of shape {y.shape}")
    labels = y.astype(np.int64) - first_label
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise DataError(
            f"{folder / labels_file}: image {wrong[0]} (the first is 0) has label {y[wrong[0]]}, which is not one of "
            f"{first_label} to {first_label + num_classes - 1}"
        )
    return Images(x[..., np.newaxis], labels)


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped idx file; the header states the type, uint8 or big-endian int32, and the shape.

    Raises:
      DataError: the file is missing, cut short, damaged, or not an idx file.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        begins = content[:4].hex() or "nothing"
        raise DataError(f"{path}: not an idx file of unsigned bytes or 32-bit integers: it begins with {begins}")
    start, dtype = 4 + 4 * content[3], _DTYPES[content[2]]
    shape = struct.unpack(f">{content[3]}I", content[4:start]) if len(content) >= start else (0,)
    if len(content) != start + math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path}: {len(content)} bytes, not the size that its header states; get the file again")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


# The number of classes of each split, and the first label in the split's files.
_SPLITS = {
    "byclass": (62, 0),
    "bymerge": (47, 0),
    "balanced": (47, 0),
    "letters": (26, 1),
    "digits": (10, 0),
    "mnist": (10, 0),
}
_TRAIN_IMAGES = re.compile(rf"emnist-({'|'.join(_SPLITS)})-train-images-idx3-ubyte\.gz")


def read_emnist(path: Path) -> ImageDataset:
    """Reads one split of EMNIST: images uint8 `[n, 28, 28, 1]`, upright, ink bright (255) on black (0).

    Args:
      path: folder with the four files of one split, `emnist-<split>-{train,test}-{images-idx3,labels-idx1}-ubyte.gz`;
        or one split's file of train images, which is required if the folder has several splits.

    Raises:
      DataError: a file is missing or damaged, the folder holds no split or several, or a label is out of range.
    """
    folder, split = _find_split(path)
    num_classes, first_label = _SPLITS[split]
    train, test = (
        (f"emnist-{split}-{side}-images-idx3-ubyte.gz", f"emnist-{split}-{side}-labels-idx1-ubyte.gz")
        for side in ("train", "test")
    )
    stored = _read_sides(folder, train, test, num_classes, first_label)
    # EMNIST's files have columns where MNIST's have rows.
    upright_train, upright_test = (Images(side.x.swapaxes(1, 2), side.y) for side in (stored.train, stored.test))
    return dataclasses.replace(stored, train=upright_train, test=upright_test)


def _find_split(path: Path) -> tuple[Path, str]:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; data.input must be the folder of EMNIST's .gz files")
    candidates = path.iterdir() if path.is_dir() else [path]
    splits = sorted(match[1] for file in candidates if (match := _TRAIN_IMAGES.fullmatch(file.name)))
    if not splits:
        raise DataError(
            f"{path}: no emnist-<split>-train-images-idx3-ubyte.gz, where <split> is one of: {', '.join(_SPLITS)}"
        )
    if len(splits) > 1:
        raise DataError(
            f"{path}: several splits of EMNIST: {', '.join(splits)}; data.input must be the file of one split, such as "
            f"{path / f'emnist-{splits[0]}-train-images-idx3-ubyte.gz'}"
        )
    return (path if path.is_dir() else path.parent), splits[0]


WRITERS_FILE = "qmnist-train-labels-idx2-int.gz"
_LABEL, _WRITER = 0, 2


def find_writers(folder: Path, named: str | None) -> Path:
    """Finds the file of writers, which is `named` or has the name `WRITERS_FILE`.

    Without `named`, the file is in MNIST's folder `folder`, or in the folder `mnist_writers` beside that folder.

    Raises:
      DataError: there is no such file.
    """
    places = [Path(named)] if named else [folder / WRITERS_FILE, folder.parent / "mnist_writers" / WRITERS_FILE]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"{' and '.join(map(str, places))}: no such file; get QMNIST's {WRITERS_FILE}, and name it in data.writers"
    )


def read_writers(path: Path, images: Images) -> np.ndarray:
    """Reads the writers of MNIST's training images: int64 `[n]`, the number of each image's writer.

    Raises:
      DataError: the file is damaged or has another form, or labels differ from `images`; the message names the row.
    """
    table = read_idx(path)
    if table.ndim != 2 or table.shape[1] <= _WRITER:
        raise DataError(f"{path}: has shape {table.shape}; QMNIST's file has a row of 8 numbers for each image")
    if len(table) != len(images.y):
        raise DataError(f"{path}: {len(table)} rows for {len(images.y)} training images; it needs all of MNIST's")
    different = np.flatnonzero(table[:, _LABEL] != images.y)
    if different.size:
        row = different[0]
        raise DataError(
            f"{path}: row {row} (the first is 0) has label {table[row, _LABEL]}, but that image of MNIST has label "
            f"{images.y[row]}; data.input must be the original MNIST, in the original order"
        )
    return table[:, _WRITER].astype(np.int64)


def mnist_writers(images: Images, writers: np.ndarray, shrink: int) -> Iterator[SiloArrays]:
    """Makes a client of each writer, one at a time; `writers` is the writer of each image, int64 `[n]`.

    Yields:
      Client `writer_0000`, ..., named by the writer's number: x uint8 `[n, height / shrink, width / shrink, 1]`, y
      int64 `[n]`, in MNIST's order.
    """
    # A stable sort keeps the order of a writer's images.
    order = np.argsort(writers, kind="stable")
    numbers, starts = np.unique(writers[order], return_index=True)
    for number, part in zip(numbers, np.split(order, starts[1:]), strict=True):
        yield SiloArrays(f"writer_{number:04d}", shrunk(images.x[part], shrink), images.y[part])


class MnistWriters(SourceSettings):
    """Groups MNIST's training images by their 539 writers (Yadav and Bottou, NeurIPS 2019).

    `input` is the folder of MNIST's `idx.gz` files. MNIST's test images are not used, because other people wrote
    those images. `validation_fraction` and `test_fraction` decide how each writer's images are divided.

    Attributes:
      writers: path of QMNIST's `qmnist-train-labels-idx2-int.gz`; default: the file of that name in `input`, or in a
        folder `mnist_writers` beside `input`.
      shrink: side, in pixels, of the squares that are each averaged to one pixel; 1 keeps the images unchanged.
    """

    writers: str | None = None
    shrink: Count = 1

    def build(self, workspace: Path) -> RawData:
        """Writes the writers' images to `workspace/mnist_writers.npz`; errors as in `SourceSettings.build`."""
        folder = Path(self.input)
        path = find_writers(folder, self.writers)
        images = read_labelled_images(folder, *MNIST_TRAIN_FILES, MNIST_CLASSES)
        self.check_features(shrunken_shape(images.x.shape[1:], self.shrink), MNIST_CLASSES)
        writers = mnist_writers(images, read_writers(path, images), self.shrink)
        files = [*((folder, name) for name in MNIST_TRAIN_FILES), (path.parent, path.name)]
        origin = [dataclasses.asdict(FileRecord.of(*file)) for file in files]
        parameters = {"shrink": self.shrink, "origin": origin}
        raw = array_data("mnist_writers", workspace, writers, self.num_classes, parameters)
        return dataclasses.replace(raw, has_test_examples=False)
