"""Stores clients' states between rounds, in memory or on disk.

All silos take part in every round, so their states remain in the engine, as `ClientValues`. Users take part in a
round only as members of its cohort, so users' states are in a store, and a round reads and writes only the states of
the cohort. If workers compute the clients, the workers read and write all states themselves, as files.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp.engines.client_values import ClientValues
from tff_pdp.files import discard
from tff_pdp.training.client_store.state_files import StateFiles, is_state_files
from tff_pdp.training.client_store.store import ClientStore, Places

# Clients whose states are copied together; memory grows with this number.
_CLIENTS_AT_A_TIME = 4096


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


ClientStates = Sequence[Any] | ClientStore | StateFiles | MemoryStore


def is_store(states: ClientStates) -> bool:
    """Checks if states are in a store, from which each round reads the states of its cohort."""
    return not isinstance(states, Sequence)


def select_states(states: Any, places: Places, state_type: Any) -> Sequence[Any]:
    """Returns the states of the clients at `places`, in that order, in the form that computations take as arguments."""
    if isinstance(states, StateFiles):
        return states.describe(places, state_type)
    if is_store(states):
        return from_columns(state_type, states.read(places), len(places))
    if np.array_equal(places, np.arange(len(states))):
        return states
    # Engines also take and return lists.
    return states.select(places) if isinstance(states, ClientValues) else [states[place] for place in places]


def replace_states(states: Any, round_number: int, places: Places, new: Sequence[Any]) -> ClientStates:
    """Returns all states, with the states of the clients at `places` replaced by `new`, the results of a round."""
    if isinstance(states, StateFiles):
        return states.write(round_number, places, new)
    if is_store(states):
        return replace_columns(states, round_number, places, to_columns(new))
    if len(places) == len(states):
        return new
    if isinstance(states, ClientValues) and isinstance(new, ClientValues):
        return states.replace(places, new)
    replaced = dict(zip(places, new, strict=True))
    return [replaced.get(place, state) for place, state in enumerate(states)]


def replace_columns(store: Any, round_number: int, places: Places, columns: Any) -> ClientStates:
    """Returns a store after a round, with the states `columns`, a nest of arrays, of the clients at `places`."""
    if isinstance(store, StateFiles):
        return store.write_part(round_number, 0, np.asarray(places, np.int64), columns)
    store.write(round_number, places, columns)
    return store


def open_states(folder: Path, round_number: int | None = None, attempt: int = 0) -> ClientStore | StateFiles:
    """Opens the store in a folder; `round_number` and `attempt` are as in `StateFiles.open`.

    Raises:
      DataError: the store is missing, damaged, or open already.
    """
    moved = _moved(folder)
    if not folder.exists() and is_state_files(moved):
        # The command was killed in the middle of `moved_to_files`.
        moved.rename(folder)
    if is_state_files(folder):
        return StateFiles.open(folder, round_number, attempt)
    store = ClientStore.open(folder)
    if round_number is not None:
        store.rewind(round_number)
    return store


def _moved(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.moved")


def moved_to_files(
    states: ClientStates, folder: Path, default: Any, round_number: int, root: str, attempt: int
) -> StateFiles:
    """Copies states that were kept without workers to a new store of files, which replaces the store in `folder`.

    If the process is killed meanwhile, `open_states` finds the old store or the new one.
    """
    staging = _moved(folder)
    shutil.rmtree(staging, ignore_errors=True)
    num_clients = len(states) if isinstance(states, Sequence) else states.num_clients
    files = StateFiles.create(staging, default, num_clients, root=root)
    for number, places in enumerate(places_in_parts(num_clients, _CLIENTS_AT_A_TIME)):
        files = files.write_part(round_number, number, places, to_columns(states, places))
    files.save()
    close_states(states)
    discard(folder)
    staging.rename(folder)
    return StateFiles.open(folder, round_number, attempt)


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


def to_columns(values: Any, places: Places | None = None) -> Any:
    """Stacks clients' values into columns, a nest of arrays `[clients, ...]`; the inverse of `from_columns`.

    `values` may be a store. `places` are the clients' places, by default all.
    """
    if is_store(values):
        return values.read(range(values.num_clients) if places is None else places)
    if places is not None:
        values = values.select(places) if isinstance(values, ClientValues) else [values[place] for place in places]
    if isinstance(values, ClientValues) and len(values.groups[0].leaves):
        return values.columns()
    return tf.nest.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *values)
