"""Writes and reads silos as arrays, in one `.npz` file: `<silo>/x`, `<silo>/y` and, where known, `<silo>/is_test`.

Silos are written and read one at a time: the file may be larger than memory, a silo may not.
"""

import dataclasses
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tff_pdp.errors import DataError
from tff_pdp.files import replacing

_MEMBERS = ("x", "y", "is_test")
# Errors of NumPy and zipfile for files that are cut short, damaged, encrypted or forged.
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
    """One silo's examples.

    Attributes:
      name: the silo's name.
      x: `[n, ...]`, numbers of any type.
      y: `[n]` or `[n, 1]`, labels.
      is_test: bool `[n]`, which examples are for test; None for an unknown choice.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    is_test: np.ndarray | None = None


def write_silo_arrays(path: Path, silos: Iterable[SiloArrays]) -> None:
    """Writes silos in one move: `path` holds all of them, or its old content. Equal silos give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as staging, zipfile.ZipFile(staging, "w") as archive:
        for silo in silos:
            for member in _MEMBERS:
                array = getattr(silo, member)
                if array is not None:
                    # Opened by name, a member has the zip format's first date and not today's.
                    with archive.open(f"{silo.name}/{member}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def read_silo_arrays(path: Path) -> Iterator[SiloArrays]:
    """Reads a file's silos, in their order there. Arrays of Python objects are refused.

    Raises:
      DataError: the file cannot be read or is no `.npz` file, a silo lacks its x or y, or a name is unknown.
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
            raise DataError(f"{path}: unexpected array {entry!r}; name them <silo>/x, <silo>/y and <silo>/is_test")
        names[silo] = None
    if not names:
        raise DataError(f"{path}: no silo in it")
    return list(names)


def _array(archive: zipfile.ZipFile, entry: str) -> np.ndarray | None:
    if entry not in archive.namelist():
        return None
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
