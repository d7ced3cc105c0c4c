"""Reads examples that are arrays, such as images, from an NPZ file, and writes synthetic ones in the same form."""

import io
import math
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tff_pdp.errors import DataError
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples


class Arrays(NamedTuple):
    """Examples from a file.

    Attributes:
      x: features, `[n, *input_shape]`, in the dtype of the file.
      y: classes, int64 `[n]`; 0 where the file has no labels.
      label_dtype: dtype of labels in the file; None where the file has none.
    """

    x: np.ndarray
    y: np.ndarray
    label_dtype: np.dtype | None

    def to_bytes(self, made: SyntheticExamples) -> bytes:
        """Returns an NPZ file of synthetic examples, with the same arrays and dtypes as the file that was read.

        Features are rounded if their dtype is an integer type. Equal examples give equal bytes.
        """
        x = np.rint(made.x) if np.issubdtype(self.x.dtype, np.integer) else made.x
        content = {"x": x.astype(self.x.dtype)}
        if self.label_dtype is not None:
            content["y"] = made.y.astype(self.label_dtype)
        file = io.BytesIO()
        np.savez_compressed(file, **content)  # pyright: ignore[reportArgumentType]
        return file.getvalue()


def read_arrays(path: Path, generator: Generator) -> Arrays:
    """Reads arrays `x` and, if there are labels, `y` from an NPZ file, and checks them against public settings.

    Raises:
      DataError: the file cannot be read, an array is missing or has the wrong form, a feature is missing or out of
        range, or a label is no class. The message names file, array and row (1 is the first), but no value, because
        values are private.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in ("x", "y") if name in stored}
    except OSError as error:
        raise DataError(f"{path}: cannot read the file ({error.strerror or error})") from None
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError):
        raise DataError(f"{path}: not an NPZ file of plain arrays") from None
    if "x" not in found:
        raise DataError(f"{path}: the array x is missing")
    x = found["x"]
    if x.ndim < 2 or x.dtype.kind not in "iuf" or not math.prod(x.shape[1:]):
        raise DataError(f"{path}: x must be numbers of shape [rows, ...], not {x.dtype} of shape {list(x.shape)}")
    for row, values in enumerate(x):
        # A missing value is not in the range either.
        if not ((values >= generator.low) & (values <= generator.high)).all():
            raise DataError(
                f"{path}: x, row {row + 1}: a value is missing, or not between {generator.low:g} and {generator.high:g}"
            )
    if "y" not in found:
        if generator.num_classes > 1:
            raise DataError(f"{path}: the array y is missing, but there are {generator.num_classes} classes")
        return Arrays(x, np.zeros(len(x), np.int64), None)
    y = found["y"]
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise DataError(f"{path}: y must be whole numbers of shape [{len(x)}], not {y.dtype} of {list(y.shape)}")
    strange = np.flatnonzero((y < 0) | (y >= generator.num_classes))
    if len(strange):
        raise DataError(
            f"{path}: y, row {strange[0] + 1}: the label is not one of the classes 0 to {generator.num_classes - 1}"
        )
    return Arrays(x, y.astype(np.int64), y.dtype)
