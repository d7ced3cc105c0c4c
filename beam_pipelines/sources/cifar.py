"""Reads CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from archives of the python version.

The archives contain pickles. The pickles are read as plain values and arrays of bytes; nothing in them can run code.
"""

import dataclasses
import io
import pickle
import re
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from beam_pipelines.sources.images import ImageDataset, Images
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import DataError


@dataclasses.dataclass(frozen=True)
class _Format:
    """Differences between the two data sets; the patterns `train` and `test` match the names of batches."""

    title: str
    archive: str
    num_classes: int
    train: str
    test: str
    labels: bytes


_CIFAR10 = _Format("CIFAR-10", "cifar-10-python.tar.gz", 10, r"data_batch_\d+", r"test_batch", b"labels")
_CIFAR100 = _Format("CIFAR-100", "cifar-100-python.tar.gz", 100, r"train", r"test", b"fine_labels")


def read_cifar10(source: str) -> ImageDataset:
    """Reads CIFAR-10, or a part of CIFAR-10 in the same format: images uint8 `[n, 32, 32, 3]`.

    The source is `cifar-10-python.tar.gz`, or the folder of its extracted batches.

    Raises:
      DataError: the source is missing or damaged, or a batch does not have CIFAR-10's format.
    """
    return _read(source, _CIFAR10)


def read_cifar100(source: str) -> ImageDataset:
    """Reads CIFAR-100 with its 100 fine classes; see `read_cifar10`."""
    return _read(source, _CIFAR100)


def _read(source: str, form: _Format) -> ImageDataset:
    path = Path(source)
    if not path.exists():
        raise DataError(
            f"{path}: no such file or folder; data.input must be {form.archive}, or the folder of its extracted "
            "batches; data.kind tfds reads CIFAR of TensorFlow Datasets"
        )
    batches, origin = _batches_of_archive(path, form) if path.is_file() else _batches_of_folder(path, form)
    sides: list[Images] = []
    for pattern in (form.train, form.test):
        names = [name for name in sorted(batches) if re.fullmatch(pattern, name)]
        if not names:
            raise DataError(f"{path}: no {pattern} in it; data.input must be the python version of {form.title}")
        parsed = [_parse_batch(f"{path}: {name}", batches[name], form) for name in names]
        sides.append(Images(np.concatenate([part.x for part in parsed]), np.concatenate([part.y for part in parsed])))
    train, test = sides
    return ImageDataset(train, test, form.num_classes, origin=[dataclasses.asdict(file) for file in origin])


def _batches_of_archive(path: Path, form: _Format) -> tuple[dict[str, bytes], list[FileRecord]]:
    # Read in place: nothing is extracted, so a member's path cannot lead anywhere.
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
            batches = {name: file.read() for name, file in members.items() if file and _is_batch(name, form)}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a tar archive, or truncated or damaged: {error}") from error
    return batches, [FileRecord.of(path.parent, path.name)]


def _batches_of_folder(folder: Path, form: _Format) -> tuple[dict[str, bytes], list[FileRecord]]:
    names = sorted(path.name for path in folder.iterdir() if _is_batch(path.name, form) and path.is_file())
    return {name: (folder / name).read_bytes() for name in names}, [FileRecord.of(folder, name) for name in names]


def _is_batch(name: str, form: _Format) -> bool:
    return bool(re.fullmatch(f"{form.train}|{form.test}", name))


def _parse_batch(place: str, content: bytes, form: _Format) -> Images:
    try:
        batch = load_array_pickle(content)
        x, y = batch[b"data"].to_numpy().reshape(-1, 3, 32, 32), np.asarray(batch[form.labels])
    # A pickle that is cut short or forged may raise anything.
    except Exception as error:
        raise DataError(f"{place}: not a batch of {form.title}, truncated or damaged: {error!r}") from error
    return _images(place, x.transpose(0, 2, 3, 1), y, form)


def _images(place: str, x: np.ndarray, y: np.ndarray, form: _Format) -> Images:
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu" or not ((y >= 0) & (y < form.num_classes)).all():
        raise DataError(f"{place}: each image needs one label, an integer from 0 to {form.num_classes - 1}")
    return Images(x, y.astype(np.int64))


def load_array_pickle(content: bytes) -> Any:
    """Unpickles a value made of plain values and `PickledArray`s; Python 2's strings become bytes.

    Raises:
      Exception: the pickle is cut short or forged, or names a class or function that is not allowed. The exception
        may have any type.
    """
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()


class PickledArray:
    """Array as a pickle describes it; checked here, because NumPy would accept a forged or damaged array."""

    def __init__(self, *_: Any):
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]):
        self._state = state

    def to_numpy(self) -> np.ndarray:
        """Converts to a NumPy array of unsigned bytes; raises ValueError for arrays of other types."""
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _PickledDtype) or dtype.name not in (b"u1", "u1"):
            raise ValueError("the array's data are not unsigned bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _PickledDtype:
    """Type of an array as a pickle states it."""

    def __init__(self, name: Any, *_: Any):
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]):
        pass


class _Unpickler(pickle.Unpickler):
    """Refuses all classes and functions except those that arrays of bytes need."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class or function that a pickle may name."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the pickle names {module}.{name}, which is not allowed")
        return _ALLOWED[module, name]


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Encodes bytes as Python 3 writes them in a pickle that Python 2 can read."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the pickle names encoding {encoding!r}, which is not allowed")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _PickledDtype,
    ("numpy", "ndarray"): PickledArray,
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("_codecs", "encode"): _encode_latin1,
}
