"""Stores clients' states between rounds, in memory or on disk.

All silos take part in every round, so their states remain in the engine, as `ClientValues`. Users take part in a
round only as members of its cohort, so users' states are in a store, and a round reads and writes only the states of
the cohort.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.training.client_store.store import ClientStore, Places


class MemoryStore:
    """A store of many clients' states in memory, with the methods `read` and `write` of `ClientStore`."""

    def __init__(self, default: Any, num_clients: int):
        """Sets the state of every client to `default`, a nest of arrays."""
        self.num_clients = num_clients
        self._columns = tf.nest.map_structure(lambda leaf: np.repeat(np.asarray(leaf)[None], num_clients, 0), default)

    def read(self, places: Places) -> Any:
        """Returns copies of the states of the clients at `places`: a nest of arrays `[len(places), ...]`."""
        chosen = np.asarray(places, np.int64)
        return tf.nest.map_structure(lambda column: column[chosen], self._columns)

    def write(self, round_number: int, places: Places, columns: Any) -> None:
        """Replaces the states of the clients at `places` by `columns`, a nest of arrays `[len(places), ...]`."""
        del round_number
        chosen = np.asarray(places, np.int64)

        def replace(kept: np.ndarray, new: np.ndarray) -> None:
            kept[chosen] = new

        tf.nest.map_structure(replace, self._columns, columns)


ClientStates = Sequence[Any] | ClientStore | MemoryStore


def is_store(states: ClientStates) -> bool:
    """Checks if states are in a store, from which each round reads the states of its cohort."""
    return not isinstance(states, Sequence)


def select_states(states: Any, places: Places, state_type: Any) -> Sequence[Any]:
    """Returns the states of the clients at `places`, in that order, in the form that computations take as arguments."""
    if is_store(states):
        return from_columns(state_type, states.read(places), len(places))
    if np.array_equal(places, np.arange(len(states))):
        return states
    # Engines also take and return lists.
    return states.select(places) if isinstance(states, ClientValues) else [states[place] for place in places]


def replace_states(states: Any, round_number: int, places: Places, new: Sequence[Any]) -> ClientStates:
    """Returns all states, with the states of the clients at `places` replaced by `new`, the results of a round."""
    if is_store(states):
        states.write(round_number, places, to_columns(new))
        return states
    if len(places) == len(states):
        return new
    if isinstance(states, ClientValues) and isinstance(new, ClientValues):
        return states.replace(places, new)
    replaced = dict(zip(places, new, strict=True))
    return [replaced.get(place, state) for place, state in enumerate(states)]


def close_states(states: ClientStates) -> None:
    """Closes the files of states in a store; does nothing for states in memory."""
    if isinstance(states, ClientStore):
        states.close()


def places_in_parts(num_clients: int, size: int) -> Iterator[np.ndarray]:
    """Yields the clients' places 0 to `num_clients - 1`, in arrays of at most `size` places."""
    for start in range(0, num_clients, size):
        yield np.arange(start, min(start + size, num_clients))


def from_columns(member_type: Any, columns: Any, size: int) -> Sequence[Any]:
    """Splits columns (a nest of arrays `[size, ...]`) into the values of `size` clients; the nest may be empty."""
    if tf.nest.flatten(columns) and size:
        return ClientValues.from_columns(member_type, columns)
    return [columns] * size


def to_columns(values: Sequence[Any]) -> Any:
    """Stacks clients' values into columns, a nest of arrays `[clients, ...]`; the inverse of `from_columns`."""
    if isinstance(values, ClientValues) and len(values.groups[0].leaves):
        return values.columns()
    return tf.nest.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *values)
