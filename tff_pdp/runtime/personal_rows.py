"""Arrays of many clients, some clients at a time -> what all have in common, held once, and rows of what differs."""

import hashlib
from collections.abc import Iterable

import numpy as np

from serving.models import GLOBAL_ROW, Arrays

_DIGEST_BYTES = 16


class PersonalRows:
    """Arrays by name, of a global model and of clients, with everything equal held once.

    Names that have the same bits for everybody are shared. Of the others there are rows, the first being the global
    model's; clients whose arrays have the same bits own the same row.

    Attributes:
      shared: what is the same for everybody, by name.
      rows: int32 `[clients]`, the row of each client.
      num_rows: different rows, the global one included.
    """

    def __init__(self, global_arrays: Arrays, num_clients: int, clients: Iterable[Arrays]):
        """Takes the arrays of one client after another.

        In memory are what is returned and, besides, whatever the iterable holds at a time.

        Args:
          global_arrays: by name.
          num_clients: how many clients there are.
          clients: each one's arrays, of the same names, shapes and types.

        Raises:
          ValueError: names, shapes or types differ, or there are more or fewer clients.
        """
        self.shared = {name: np.asarray(array, order="C") for name, array in global_arrays.items()}
        self.rows = np.full(num_clients, GLOBAL_ROW, np.int32)
        self._buffers: dict[str, np.ndarray] = {}
        # By what differs from the global model, so that what does not is compared and never hashed.
        known: dict[tuple[tuple[str, bytes], ...], int] = {(): GLOBAL_ROW}
        everything = dict(self.shared)
        for client, arrays in zip(range(num_clients), clients, strict=True):
            own = {name: _like(everything, name, arrays) for name in {**everything, **arrays}}
            different = [name for name, array in own.items() if not _same_bits(array, everything[name])]
            key = tuple((name, _digest(own[name])) for name in different)
            if key not in known:
                known[key] = len(known)
                self._write(known[key], own, different)
            self.rows[client] = known[key]
        self.num_rows = len(known)

    @property
    def stacked(self) -> dict[str, np.ndarray]:
        """The rows: `[num_rows, ...]` by name."""
        return {name: buffer[: self.num_rows] for name, buffer in sorted(self._buffers.items())}

    @property
    def nbytes_of_row(self) -> int:
        """Bytes of one row of all stacks together."""
        return sum(buffer[0].nbytes for buffer in self._buffers.values())

    @property
    def nbytes_of_shared(self) -> int:
        """Bytes of what is shared."""
        return sum(array.nbytes for array in self.shared.values())

    def separate(self) -> None:
        """Gives every client a row of its own, in the order of clients, where anything differs at all."""
        if not self._buffers:
            return
        # Backwards, in place: a client's row is never behind its new one, since rows are numbered as clients come.
        for client in reversed(range(len(self.rows))):
            for buffer in self._buffers.values():
                buffer[client + 1] = buffer[self.rows[client]]
        self.rows = np.arange(1, len(self.rows) + 1, dtype=np.int32)
        self.num_rows = len(self.rows) + 1

    def _write(self, row: int, own: Arrays, different: Iterable[str]) -> None:
        for name in different:
            if name not in self._buffers:
                # Pages of it that are never written take no memory.
                buffer = np.empty([len(self.rows) + 1, *own[name].shape], own[name].dtype)
                # All before had the global model's.
                buffer[:row] = self.shared.pop(name)
                self._buffers[name] = buffer
        for name, buffer in self._buffers.items():
            buffer[row] = own[name]


def _like(expected: Arrays, name: str, arrays: Arrays) -> np.ndarray:
    if name not in expected or name not in arrays:
        raise ValueError(f"{name!r} is not an array of every client and of the global model")
    array = np.asarray(arrays[name], order="C")
    if (array.shape, array.dtype) != (expected[name].shape, expected[name].dtype):
        raise ValueError(
            f"{name!r} is {array.dtype} {array.shape} of one client, and {expected[name].dtype} "
            f"{expected[name].shape} of the global model"
        )
    return array


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    # Not by value: zeros have a sign.
    return np.array_equal(_bytes(one), _bytes(other))


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(_bytes(array).data, digest_size=_DIGEST_BYTES).digest()


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
