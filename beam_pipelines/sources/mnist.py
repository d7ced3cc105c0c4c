"""Reads MNIST, or data in its format: gzipped idx files of images and labels (LeCun et al., 1998)."""

import dataclasses
import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from tff_pdp.data.images import ImageDataset, Images
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import DataError

MNIST_CLASSES = 10
MNIST_TRAIN_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
# By the third byte of the file.
_DTYPES = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}


def read_mnist(folder: Path) -> ImageDataset:
    """Reads MNIST's four files: images uint8 `[n, height, width, 1]`, ink bright (255) on black (0).

    Raises:
      DataError: a file is missing or damaged, there are not as many labels as images, or a label is out of range.
    """
    names = (*MNIST_TRAIN_FILES, *_TEST_FILES)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: no {', '.join(missing)}; data.input takes the folder of MNIST's four .gz files")
    return ImageDataset(
        read_labelled_images(folder, *MNIST_TRAIN_FILES, MNIST_CLASSES),
        read_labelled_images(folder, *_TEST_FILES, MNIST_CLASSES),
        MNIST_CLASSES,
        origin=[dataclasses.asdict(FileRecord.of(folder, name)) for name in names],
    )


def read_labelled_images(
    folder: Path, images_file: str, labels_file: str, num_classes: int, first_label: int = 0
) -> Images:
    """Reads a file of images and that of their labels.

    Args:
      folder: has both.
      images_file: gzipped idx file of the images.
      labels_file: that of their labels.
      num_classes: how many there are.
      first_label: the label, in the file, of class 0.

    Returns:
      Images uint8 `[n, height, width, 1]`, labels int64 `[n]` in `[0, num_classes)`.

    Raises:
      DataError: a file is missing or damaged, there are not as many labels as images, or a label is out of range.
    """
    x, y = read_idx(folder / images_file), read_idx(folder / labels_file)
    if x.ndim != 3 or x.dtype != np.uint8 or y.shape != x.shape[:1]:
        raise DataError(f"{folder}: {images_file} of shape {x.shape} does not go with {labels_file} of shape {y.shape}")
    labels = y.astype(np.int64) - first_label
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise DataError(
            f"{folder / labels_file}: image {wrong[0]} (the first is 0) has label {y[wrong[0]]}, which is not one of "
            f"{first_label} to {first_label + num_classes - 1}"
        )
    return Images(x[..., np.newaxis], labels)


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped idx file: uint8 or big-endian int32, as its header states, in the shape that that states.

    Raises:
      DataError: the file is missing, cut short or damaged, or is something else.
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
        raise DataError(f"{path}: {len(content)} bytes, which is not what its header says; get the file again")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)
