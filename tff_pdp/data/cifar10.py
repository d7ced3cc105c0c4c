"""Reads CIFAR-10 (Krizhevsky, 2009): the python-pickle batches of its official archive, or TensorFlow Datasets."""

import dataclasses
import importlib
import io
import pickle
import re
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.data.images import ImageDataset, Images
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import ConfigError, DataError

CIFAR10_SHAPE = (32, 32, 3)
CIFAR10_CLASSES = 10
TFDS = "tfds"
_TFDS_BATCH = 1000
_TRAIN_BATCH = re.compile(r"data_batch_\d+")
_TEST_BATCH = re.compile(r"test_batch")


def read_cifar10(source: str) -> ImageDataset:
    """Reads CIFAR-10, or a part of it in its format: images uint8 `[n, 32, 32, 3]`.

    Args:
      source: `cifar-10-python.tar.gz`, the folder that holds its batches, or `tfds` for TensorFlow Datasets, which
        downloads them once.

    Raises:
      ConfigError: TensorFlow Datasets is asked for and not installed.
      DataError: the source is missing or damaged, or a batch is not one of CIFAR-10's.
    """
    if source == TFDS:
        return _read_tfds()
    path = Path(source)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; data.input takes cifar-10-python.tar.gz, its folder, or tfds")
    batches, origin = _batches_of_archive(path) if path.is_file() else _batches_of_folder(path)
    sides = []
    for pattern in (_TRAIN_BATCH, _TEST_BATCH):
        parsed = [_parse_batch(f"{path}: {name}", batches[name]) for name in sorted(batches) if pattern.fullmatch(name)]
        if not parsed:
            raise DataError(f"{path}: no {pattern.pattern} in it; data.input takes the python version of CIFAR-10")
        sides.append(Images(np.concatenate([part.x for part in parsed]), np.concatenate([part.y for part in parsed])))
    return ImageDataset(*sides, origin=[dataclasses.asdict(file) for file in origin])


def _batches_of_archive(path: Path) -> tuple[dict[str, bytes], list[FileRecord]]:
    # Read in place: nothing is extracted, so a member's path cannot lead anywhere.
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
            batches = {name: file.read() for name, file in members.items() if file and _is_batch(name)}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a tar archive, or truncated or damaged: {error}") from error
    return batches, [FileRecord.of(path.parent, path.name)]


def _batches_of_folder(folder: Path) -> tuple[dict[str, bytes], list[FileRecord]]:
    names = sorted(path.name for path in folder.iterdir() if _is_batch(path.name))
    return {name: (folder / name).read_bytes() for name in names}, [FileRecord.of(folder, name) for name in names]


def _is_batch(name: str) -> bool:
    return bool(_TRAIN_BATCH.fullmatch(name) or _TEST_BATCH.fullmatch(name))


def _parse_batch(place: str, content: bytes) -> Images:
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        x, y = batch[b"data"].to_numpy().reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"])
    # A pickle that is cut short or forged may raise anything.
    except Exception as error:
        raise DataError(f"{place}: not a batch of CIFAR-10, truncated or damaged: {error!r}") from error
    return _images(place, x.transpose(0, 2, 3, 1), y)


def _images(place: str, x: np.ndarray, y: np.ndarray) -> Images:
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu" or not ((y >= 0) & (y < CIFAR10_CLASSES)).all():
        raise DataError(f"{place}: needs one label for each image, an integer from 0 to {CIFAR10_CLASSES - 1}")
    return Images(x, y.astype(np.int64))


class _BatchUnpickler(pickle.Unpickler):
    """Loads plain values and arrays of bytes; refuses every other class or function, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a pickle may name."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return _ALLOWED[module, name]


class _PickledArray:
    """What a pickle says of an array: checked here, because NumPy would believe a forged or damaged one."""

    def __init__(self, *_: Any):
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]):
        self._state = state

    def to_numpy(self) -> np.ndarray:
        """The array, of unsigned bytes; raises ValueError if it is anything else."""
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _PickledDtype) or dtype.name not in (b"u1", "u1"):
            raise ValueError("its data are not unsigned bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _PickledDtype:
    """What a pickle says of an array's type."""

    def __init__(self, name: Any, *_: Any):
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]):
        pass


def _encode_latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in a pickle that Python 2 can read."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed in it")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _PickledDtype,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("_codecs", "encode"): _encode_latin1,
}


def _read_tfds() -> ImageDataset:
    try:
        tfds = importlib.import_module("tensorflow_datasets")
    except ImportError as error:
        raise ConfigError(
            "data.input: tfds needs TensorFlow Datasets; pip install tensorflow-datasets==4.9.10 importlib_resources, "
            "or name cifar-10-python.tar.gz or its folder"
        ) from error
    sides, info = tfds.load("cifar10", split=["train", "test"], batch_size=_TFDS_BATCH, with_info=True)
    images = []
    for side in sides:
        batches = list(tfds.as_numpy(side))
        x, y = (np.concatenate([batch[key] for batch in batches]) for key in ("image", "label"))
        images.append(_images(info.full_name, x, y))
    return ImageDataset(*images, origin=[{"name": info.full_name}])
