"""Stores the states of many clients on disk, for rounds in which only a small cohort takes part.

The states are in SQLite, which reliably handles crashes, torn writes and free space. Each shard is a database (a
client's shard is its place modulo the number of shards); a further database has the number of the current round. A
round is first written to every shard, in one transaction per shard, and becomes current when the number of the current
round is updated. One transaction over attached databases would lose atomicity if the folder were moved, because SQLite
finds the parts of an interrupted transaction by absolute paths.
"""

import contextlib
import json
import operator
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from tff_pdp.errors import DataError
from tff_pdp.files import sync
from tff_pdp.training.client_store.layout import StateLayout, with_client_axis
from tff_pdp.training.client_store.shard import SHARD_SCHEMA, Database, Shard, checksum

Places = Sequence[int] | np.ndarray

FORMAT_VERSION = 2
# Format 1; opening a store converts it to the present format.
_WITHOUT_CHECKSUMS = 1
STORE_FILE = "store.sqlite"
_SCHEMA = """
CREATE TABLE store (format_version INTEGER, num_clients INTEGER, num_shards INTEGER, layout TEXT,
                    default_state BLOB, checksum INTEGER);
CREATE TABLE progress (round_number INTEGER, oldest_round INTEGER, checksum INTEGER);
INSERT INTO progress VALUES (0, 0, NULL);
"""
_UPDATE_PROGRESS = "UPDATE progress SET round_number = ?, oldest_round = ?, checksum = ?"
_SELECT_CONTENTS = "SELECT num_clients, num_shards, layout, default_state, checksum FROM store"


class Contents(NamedTuple):
    """The constant properties of a store."""

    num_clients: int
    num_shards: int
    layout: str
    default_state: bytes

    @property
    def checksum(self) -> int:
        """The checksum that is stored beside these fields."""
        description = [FORMAT_VERSION, self.num_clients, self.num_shards, self.layout]
        return checksum(self.default_state, json.dumps(description).encode())


class Progress(NamedTuple):
    """The store's current round, and the oldest round that `rewind` can return to."""

    round_number: int
    oldest_round: int

    @property
    def checksum(self) -> int:
        """The checksum that is stored beside these fields."""
        return checksum(f"{self.round_number!r} {self.oldest_round!r}".encode())


