"""Reads MNIST, or data in its format: four gzipped idx files (LeCun et al., 1998)."""

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
_TRAIN_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
_UNSIGNED_BYTES = 8


def read_mnist(folder: Path) -> ImageDataset:
    """Reads MNIST's four files: images uint8 `[n, height, width, 1]`, ink bright (255) on black (0).

    Raises:
      DataError: a file is missing or damaged, or there are not as many labels as images.
    """
    missing = [name for name in (*_TRAIN_FILES, *_TEST_FILES) if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: no {', '.join(missing)}; data.input takes the folder of MNIST's four .gz files")
    origin = [dataclasses.asdict(FileRecord.of(folder, name)) for name in (*_TRAIN_FILES, *_TEST_FILES)]
    return ImageDataset(_read_side(folder, *_TRAIN_FILES), _read_side(folder, *_TEST_FILES), origin)


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped idx file of unsigned bytes: uint8, in the shape that its header states.

    Raises:
      DataError: the file is cut short or damaged, or is something else.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTES:
        raise DataError(f"{path}: not an idx file of unsigned bytes: it begins with {content[:4].hex() or 'nothing'}")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start]) if len(content) >= start else (0,)
    if len(content) != start + math.prod(shape):
        raise DataError(f"{path}: {len(content)} bytes, which is not what its header says; get the file again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_side(folder: Path, images_file: str, labels_file: str) -> Images:
    x, y = read_idx(folder / images_file), read_idx(folder / labels_file)
    if x.ndim != 3 or y.shape != x.shape[:1]:
        raise DataError(f"{folder}: {images_file} of shape {x.shape} does not go with {labels_file} of shape {y.shape}")
    return Images(x[..., np.newaxis], y.astype(np.int64))
