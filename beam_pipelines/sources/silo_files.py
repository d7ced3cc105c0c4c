"""Reads silos of feature vectors from `.mat`, LEAF-like `.json` and `.npz` files.

| file | silos | examples |
|---|---|---|
| `.mat` | `silo_000`, ... in the file's order | cells X, Y |
| `.json`, `.json.gz` | the users' names | as in LEAF JSON; labels may be nested: `[[-1], [1]]` |
| `.npz` | the names in the file | `<silo>/x`, `<silo>/y` and, where known, `<silo>/is_test` |

The cells X and Y of a MATLAB file have the shape (1, m) or (m, 1), and contain features (n_i, d) and labels (n_i, 1).
School, Vehicle and GLEAM are published in this form. Silos of an `.npz` file are written and read one at a time: each
silo must fit into memory, the whole file need not.
"""

import dataclasses
import functools
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from beam_pipelines.options import RawData, SourceSettings, files_in
from beam_pipelines.records import UserRecord
from beam_pipelines.sources.leaf import read_users
from tff_pdp.errors import DataError
from tff_pdp.files import replacing
from tff_pdp.settings import Finite

_NUMBERS, _TEXT = "biuf", "US"
_BRIGHTEST = 255


class SiloFiles(SourceSettings):
    """Reads feature vectors of silos, unchanged.

    `input` is a `.mat`, `.json`, `.json.gz` or `.npz` file, or a folder; see `beam_pipelines.sources.silo_files`. With
    two classes, labels {-1, 1} become {0, 1}.

    Attributes:
      label_shift: number added to every label of a regression, before the multiplication by `label_scale`. The number
        is a public constant and must not be derived from the data, because the ledger does not account for it.
      label_scale: factor that multiplies the shifted labels, not 0; a public constant like `label_shift`.
    """

    label_shift: Finite = 0.0
    label_scale: Finite = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.label_scale == 0:
            raise ValueError("label_scale must not be 0")
        if self.num_classes and (self.label_shift, self.label_scale) != (0.0, 1.0):
            raise ValueError("label_shift and label_scale are for regressions only; num_classes 0 makes a regression")

    def build(self, workspace: Path) -> RawData:
        """Describes the files as raw data; raises DataError as `list_silo_files` does."""
        folder, files = list_silo_files(Path(self.input))
        how = {"label_shift": self.label_shift, "label_scale": self.label_scale}
        read = functools.partial(read_silos, num_classes=self.num_classes, **how)
        return RawData("silo_files", folder, files, read, are_images=False, parameters=how)


