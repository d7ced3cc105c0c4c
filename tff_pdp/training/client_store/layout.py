"""Converts clients' states to rows of bytes, one row for each client, and back, bit for bit."""

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Numbers and booleans, whose type a text such as "<f4" says in full, and whose values are their bytes.
_KINDS = "biufc"


@dataclasses.dataclass(frozen=True)
class _Leaf:
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The structure, shapes and dtypes that the states of all clients share.

    A state is a nest: a mapping with text keys, whose values are arrays of numbers or booleans, or further mappings.
    Mappings may be empty.

    Attributes:
      structure: the nest, with dtype and shape in place of each array.
    """

    structure: Any

    @classmethod
    def of_state(cls, state: Any) -> "StateLayout":
        """Returns the layout of one client's state.

        Raises:
          TypeError: the state is not a nest of arrays of numbers or booleans; the message names the wrong value.
        """
        return cls(_describe(state, "state"))

    @classmethod
    def from_json(cls, text: str) -> "StateLayout":
        """Parses the result of `to_json`.

        Raises:
          ValueError, TypeError: the text is not a result of `to_json`.
        """
        return cls(_from_plain(json.loads(text)))

    def to_json(self) -> str:
        """Returns the layout as text."""
        return json.dumps(_to_plain(self.structure))

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one client's state."""
        return sum(leaf.num_bytes for leaf in _leaves(self.structure))

    def to_rows(self, columns: Any, num_clients: int) -> np.ndarray:
        """Converts states to bytes: in a row, a client's arrays follow one another.

        Args:
          columns: a nest of arrays `[num_clients, ...]` in the structure of a state; keys in any order.
          num_clients: number of clients.

        Returns:
          uint8 `[num_clients, row_bytes]`.

        Raises:
          TypeError: `columns` have another structure, shape or dtype; the message names the wrong value.
        """
        parts = [
            # The number of bytes is given, because it does not follow from an empty array.
            np.ascontiguousarray(column).view(np.uint8).reshape(num_clients, leaf.num_bytes)
            for leaf, column in _pairs(self.structure, columns, num_clients, "columns")
        ]
        return np.concatenate([np.empty([num_clients, 0], np.uint8), *parts], axis=1)

    def to_nest(self, leaves: Sequence[np.ndarray]) -> Any:
        """Nests arrays `[clients, ...]`, one for each leaf in the order of the structure, like a state."""
        return _nested(self.structure, iter(leaves))

    def to_columns(self, rows: np.ndarray) -> Any:
        """Converts the result of `to_rows` back to a nest of new arrays `[clients, ...]`."""
        # Each leaf is copied to memory of its own, where its numbers are aligned.
        sizes = [leaf.num_bytes for leaf in _leaves(self.structure)]
        parts = (part.copy() for part in np.split(rows, np.cumsum(sizes), axis=1))
        return _assemble(self.structure, parts)


def _describe(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{where}: keys of a client's state are texts, not {list(value)}")
        return {key: _describe(member, f"{where}/{key}") for key, member in value.items()}
    if isinstance(value, list | tuple):
        raise TypeError(f"{where}: a client's state consists of mappings and arrays, not of a {type(value).__name__}")
    array = np.asarray(value)
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"{where}: a client's state consists of numbers and booleans, not of {array.dtype}")
    return _Leaf(array.dtype, array.shape)


def _to_plain(structure: Any) -> Any:
    if isinstance(structure, _Leaf):
        return [structure.dtype.str, structure.shape]
    return {key: _to_plain(member) for key, member in structure.items()}


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _from_plain(member) for key, member in plain.items()}
    dtype, shape = plain
    return _Leaf(np.dtype(dtype), tuple(shape))


def _leaves(structure: Any) -> Iterator[_Leaf]:
    if isinstance(structure, _Leaf):
        yield structure
    else:
        for member in structure.values():
            yield from _leaves(member)


def _nested(structure: Any, leaves: Iterator[np.ndarray]) -> Any:
    if isinstance(structure, _Leaf):
        return next(leaves)
    return {key: _nested(member, leaves) for key, member in structure.items()}


def _pairs(structure: Any, columns: Any, num_clients: int, where: str) -> Iterator[tuple[_Leaf, np.ndarray]]:
    """Yields the leaves of the structure, in its order, each with its column."""
    if isinstance(structure, _Leaf):
        if isinstance(columns, Mapping | list | tuple):
            raise TypeError(f"{where}: expected an array, not a {type(columns).__name__}")
        column = np.asarray(columns)
        expected = (num_clients, *structure.shape)
        if column.dtype != structure.dtype or column.shape != expected:
            raise TypeError(
                f"{where}: expected {structure.dtype} {list(expected)}, not {column.dtype} {list(column.shape)}"
            )
        yield structure, column
        return
    if not isinstance(columns, Mapping):
        raise TypeError(f"{where}: expected a mapping, not a {type(columns).__name__}")
    if columns.keys() != structure.keys():
        raise TypeError(f"{where}: expected the members {list(structure)}, not {list(columns)}")
    for key, member in structure.items():
        yield from _pairs(member, columns[key], num_clients, f"{where}/{key}")


def with_client_axis(state: Any) -> Any:
    """Adds a leading axis of length one, for one client, to the arrays of a state."""
    if isinstance(state, Mapping):
        return {key: with_client_axis(member) for key, member in state.items()}
    return np.asarray(state)[np.newaxis]


def _assemble(structure: Any, parts: Iterator[np.ndarray]) -> Any:
    if isinstance(structure, _Leaf):
        part = next(parts)
        return part.view(structure.dtype).reshape(len(part), *structure.shape)
    return collections.OrderedDict((key, _assemble(member, parts)) for key, member in structure.items())
