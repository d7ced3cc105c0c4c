"""Describes calls of computations and requests to workers; the descriptions are sent to workers, by pickle."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientGroup, ClientValues
from tff_pdp.engines.far_values import Recipe
from tff_pdp.engines.inprocess.parts import Chunk, Mode, Node

# Leaves as NumPy arrays.
Arrays = list[np.ndarray]


class Host(Protocol):
    """Builds, at a worker, what recipes and calls refer to."""

    def knows(self, key: str) -> bool:
        """Checks if the worker has the setup with this digest."""
        ...

    def learn(self, key: str, setup: Any) -> None:
        """Keeps a setup under its digest."""
        ...

    def computation(self, address: Any) -> Any:
        """Returns the TFF computation at an address."""
        ...


class Directory(Protocol):
    """Knows, in the head's process, how workers find computations."""

    def address_of(self, computation: Any) -> Any:
        """Returns a computation's address: an object with a `setup_key`, and a name; None for no address."""
        ...

    def setup(self, key: str) -> Any:
        """Returns the setup with a digest, for `Host.learn`."""
        ...


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Sets how many workers there are, and where.

    Attributes:
      address: address of a Ray cluster; empty for a cluster on this machine, which ends with this process.
      num_workers: number of workers.
      cpus_per_worker: number of cores of each worker.
      gpus_per_worker: number of GPUs of each worker; workers without a GPU compute on the CPU.
    """

    address: str = ""
    num_workers: int = 1
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0

    @property
    def device(self) -> str:
        """The device that workers compute on."""
        return "gpu" if self.gpus_per_worker else "cpu"


@dataclasses.dataclass(frozen=True)
class LevelInputs:
    """Values that the server sends to all clients in one level.

    Attributes:
      shared: leaves of the server's values, in the order of the level's step.
      sums: sums before any client is added.
    """

    shared: Arrays
    sums: "list[np.ndarray | Filled]"


@dataclasses.dataclass(frozen=True)
class Filled:
    """An array whose entries are all equal, as sums are at their start."""

    value: Any
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a computation, as far as workers compute it.

    A call has everything that a worker needs to compute any part again.

    Attributes:
      number: number of the call, which no other call of the same engine has.
      address: address of the computation, for `Host.computation`.
      fingerprint: fingerprint of the computation, which must be equal at the worker.
      mode: way in which clients are computed: one by one, or as stacks.
      parts: parts of the clients; a part is a list of calls, each an array of positions of clients.
      clients_per_call: largest number of clients that a worker computes at a time.
      own: by name of the argument, recipe of the clients' values, and the clients' positions in the recipe's order.
      setups: by digest, references to the setups that addresses and recipes need, in Ray's object store.
      levels: by number of the level, a reference to `LevelInputs` in Ray's object store; the caller adds levels.
    """

    number: int
    address: Any
    fingerprint: str
    mode: Mode
    parts: Sequence[Sequence[Chunk]]
    clients_per_call: int
    own: Mapping[str, tuple[Recipe, np.ndarray]]
    setups: Mapping[str, Any]
    levels: dict[int, Any] = dataclasses.field(default_factory=dict)


class Writer(Protocol):
    """Stores the new states of a part's clients, at a worker."""

    def write(self, part: int, leaves: Arrays) -> None:
        """Writes the states of one part's clients, in the part's order: an array `[clients, ...]` for each leaf."""
        ...

    def key(self, part: int) -> tuple[Any, ...]:
        """Returns the key under which the worker keeps the states: store, then others, and last the part's number.

        A recipe with a method `key_of(rows)` asks for the states by this key.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AddUp:
    """Asks for the sums of some parts."""


@dataclasses.dataclass(frozen=True)
class Bring:
    """Asks for clients' values by name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Keep:
    """Asks to store clients' values, by name, with a writer."""

    name: str
    writer: Writer


Request = AddUp | Bring | Keep
Answer = list[tuple[Node, Arrays]] | list[tuple[Chunk, Arrays, bool]] | None


@dataclasses.dataclass(frozen=True)
class ByValue:
    """A recipe that contains the values themselves, for values that are in no store.

    Attributes:
      groups: positions, leaves, and whether the leaves have an axis of clients, for each group of the values.
    """

    groups: "tuple[tuple[Chunk, Arrays, bool], ...]" = dataclasses.field(hash=False)
    is_lasting = False

    @classmethod
    def of(cls, values: ClientValues) -> "ByValue":
        """Copies the values of all clients."""
        return cls(
            tuple((group.indices, [leaf.numpy() for leaf in group.leaves], group.stacked) for group in values.groups)
        )

    def load(self, host: Any, rows: np.ndarray, member_type: Any) -> ClientValues:
        """Returns the values of some clients."""
        return ClientValues(member_type, groups_of(self.groups)).select(rows)


def groups_of(answers: Sequence[tuple[Chunk, list[np.ndarray], bool]]) -> list[ClientGroup]:
    """Returns the groups of clients' values that workers have sent."""
    return [ClientGroup(chunk, tuple(map(tf.constant, leaves)), stacked) for chunk, leaves, stacked in answers]