def list_silo_files(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Finds the folder and the names of the silo files at a path, which is one silo file or a folder of silo files.

    Raises:
      DataError: there is no silo file, or there are several `.mat` files, whose silos would have the same names.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; data.input must be a {_suffixes()} file, or a folder of them")
    folder = path if path.is_dir() else path.parent
    candidates = files_in(path) if path.is_dir() else [path]
    names = tuple(sorted(file.name for file in candidates if _reader_of(file) and file.is_file()))
    if not names:
        raise DataError(f"{path}: no silo file; data.input must be a {_suffixes()} file, or a folder of them")
    if sum(name.endswith(".mat") for name in names) > 1:
        raise DataError(f"{path}: several .mat files, whose silos would all be called silo_000, ...; name one of them")
    return folder, names


def read_silos(
    path: Path, num_classes: int, *, label_shift: float = 0.0, label_scale: float = 1.0, brightest: int = 1
) -> Iterator[UserRecord]:
    """Reads every silo of a file, one at a time if the format allows, unchecked.

    Args:
      path: path of the file.
      num_classes: number of classes; 0 for a regression. With two classes, labels {-1, 1} become {0, 1}.
      label_shift: number added to the labels of a regression, a public constant.
      label_scale: factor that multiplies a regression's shifted labels, a public constant.
      brightest: number by which features are divided: 255 for 8-bit pixels.

    Raises:
      DataError: the file cannot be read.
    """
    read = _reader_of(path)
    if read is None:
        raise DataError(f"{path}: not a silo file; names of silo files end in {_suffixes()}")
    for user in read(path):
        x, y = user.x, user.y
        if isinstance(x, list) and brightest != 1:
            x = [row / np.float32(brightest) for row in x]
        if isinstance(y, list):
            y = [label[0] if isinstance(label, list) and len(label) == 1 else label for label in y]
            if num_classes == 0:
                y = [_scaled(label, label_shift, label_scale) for label in y]
            # If 0 occurs too, -1 is not a class: it stays, and is reported as out of range.
            elif num_classes == 2 and -1 in y and 0 not in y:
                y = [0 if label == -1 else label for label in y]
        yield dataclasses.replace(user, x=x, y=y)


def _scaled(label: Any, shift: float, scale: float) -> Any:
    # Anything but a number, and a number that is too large, is reported unchanged.
    if type(label) not in (int, float) or not abs(label) <= np.finfo(np.float32).max:
        return label
    return (label + shift) * scale


def _read_mat(path: Path) -> Iterator[UserRecord]:
    for number, (x, y) in enumerate(read_mat_cells(path)):
        yield _user_of_arrays(f"silo_{number:03d}", path.name, x, y)


def _read_npz(path: Path) -> Iterator[UserRecord]:
    for silo in read_silo_arrays(path):
        yield _user_of_arrays(silo.name, path.name, silo.x, silo.y, silo.is_test)


_READERS: dict[str, Callable[[Path], Iterable[UserRecord]]] = {
    ".mat": _read_mat,
    ".json": read_users,
    ".json.gz": read_users,
    ".npz": _read_npz,
}


def _reader_of(path: Path) -> Callable[[Path], Iterable[UserRecord]] | None:
    return next((read for suffix, read in _READERS.items() if path.name.endswith(suffix)), None)


def _suffixes() -> str:
    return ", ".join(_READERS)


def _user_of_arrays(client: str, source: str, x: Any, y: Any, is_test: np.ndarray | None = None) -> UserRecord:
    """Makes a record of a silo's arrays; describes a malformed array, which validation then reports."""
    rows = _describe(x)
    if isinstance(x, np.ndarray) and x.ndim >= 2 and x.dtype.kind in _NUMBERS:
        # Numbers too large for float32 become infinite, and validation reports them.
        with np.errstate(over="ignore"):
            rows = list(np.asarray(x, np.float32).reshape(len(x), math.prod(x.shape[1:])))
    labels = _describe(y)
    if isinstance(y, np.ndarray) and y.ndim >= 1 and y.size == len(y) and y.dtype.kind in _NUMBERS:
        labels = y.astype(np.int64 if y.dtype == bool else y.dtype).ravel().tolist()
    elif isinstance(y, np.ndarray) and y.ndim >= 1 and y.size == len(y) and y.dtype.kind in _TEXT:
        # Each is reported as a label that is no number, with its name.
        labels = [str(label) for label in y.ravel()]
    num_samples = len(rows) if isinstance(rows, list) else None
    stated = None if is_test is None else is_test.astype(bool).ravel().tolist()
    return UserRecord(client, source, rows, labels, num_samples, is_test=stated)


def _describe(value: Any) -> str:
    return f"{getattr(value, 'dtype', type(value).__name__)} of shape {np.shape(value)}"


_CELLS = ("X", "Y")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEADER_LENGTH = 512


def read_mat_cells(path: Path) -> list[tuple[Any, Any]]:
    """Reads the cells `(X, Y)` of every silo, unchecked.

    Raises:
      DataError: the file cannot be read, has MATLAB's version 7.3, or has no cells X and Y of the same length.
    """
    # Imported late: only this format needs the import.
    import scipy.io

    _refuse_version_73(path)
    try:
        content = scipy.io.loadmat(path, variable_names=_CELLS)
    # The type of SciPy's error depends on where the file is damaged.
    except Exception as error:
        raise DataError(f"{path}: not a MATLAB file of version 5 to 7.2, or truncated or damaged: {error}") from error
    missing = [name for name in _CELLS if name not in content]
    if missing:
        raise DataError(f"{path}: no variable {' and no variable '.join(missing)} in it; silos need cells X and Y")
    x, y = (_cell_members(path, name, content[name]) for name in _CELLS)
    if len(x) != len(y):
        raise DataError(f"{path}: X has {len(x)} cells and Y has {len(y)}; each silo needs one cell in both")
    return list(zip(x, y, strict=True))


def _refuse_version_73(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            # In version 7.3, HDF5 begins after a block of text in which MATLAB describes the file.
            header = file.read(_HEADER_LENGTH + len(_HDF5_SIGNATURE))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if header.startswith((b"MATLAB 7.3", _HDF5_SIGNATURE)) or header[_HEADER_LENGTH:] == _HDF5_SIGNATURE:
        raise DataError(f"{path}: a MATLAB file of version 7.3 (HDF5); in MATLAB, write it again with save(..., '-v7')")


def _cell_members(path: Path, name: str, cell: Any) -> list[Any]:
    if not isinstance(cell, np.ndarray) or cell.dtype != object or cell.ndim != 2 or min(cell.shape) > 1:
        raise DataError(
            f"{path}: {name} must be a cell of shape (1, m) or (m, 1), not {getattr(cell, 'dtype', type(cell))} "
            f"of shape {np.shape(cell)}"
        )
    return list(cell.ravel())


_MEMBERS = ("x", "y", "is_test")
# Errors from NumPy and zipfile for files that are cut short, damaged, encrypted or forged.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclasses.dataclass(frozen=True)
class SiloArrays:
    """Examples of one silo.

    Attributes:
      name: name of the silo.
      x: features `[n, ...]`, numbers of any type.
      y: labels `[n]` or `[n, 1]`.
      is_test: whether each example is for test, bool `[n]`; None leaves the choice to the job.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    is_test: np.ndarray | None = None


def write_silo_arrays(path: Path, silos: Iterable[SiloArrays]) -> None:
    """Writes silos to an `.npz` file; after an error, `path` has its old content. Equal silos give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as staging, zipfile.ZipFile(staging, "w") as archive:
        for silo in silos:
            for member in _MEMBERS:
                array = getattr(silo, member)
                if array is not None:
                    # A member opened by name gets the zip format's first date, not today's.
                    with archive.open(f"{silo.name}/{member}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def read_silo_arrays(path: Path) -> Iterator[SiloArrays]:
    """Reads the silos of an `.npz` file, in the file's order; refuses arrays of Python objects.

    Raises:
      DataError: the file cannot be read or is not an `.npz` file, a silo lacks x or y, or an array has another name.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for silo in _silo_names(path, archive):
                arrays = {member: _array(archive, f"{silo}/{member}.npy") for member in _MEMBERS}
                if arrays["x"] is None or arrays["y"] is None:
                    raise DataError(f"{path}: silo {silo!r} needs both {silo}/x and {silo}/y")
                yield SiloArrays(silo, arrays["x"], arrays["y"], arrays["is_test"])
    except _UNREADABLE as error:
        raise DataError(f"{path}: not an .npz file, or truncated or damaged: {error}") from error


def _silo_names(path: Path, archive: zipfile.ZipFile) -> list[str]:
    names: dict[str, None] = {}
    for entry in archive.namelist():
        silo, _, member = entry.removesuffix(".npy").rpartition("/")
        if not silo or member not in _MEMBERS:
            raise DataError(f"{path}: unexpected array {entry!r}; allowed are <silo>/x, <silo>/y and <silo>/is_test")
        names[silo] = None
    if not names:
        raise DataError(f"{path}: no silo in it; a silo needs <silo>/x and <silo>/y")
    return list(names)


def _array(archive: zipfile.ZipFile, entry: str) -> np.ndarray | None:
    if entry not in archive.namelist():
        return None
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def array_images(
    source: str, workspace: Path, silos: Iterable[SiloArrays], num_classes: int, parameters: Mapping[str, Any]
) -> RawData:
    """Writes silos of 8-bit images, some of them for test, to `workspace/<source>.npz`, and describes the raw data."""
    file = f"{source}.npz"
    write_silo_arrays(workspace / file, silos)
    read = functools.partial(read_silos, num_classes=num_classes, brightest=_BRIGHTEST)
    return RawData(source, workspace, (file,), read, are_images=True, has_test_examples=True, parameters=parameters)
