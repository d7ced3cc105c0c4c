"""Unpickles plain values and arrays of bytes, and nothing that could run code: for data sets published as pickles."""

import io
import pickle
from typing import Any

import numpy as np


def load_array_pickle(content: bytes) -> Any:
    """Unpickles a value made of plain values and `PickledArray`s; Python 2's strings become bytes.

    Raises:
      Exception: of any type, for a pickle that is cut short or forged, or names another class or any function.
    """
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()


class PickledArray:
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


class _Unpickler(pickle.Unpickler):
    """Refuses every class and function but those that stand for arrays of bytes."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a pickle may name."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return _ALLOWED[module, name]


def _encode_latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in a pickle that Python 2 can read."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed in it")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _PickledDtype,
    ("numpy", "ndarray"): PickledArray,
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("_codecs", "encode"): _encode_latin1,
}