class ClientStore:
    """The states of `num_clients` clients, addressed by their places 0 to `num_clients - 1`.

    A state is a nest of arrays, of the same structure, shapes and dtypes for all clients. States of several clients
    are passed as columns: a nest of the same structure, whose arrays have a leading axis of clients.

    Guarantee: either all states of a round are stored or none, even if the process or the machine stops. Once `write`
    has returned, the states outlast a power cut. Only the owner can read the files: states are computed from raw data.
    Assumes: the file system supports locks, and writes files to disk on request.

    Time and memory grow with the number of clients that are read or written. Other clients cost disk space, once they
    have been written. Methods may be called from any thread, and wait for each other. An open store cannot be opened a
    second time, not even for reading. If a file or the disk fails, any method raises a `DataError` that names the file.

    Attributes:
      folder: folder of the files.
      num_clients: number of clients.
    """

    def __init__(self, folder: Path, store: Database, contents: Contents, shards: Sequence[Shard]):
        """Wraps open files; callers use `create` or `open` instead."""
        self.folder = folder
        self.num_clients = contents.num_clients
        self._layout = StateLayout.from_json(contents.layout)
        self._default_row = np.frombuffer(contents.default_state, np.uint8)
        self._store = store
        self._shards = shards
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, folder: Path, default: Any, num_clients: int, *, num_shards: int = 8) -> "ClientStore":
        """Creates a store and opens the store.

        Args:
          folder: folder of the new store; must not exist before, and exists once the store is complete.
          default: state that clients have before their first write. The state is a nest (mappings, possibly nested or
            empty) of arrays of numbers or booleans, below 1 GB in total.
          num_clients: number of clients, at least 1.
          num_shards: number of files for the states; each file costs a few flushes to disk per round.

        Raises:
          DataError: the folder exists.
          TypeError: `default` is not a nest of arrays of numbers or booleans.
          ValueError: `num_clients` or `num_shards` is below 1.
        """
        if num_clients < 1 or num_shards < 1:
            raise ValueError(f"num_clients and num_shards must be at least 1, not {num_clients} and {num_shards}")
        layout = StateLayout.of_state(default)
        if folder.exists():
            raise DataError(f"{folder} exists already: open the store, or remove the folder to start again")
        staging = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700, parents=True)
        for number in range(num_shards):
            Shard.create(shard_path(staging, number), SHARD_SCHEMA).close()
        with contextlib.closing(Database.create(staging / STORE_FILE, _SCHEMA)) as store:
            default_state = layout.to_rows(with_client_axis(default), 1).tobytes()
            contents = Contents(num_clients, num_shards, layout.to_json(), default_state)
            with store.transaction() as connection:
                row = (FORMAT_VERSION, *contents, contents.checksum)
                connection.execute("INSERT INTO store VALUES (?, ?, ?, ?, ?, ?)", row)
                _update_progress(connection, Progress(0, 0))
        sync(staging)
        staging.rename(folder)
        sync(folder.parent)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> "ClientStore":
        """Opens a store at the last round that was written in full; removes the states of an interrupted round.

        Raises:
          DataError: the store is missing, incomplete, damaged, of another format version, or open already.
        """
        path = folder / STORE_FILE
        if not path.is_file():
            raise DataError(f"{folder}: there is no client store, or none that was finished ({STORE_FILE} is missing)")
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(contextlib.closing(Database(path)))
            with store.transaction() as connection:
                contents, progress, is_old = read_numbers(connection, path)
                if is_old:
                    _add_checksums(connection, contents, progress)
            shards = [
                stack.enter_context(contextlib.closing(Shard(shard_path(folder, number))))
                for number in range(contents.num_shards)
            ]
            opened = cls(folder, store, contents, shards)
            opened._delete_uncommitted()
            stack.pop_all()
        return opened

    @property
    def round_number(self) -> int:
        """The current round: the last round written, or an earlier round after `rewind`; 0 for a new store."""
        with self._use():
            return self._progress().round_number

    def read(self, places: Places) -> Any:
        """Reads the current states of the given clients.

        Args:
          places: places of the clients, in any order; a place may be repeated.

        Returns:
          Columns: a nest of new arrays `[len(places), ...]`, in the order of `places`.

        Raises:
          ValueError: a place does not exist.
        """
        indices = self._indices(places)
        rows = np.repeat(self._default_row[np.newaxis], len(indices), axis=0)
        with self._use():
            round_number = self._progress().round_number
            for shard, positions in self._by_shard(indices):
                states = shard.read(indices[positions].tolist(), round_number)
                for position, state in zip(positions, states, strict=True):
                    if state is not None:
                        rows[position] = np.frombuffer(state, np.uint8)
        return self._layout.to_columns(rows)

    def write(self, round_number: int, places: Places, columns: Any) -> None:
        """Writes the given clients' new states of one round; a failed or interrupted call writes no state.

        Args:
          round_number: number of the round, larger than `ClientStore.round_number`; numbers may be skipped.
          places: places of the clients, without repetition.
          columns: a nest of arrays `[len(places), ...]`, in the order of `places`.

        Raises:
          TypeError: `columns` have another structure, shape or dtype than the default state.
          ValueError: the round is not later than the current round, or a place does not exist or occurs twice.
        """
        round_number = operator.index(round_number)
        indices = self._indices(places)
        distinct, counts = np.unique(indices, return_counts=True)
        if len(distinct) < len(indices):
            raise ValueError(f"places occur more than once: {distinct[counts > 1][:10].tolist()}")
        rows = self._layout.to_rows(columns, len(indices))
        with self._use():
            progress = self._progress()
            committed = progress.round_number
            if round_number <= committed:
                raise ValueError(f"round {round_number} is not later than the store's round {committed}")
            for shard, positions in self._by_shard(indices):
                states = ((int(indices[position]), rows[position].tobytes()) for position in positions)
                shard.write(committed, round_number, states)
            self._set_progress(progress._replace(round_number=round_number))

    def rewind(self, round_number: int) -> None:
        """Returns to an earlier round and removes the states of later rounds; does nothing if no round is later.

        Raises:
          DataError: states of that round have been pruned.
        """
        round_number = operator.index(round_number)
        with self._use():
            progress = self._progress()
            if round_number < progress.oldest_round:
                raise DataError(
                    f"{self.folder}: cannot return to round {round_number}: "
                    f"no states from before round {progress.oldest_round} are kept"
                )
            if round_number < progress.round_number:
                self._set_progress(progress._replace(round_number=round_number))
                self._delete_uncommitted()

    def prune(self, oldest_round: int) -> None:
        """Deletes all states that are not needed by a `rewind` to `oldest_round` or to a later round.

        The time grows with the amount written since the last call. Freed space is reused; files do not shrink.
        """
        with self._use():
            progress = self._progress()
            oldest_round = max(progress.oldest_round, min(operator.index(oldest_round), progress.round_number))
            # Before anything is deleted: the store cannot return to a round that is partly deleted.
            self._set_progress(progress._replace(oldest_round=oldest_round))
            for shard in self._shards:
                shard.prune(oldest_round)

    def close(self) -> None:
        """Closes the files, so that the store can be opened again; may be called repeatedly."""
        with self._lock:
            self._closed = True
            for file in (*self._shards, self._store):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.folder}: the client store is closed")
            yield

    def _progress(self) -> Progress:
        # Read each time: after a failure, the file alone knows whether the round counts.
        with self._store.transaction() as connection:
            return _read_progress(connection, self._store.path)

    def _set_progress(self, progress: Progress) -> None:
        with self._store.transaction() as connection:
            _update_progress(connection, progress)

    def _delete_uncommitted(self) -> None:
        round_number = self._progress().round_number
        for shard in self._shards:
            shard.delete_after(round_number)

    def _indices(self, places: Places) -> np.ndarray:
        """Returns the places as int64 `[len(places)]`."""
        indices = np.array([operator.index(place) for place in places], np.int64)
        outside = indices[(indices < 0) | (indices >= self.num_clients)]
        if len(outside):
            raise ValueError(f"clients' places must be 0 to {self.num_clients - 1}, not {outside[:10].tolist()}")
        return indices

    def _by_shard(self, indices: np.ndarray) -> Iterator[tuple[Shard, np.ndarray]]:
        """Yields every shard, with the positions in `indices` of the clients that belong to it."""
        for number, shard in enumerate(self._shards):
            yield shard, np.flatnonzero(indices % len(self._shards) == number)


