"""One shard of a client store: every kept version of its clients' states, by place and round."""

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tff_pdp.errors import DataError
from tff_pdp.runtime.client_store_database import Database

_SCHEMA = """
CREATE TABLE states (place INTEGER, round_number INTEGER, state BLOB, checksum INTEGER);
CREATE UNIQUE INDEX states_by_place ON states (place, round_number);
CREATE INDEX states_by_round ON states (round_number, place);
CREATE TABLE pruned (round_number INTEGER);
INSERT INTO pruned VALUES (0);
"""
_NEWEST = """
SELECT state, checksum FROM states WHERE place = ? AND round_number <= ? ORDER BY round_number DESC LIMIT 1
"""
_INSERT = "INSERT INTO states VALUES (?, ?, ?, ?)"
_DELETE_AFTER = "DELETE FROM states WHERE round_number > ?"
# Looks only at clients who were written since the last time, not at all there are.
_DELETE_SUPERSEDED = """
DELETE FROM states WHERE rowid IN (
  SELECT older.rowid FROM states AS newer
  JOIN states AS older ON older.place = newer.place AND older.round_number < newer.round_number
  WHERE newer.round_number > ? AND newer.round_number <= ?)
"""


class Shard:
    """An open shard. It knows nothing of which rounds count: its callers say so.

    Each method that changes something does it in one transaction, and raises `DataError` where the file is damaged or
    the disk is full.
    """

    def __init__(self, path: Path):
        """Opens a shard; raises as `Database` does."""
        self._database = Database(path)

    @staticmethod
    def create(path: Path) -> None:
        """Makes an empty one."""
        Database.create(path, _SCHEMA).close()

    def read(self, places: Sequence[int], round_number: int) -> list[bytes | None]:
        """The newest state of each client as of a round, None where none was written.

        Raises:
          DataError: a state is not what was written.
        """
        with self._database.transaction() as connection:
            found = [connection.execute(_NEWEST, (place, round_number)).fetchone() for place in places]
        where = f"{self._database.path}: client"
        return [version and checked(version, f"{where} {place}") for place, version in zip(places, found, strict=True)]

    def write(self, committed_round: int, round_number: int, states: Iterable[tuple[int, bytes]]) -> None:
        """Adds one round's states by place, and removes what failed attempts have left after the committed round."""
        with self._database.transaction() as connection:
            connection.execute(_DELETE_AFTER, (committed_round,))
            connection.executemany(_INSERT, ((place, round_number, *with_checksum(state)) for place, state in states))

    def delete_after(self, round_number: int) -> None:
        """Removes the states of all later rounds."""
        with self._database.transaction() as connection:
            connection.execute(_DELETE_AFTER, (round_number,))

    def prune(self, oldest_round: int) -> None:
        """Removes states that are older than their client's newest as of that round."""
        with self._database.transaction() as connection:
            (pruned,) = connection.execute("SELECT round_number FROM pruned").fetchone()
            connection.execute(_DELETE_SUPERSEDED, (pruned, oldest_round))
            connection.execute("UPDATE pruned SET round_number = ?", (oldest_round,))

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._database.close()


def with_checksum(state: bytes) -> tuple[bytes, int]:
    """A state and what tells whether it is still the same: SQLite notices damage to its own structures alone."""
    return state, zlib.crc32(state)


def checked(found: Sequence, where: str) -> bytes:
    """The state out of what `with_checksum` made.

    Raises:
      DataError: it has changed.
    """
    state, checksum = found
    if not isinstance(state, bytes) or zlib.crc32(state) != checksum:
        raise DataError(f"{where}: the state is damaged")
    return state
