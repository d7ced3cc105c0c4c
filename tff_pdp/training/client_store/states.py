"""Keeps clients' states from round to round, in memory or in a store.

All silos take part in every round: their states stay where the engine computes, as `ClientValues`. Only a cohort of
users takes part in a round: users' states lie in a store, and a round reads and writes only the cohort's states.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.training.client_store.store import ClientStore, Places


class MemoryStore:
    """States of many clients by their places; a `ClientStore` keeps them on disk, this class only in memory."""

    def __init__(self, default: Any, num_clients: int):
        """Gives every client the same state, a nest of arrays."""
        self.num_clients = num_clients
        self._columns = tf.nest.map_structure(lambda leaf: np.repeat(np.asarray(leaf)[None], num_clients, 0), default)

    def read(self, places: Places) -> Any:
        """Returns copies of some clients' states, in this order: a nest of arrays with a first axis of clients."""
        chosen = np.asarray(places, np.int64)
        return tf.nest.map_structure(lambda column: column[chosen], self._columns)

    def write(self, round_number: int, places: Places, columns: Any) -> None:
        """Replaces some clients' states."""
        del round_number
        chosen = np.asarray(places, np.int64)

        def replace(kept: np.ndarray, new: np.ndarray) -> None:
            kept[chosen] = new

        tf.nest.map_structure(replace, self._columns, columns)


ClientStates = Sequence[Any] | ClientStore | MemoryStore


def is_store(states: ClientStates) -> bool:
    """Checks if states are kept in a store, from which a round reads its cohort's states."""
    return not isinstance(states, Sequence)


def select_states(states: Any, places: Places, state_type: Any) -> Sequence[Any]:
    """Returns the states of some clients, in this order, in the form that computations take."""
    if is_store(states):
        return from_columns(state_type, states.read(places), len(places))
    if np.array_equal(places, np.arange(len(states))):
        return states
    # Engines also take and return lists.
    return states.select(places) if isinstance(states, ClientValues) else [states[place] for place in places]


def replace_states(states: Any, round_number: int, places: Places, new: Sequence[Any]) -> ClientStates:
    """Returns the states after a round, in which some clients' states are replaced."""
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
    """Closes a store's files; states in memory need no closing."""
    if isinstance(states, ClientStore):
        states.close()


def places_in_parts(num_clients: int, size: int) -> Iterator[np.ndarray]:
    """Yields all places, at most `size` at a time."""
    for start in range(0, num_clients, size):
        yield np.arange(start, min(start + size, num_clients))


def from_columns(member_type: Any, columns: Any, size: int) -> Sequence[Any]:
    """Converts columns to the values of `size` clients; the columns may be without any tensor."""
    if tf.nest.flatten(columns) and size:
        return ClientValues.from_columns(member_type, columns)
    return [columns] * size


def to_columns(values: Sequence[Any]) -> Any:
    """Converts clients' values to columns; the inverse of `from_columns`."""
    if isinstance(values, ClientValues) and len(values.groups[0].leaves):
        return values.columns()
    return tf.nest.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *values)
