"""Answers of the REST API to predict requests, in the format of the request."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from serving.errors import invalid_argument
from serving.server.json_documents import write

_BYTES_SUFFIX = "_bytes"
# TensorFlow Serving writes these, and strings.
_DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool")


def format_outputs(outputs: Mapping[str, np.ndarray], *, rows: bool) -> bytes:
    """Writes outputs as rows (`predictions`) or columns (`outputs`); a single output is written without its key.

    Strings are text, or base64 objects where the name of their output ends with `_bytes`.

    Raises:
      RequestError: INVALID_ARGUMENT for outputs that cannot be rows together, or of a dtype that JSON cannot carry.
    """
    if rows:
        _check_batch_sizes(outputs)
    columns = {key: _to_column(key, array) for key, array in outputs.items()}
    finite = all(array.dtype.kind != "f" or np.isfinite(array).all() for array in outputs.values())
    if len(columns) == 1:
        document = {"predictions" if rows else "outputs": next(iter(columns.values()))}
    elif rows:
        keys = tuple(columns)
        document = {"predictions": [dict(zip(keys, row, strict=True)) for row in zip(*columns.values(), strict=True)]}
    else:
        document = {"outputs": columns}
    return write(document, finite=finite)


def _check_batch_sizes(outputs: Mapping[str, np.ndarray]) -> None:
    expected = -1
    for key, array in sorted(outputs.items()):
        if array.ndim == 0:
            raise invalid_argument(f"Tensor name: {key} has no shape information ")
        if expected >= 0 and len(array) != expected:
            raise invalid_argument(
                f"Tensor name: {key} has inconsistent batch size: {len(array)} expecting: {expected}"
            )
        expected = len(array)


def _to_column(key: str, array: np.ndarray) -> Any:
    if array.dtype == object:
        write_one = _to_base64 if key.endswith(_BYTES_SUFFIX) else _to_text
        written = np.empty(array.size, object)
        written[:] = [write_one(value) for value in array.ravel()]
        return written.reshape(array.shape).tolist()
    if array.dtype.name not in _DTYPES:
        raise invalid_argument(f"Failed to write JSON value for tensor type: {array.dtype}")
    if array.dtype != np.float32 or array.size == 0:
        return array.tolist()
    # These stay arrays, which are written fastest and with their own digits.
    return array.copy("C") if array.ndim else array[()]


def _to_text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def _to_base64(value: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(value).decode()}
