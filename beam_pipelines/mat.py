"""Reads silos from MATLAB files: cells X and Y of shape (1, m) or (m, 1), holding features (n_i, d), labels (n_i, 1).

School, Vehicle and GLEAM are published in this form.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.errors import DataError

_CELLS = ("X", "Y")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEADER_LENGTH = 512


def read_mat_cells(path: Path) -> list[tuple[Any, Any]]:
    """Reads `(X, Y)` of every silo, as they are: what a cell holds is not judged.

    Raises:
      DataError: the file cannot be read, is of MATLAB's version 7.3, or has no cells X and Y of the same length.
    """
    # Imported late: only files of this format pay for it.
    import scipy.io

    _refuse_version_73(path)
    try:
        content = scipy.io.loadmat(path, variable_names=_CELLS)
    # What SciPy raises for a damaged file depends on where the damage is.
    except Exception as error:
        raise DataError(f"{path}: not a MATLAB file of version 5 to 7.2, or truncated or damaged: {error}") from error
    missing = [name for name in _CELLS if name not in content]
    if missing:
        raise DataError(f"{path}: no variable {' and no variable '.join(missing)} in it; silos need cells X and Y")
    x, y = (_cell_members(path, name, content[name]) for name in _CELLS)
    if len(x) != len(y):
        raise DataError(f"{path}: X has {len(x)} cells and Y has {len(y)}; each silo needs one of both")
    return list(zip(x, y, strict=True))


def _refuse_version_73(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            # HDF5 begins after a block that MATLAB describes itself in.
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
