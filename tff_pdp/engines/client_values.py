"""Keeps one value per client on the engine's device, as stacked tensors or client by client."""

import collections.abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import tensorflow as tf

from tff_pdp.engines import structures


@dataclasses.dataclass(frozen=True)
class ClientGroup:
    """The values of a group of clients: one tensor per leaf.

    Attributes:
      indices: indices of the group's clients among all clients, int64 `[clients]`.
      leaves: tensors stacked along a new first axis of clients or, if `stacked` is false, a single client's tensors.
      stacked: whether the leaves have the axis of clients.
    """

    indices: np.ndarray
    leaves: tuple[tf.Tensor, ...]
    stacked: bool


@dataclasses.dataclass(frozen=True)
class _Arrangement:
    """All clients' values in groups. Immutable, so that several reads see the same groups."""

    groups: tuple[ClientGroup, ...]

    @functools.cached_property
    def places(self) -> dict[int, tuple[ClientGroup, int]]:
        return {int(i): (group, row) for group in self.groups for row, i in enumerate(group.indices)}

    def leaves_of(self, index: int) -> tuple[tf.Tensor, ...]:
        group, row = self.places[index]
        return tuple(leaf[row] for leaf in group.leaves) if group.stacked else group.leaves


class ClientValues(collections.abc.Sequence):
    """A sequence with one value for each client, as the engine stores a value that TFF places at CLIENTS.

    Reading a member copies the member to NumPy arrays. Passing the sequence to a computation, as a training loop does
    with client states, copies nothing.

    The values never change; only their arrangement in groups does. Several threads and engines may share one object.
    """

    def __init__(self, member_type: Any, groups: Sequence[ClientGroup]):
        """Wraps groups that together contain every client once."""
        self.member_type = member_type
        # Another thread may assign a new arrangement at any time: each method reads it once.
        self._arrangement = _Arrangement(tuple(groups))
        self._size = sum(len(group.indices) for group in groups)

    @classmethod
    def from_members(cls, member_type: Any, members: Sequence[Any], where: str = "value") -> "ClientValues":
        """Builds the sequence from a list of Python values.

        Raises:
          TypeError: a value does not match `member_type`; the message names client and leaf.
        """
        singles = [
            ClientGroup(
                np.array([index]), tuple(structures.from_python(member, member_type, f"{where}[{index}]")), False
            )
            for index, member in enumerate(members)
        ]
        return cls(member_type, singles)

    @classmethod
    def from_columns(cls, member_type: Any, columns: Any, where: str = "value") -> "ClientValues":
        """Builds the sequence from arrays nested as in a member, each with an additional first axis of clients.

        Raises:
          TypeError: columns do not match `member_type`, or have different lengths.
        """
        stacked_type = structures.with_client_axis(member_type)
        leaves = tuple(structures.from_python(columns, stacked_type, where))
        sizes: set[Any] = {leaf.shape[0] for leaf in leaves}
        if len(sizes) != 1:
            raise TypeError(f"{where}: expected columns of one length, not of {sorted(sizes)}")
        return cls(member_type, [ClientGroup(np.arange(sizes.pop()), leaves, True)])

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._size))]
        return self._to_python(map(_to_numpy, self.leaves_of(range(self._size)[index])))

    @functools.cached_property
    def _to_python(self) -> Callable[[Iterator[Any]], Any]:
        return structures.build_container(self.member_type)

    def columns(self) -> Any:
        """Returns all members at once: NumPy arrays with a first axis of clients, nested as in a member.

        Raises:
          ValueError: the clients' values have different shapes, or there are no clients.
        """
        if not self._size:
            raise ValueError("there are no clients whose values could be stacked")
        if len(set(self.shapes())) > 1:
            raise ValueError("clients' values have different shapes: read them client by client")
        everyone = _stack(self._arrangement, np.arange(self._size))
        return self._to_python(map(_to_numpy, everyone.leaves))

    @property
    def groups(self) -> Sequence[ClientGroup]:
        """Groups in which the values are currently stored."""
        return self._arrangement.groups

    @property
    def may_differ_in_shape(self) -> bool:
        """False if all clients' values are known to have equal shapes."""
        return len(self.groups) > 1

    def with_type(self, member_type: Any) -> "ClientValues":
        """Returns the same values with another type of one client's value, which has the same leaves."""
        return ClientValues(member_type, self.groups)

    def copy(self) -> "ClientValues":
        """Returns an object with the same values, which can be arranged independently of this one; copies no tensor."""
        copied = ClientValues(self.member_type, self.groups)
        # This also shares the table of clients' places, if it exists already.
        copied.keep_like(self)
        return copied

    def keep_like(self, other: "ClientValues") -> None:
        """Adopts the groups of `other`, an object that must have the same values."""
        self._arrangement = other._arrangement

    def leaves_of(self, index: int) -> tuple[tf.Tensor, ...]:
        """Returns one client's leaves, without an axis of clients."""
        return self._arrangement.leaves_of(index)

    def separate(self) -> None:
        """Arranges the values as one group per client."""
        groups = self.groups
        if any(group.stacked for group in groups):
            self._arrangement = _Arrangement(tuple(single for group in groups for single in _separated(group)))

    def stack(self) -> "ClientValues":
        """Arranges the values as stacks of clients with equal shapes; returns itself."""
        self.arrange([np.array(indices) for indices in same_shapes([self])])
        return self

    def arrange(self, partition: Sequence[np.ndarray]) -> None:
        """Arranges the values as one stack for each array of client indices in `partition`."""
        kept = self._arrangement
        if len(kept.groups) == len(partition) and all(
            group.stacked and np.array_equal(group.indices, wanted)
            for group, wanted in zip(kept.groups, partition, strict=True)
        ):
            return
        self._arrangement = _Arrangement(tuple(_stack(kept, indices) for indices in partition))

    def select(self, clients: Sequence[int] | np.ndarray) -> "ClientValues":
        """Returns the values of the given clients, in the given order."""
        places = {int(client): place for place, client in enumerate(clients)}
        return ClientValues(self.member_type, [part for group in self.groups for part in _part(group, places)])

    def replace(self, clients: Sequence[int] | np.ndarray, values: "ClientValues") -> "ClientValues":
        """Returns a new sequence, in which `values` replace the values of `clients`, in the order of `clients`."""
        others = {client: client for client in set(range(self._size)) - set(clients)}
        kept = [part for group in self.groups for part in _part(group, others)]
        new = [dataclasses.replace(group, indices=np.asarray(clients)[group.indices]) for group in values.groups]
        return ClientValues(self.member_type, [*kept, *new])

    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Returns, for every client, the shapes of the leaves whose type has an unknown dimension."""
        open_leaves = [
            number
            for number, spec in enumerate(structures.leaf_specs(self.member_type))
            if not spec.shape.is_fully_defined()
        ]
        shapes: list[Any] = [()] * self._size
        for group in self.groups:
            start = 1 if group.stacked else 0
            shape = tuple(tuple(group.leaves[number].shape[start:]) for number in open_leaves)
            for index in group.indices:
                shapes[index] = shape
        return shapes


def same_shapes(values: Iterable[ClientValues]) -> list[list[int]]:
    """Groups the indices of clients that have equal shapes in each of `values`; groups are ordered by first client."""
    all_values = list(values)
    # The clients of one group have equal shapes.
    divided = [own for own in all_values if own.may_differ_in_shape]
    if not divided:
        everyone = list(range(max(map(len, all_values), default=0)))
        return [everyone] if everyone else []
    groups: dict[Any, list[int]] = {}
    for index, shapes in enumerate(zip(*(own.shapes() for own in divided), strict=True)):
        groups.setdefault(shapes, []).append(index)
    return list(groups.values())


def _stack(arrangement: _Arrangement, indices: np.ndarray) -> ClientGroup:
    for group in arrangement.groups:
        if group.stacked and np.array_equal(group.indices, indices):
            return group
    if not any(group.stacked for group in arrangement.groups):
        rows = [arrangement.leaves_of(int(index)) for index in indices]
        return ClientGroup(indices, tuple(tf.stack(column) for column in zip(*rows, strict=True)), True)
    involved = [group for group in arrangement.groups if np.isin(group.indices, indices).any()]
    present = np.concatenate([group.indices for group in involved])
    order = np.argsort(present)
    rows = order[np.searchsorted(present, indices, sorter=order)]
    columns = zip(*(_with_client_axis(group) for group in involved), strict=True)
    leaves = [column[0] if len(column) == 1 else tf.concat(column, axis=0) for column in columns]
    if np.array_equal(rows, np.arange(len(present))):
        return ClientGroup(indices, tuple(leaves), True)
    return ClientGroup(indices, tuple(tf.gather(leaf, rows) for leaf in leaves), True)


def _part(group: ClientGroup, places: dict[int, int]) -> list[ClientGroup]:
    """Returns a list with the group of those clients that have a new place; empty if there are none."""
    rows = [row for row, index in enumerate(group.indices) if int(index) in places]
    if not rows:
        return []
    indices = np.array([places[int(group.indices[row])] for row in rows])
    if len(rows) == len(group.indices):
        return [dataclasses.replace(group, indices=indices)]
    return [ClientGroup(indices, tuple(tf.gather(leaf, rows) for leaf in group.leaves), True)]


def _with_client_axis(group: ClientGroup) -> tuple[tf.Tensor, ...]:
    return group.leaves if group.stacked else tuple(leaf[tf.newaxis] for leaf in group.leaves)


def _separated(group: ClientGroup) -> list[ClientGroup]:
    if not group.stacked:
        return [group]
    columns = [tf.unstack(leaf) for leaf in group.leaves]
    rows = zip(*columns, strict=True) if columns else iter([()] * len(group.indices))
    return [ClientGroup(np.array([index]), row, False) for index, row in zip(group.indices, rows, strict=True)]


def _to_numpy(leaf: Any) -> Any:
    # Strings become bytes when results are returned; data sets stay as they are.
    return leaf if leaf.dtype in (tf.variant, tf.string) else leaf.numpy()
