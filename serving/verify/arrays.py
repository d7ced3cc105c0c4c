"""Arrays between two processes as one `.npz` file that holds no pickle: strings travel as bytes and their lengths."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

_BYTES, _LENGTHS, _ARRAY = "bytes", "lengths", "array"


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays under their names; arrays of objects hold `str` or `bytes`.

    Args:
      path: the file, replaced where it exists; its name ends in `.npz`.
      arrays: any shapes; numbers, bools, or strings as objects or as NumPy's own string types.
    """
    members = {}
    for name, array in arrays.items():
        if array.dtype.kind in "OSU":
            encoded = [_encode(value) for value in array.ravel().tolist()]
            members[f"{_BYTES}:{name}"] = np.frombuffer(b"".join(encoded), np.uint8)
            members[f"{_LENGTHS}:{name}"] = np.array([len(value) for value in encoded], np.int64).reshape(array.shape)
        else:
            members[f"{_ARRAY}:{name}"] = array
    # Not as keywords: an array may be called `file`.
    with path.open("wb") as file:
        np.savez(file, **members)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what `save_arrays` wrote; strings come back as arrays of objects that are `bytes`."""
    arrays = {}
    with np.load(path, allow_pickle=False) as members:
        for member in members.files:
            kind, _, name = member.partition(":")
            if kind == _ARRAY:
                arrays[name] = members[member]
            elif kind == _LENGTHS:
                arrays[name] = _split(members[f"{_BYTES}:{name}"].tobytes(), members[member])
    return arrays


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _split(joined: bytes, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths.ravel(), dtype=np.int64).tolist()
    strings = np.empty(lengths.size, object)
    strings[:] = [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return strings.reshape(lengths.shape)