def shard_path(folder: Path, number: int) -> Path:
    """Returns the file of a shard."""
    return folder / f"shard_{number:03d}.sqlite"


def read_numbers(connection: sqlite3.Connection, path: Path) -> tuple[Contents, Progress, bool]:
    """Reads a store's contents and progress, and whether the store has format 1.

    Raises:
      DataError: a number is damaged, or the store has a newer format.
    """
    (version,) = connection.execute("SELECT format_version FROM store").fetchone() or (None,)
    if version not in (_WITHOUT_CHECKSUMS, FORMAT_VERSION):
        raise DataError(f"{path}: client store of format {version}; only {FORMAT_VERSION} and below can be read")
    is_old = version == _WITHOUT_CHECKSUMS
    try:
        *fields, expected = connection.execute(_SELECT_CONTENTS).fetchone()
        contents = Contents(*fields)
        if (checksum(contents.default_state) if is_old else contents.checksum) != expected:
            raise ValueError("its checksum differs")
        if len(contents.default_state) != StateLayout.from_json(contents.layout).row_bytes:
            raise ValueError("the default state does not fit the layout")
    # NumPy parses some texts that might be dtypes as Python's.
    except (TypeError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: the client store is damaged ({error})") from None
    return contents, _read_progress(connection, path, is_old=is_old), is_old


def _read_progress(connection: sqlite3.Connection, path: Path, *, is_old: bool = False) -> Progress:
    found = connection.execute(f"SELECT round_number, oldest_round{'' if is_old else ', checksum'} FROM progress")
    numbers = found.fetchone()
    progress = numbers and Progress(*numbers[:2])
    if not progress or (not is_old and progress.checksum != numbers[2]):
        raise DataError(f"{path}: the round number is damaged")
    return progress


def _add_checksums(connection: sqlite3.Connection, contents: Contents, progress: Progress) -> None:
    """Converts a store of format 1 to this format; the states keep their checksums."""
    connection.execute("ALTER TABLE progress ADD COLUMN checksum INTEGER")
    _update_progress(connection, progress)
    connection.execute("UPDATE store SET format_version = ?, checksum = ?", (FORMAT_VERSION, contents.checksum))


def _update_progress(connection: sqlite3.Connection, progress: Progress) -> None:
    connection.execute(_UPDATE_PROGRESS, (*progress, progress.checksum))
