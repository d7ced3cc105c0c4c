"""Stores one shard of a client store: the versions of the shard's client states, by client place and round.

A shard is one SQLite file, which only its owner can read and only one process at a time can use. Errors name the file.

The settings were measured with rounds of 500 states of 3 KB and of 100 KB. A rollback journal writes new pages once; a
write-ahead log writes new pages twice, and needs shared memory or a separate lock. Tables have a rowid, so that states
are appended and only small indexes are written at random. Without a rowid, states of 100 KB take three times as long to
read and to write. Pages have 16 KiB. With states of 100 KB, pages of 4 KiB take 1.4 times as long to write as pages of
16 KiB, and pages of 64 KiB take 3 times as long to prune. States of 3 KB fill pages of 16 KiB best.

During a lookup, SQLite notices only some damage to a file's structure, and no damage to the content. Each file is
therefore checked in full when it is opened. Each state has a checksum, which also covers its client and its round.
"""

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from tff_pdp.errors import DataError

_PAGE_SIZE = 16384
_SETTINGS = (
    # Until the file is closed, no other process reads or writes it, and no lock is asked for again.
    "locking_mode = EXCLUSIVE",
    "journal_mode = TRUNCATE",
    # A transaction is on disk when its commit returns.
    "synchronous = FULL",
    # A large transaction is flushed once, at its end, and not whenever the cache is full.
    "cache_spill = OFF",
    # Deleted states are no more secret than those beside them; some builds write zeros over them, at a high price.
    "secure_delete = OFF",
)


class Database:
    """An open SQLite file.

    Attributes:
      path: path of the file.
    """

    def __init__(self, path: Path):
        """Opens an existing file, and checks all tables against their indexes, which reads the whole file.

        Raises:
          DataError: the file is missing, not a database, damaged, or in use by another process.
        """
        self.path = path
        with naming_store(path):
            # As a URI, because any other way to open creates a missing file.
            uri = f"{path.absolute().as_uri()}?mode=rw"
            self._connection = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
            with contextlib.ExitStack() as stack:
                stack.callback(self._connection.close)
                for setting in _SETTINGS:
                    self._connection.execute(f"PRAGMA {setting}")
                # An entry that is missing in an index would be read as a state that was never written. The quick check
                # does not compare indexes with tables.
                (found,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
                stack.pop_all()

    @classmethod
    def create(cls, path: Path, schema: str) -> Self:
        """Creates a file with the tables in `schema`, and opens the file.

        Raises:
          DataError: the file cannot be written.
        """
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        database = cls(path)
        with naming_store(path):
            database._connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
            database._connection.executescript(f"BEGIN; {schema} COMMIT;")
        return database

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection; changes are on disk after the `with` block, or undone if the block raises an error.

        Raises:
          DataError: SQLite failed: the file is damaged or in use by another process, or the disk is full.
        """
        with naming_store(self.path):
            try:
                self._connection.execute("BEGIN EXCLUSIVE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # Some failures end the transaction by themselves; what cannot be undone now is undone at the next
                # opening.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._connection.close()


@contextlib.contextmanager
def naming_store(path: Path) -> Iterator[None]:
    """Turns errors of SQLite into `DataError`s that name the file."""
    try:
        yield
    # Python may refuse text and numbers of a damaged file.
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        in_use = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
        reason = "it is in use by another process or object" if in_use else " ".join(str(error).split())
        raise DataError(f"{path}: the client store cannot be used: {reason}") from None


SHARD_SCHEMA = """
CREATE TABLE states (place INTEGER, round_number INTEGER, state BLOB, checksum INTEGER);
CREATE UNIQUE INDEX states_by_place ON states (place, round_number);
CREATE INDEX states_by_round ON states (round_number, place);
CREATE TABLE pruned (round_number INTEGER);
INSERT INTO pruned VALUES (0);
"""
_NEWEST = """
SELECT round_number, state, checksum FROM states
WHERE place = ? AND round_number <= ? ORDER BY round_number DESC LIMIT 1
"""
_INSERT = "INSERT INTO states VALUES (?, ?, ?, ?)"
_DELETE_AFTER = "DELETE FROM states WHERE round_number > ?"
# Looks only at clients that were written since the last pruning, not at all clients.
_DELETE_SUPERSEDED = """
DELETE FROM states WHERE rowid IN (
  SELECT older.rowid FROM states AS newer
  JOIN states AS older ON older.place = newer.place AND older.round_number < newer.round_number
  WHERE newer.round_number > ? AND newer.round_number <= ?)
"""


class Shard(Database):
    """An open shard; callers keep track of which rounds are complete.

    Each method that writes uses one transaction, and raises `DataError` if the file is damaged or the disk is full.
    Clients are addressed by their places.
    """

    def read(self, places: Sequence[int], round_number: int) -> list[bytes | None]:
        """Reads each client's newest state of the rounds up to `round_number`; None for a client without such a state.

        Raises:
          DataError: a state is damaged.
        """
        with self.transaction() as connection:
            found = [connection.execute(_NEWEST, (place, round_number)).fetchone() for place in places]
        return [version and self._state(place, *version) for place, version in zip(places, found, strict=True)]

    def write(self, committed_round: int, round_number: int, states: Iterable[tuple[int, bytes]]) -> None:
        """Adds a round's states, as pairs `(place, state)`, after removing all states later than `committed_round`."""
        with self.transaction() as connection:
            connection.execute(_DELETE_AFTER, (committed_round,))
            rows = (
                (place, round_number, state, checksum(state, state_label(place, round_number)))
                for place, state in states
            )
            connection.executemany(_INSERT, rows)

    def delete_after(self, round_number: int) -> None:
        """Removes the states of all rounds after `round_number`."""
        with self.transaction() as connection:
            connection.execute(_DELETE_AFTER, (round_number,))

    def prune(self, oldest_round: int) -> None:
        """Removes all states that are not needed to read states of `oldest_round`, or of a later round."""
        with self.transaction() as connection:
            (pruned,) = connection.execute("SELECT round_number FROM pruned").fetchone()
            connection.execute(_DELETE_SUPERSEDED, (pruned, oldest_round))
            connection.execute("UPDATE pruned SET round_number = ?", (oldest_round,))

    def _state(self, place: int, round_number: int, state: bytes, expected: int) -> bytes:
        is_whole = isinstance(state, bytes) and (
            checksum(state, state_label(place, round_number)) == expected
            # States of format 1, in stores that are continued, have the checksum of their bytes alone.
            or checksum(state) == expected
        )
        if not is_whole:
            raise DataError(f"{self.path}: client {place}: the state is damaged")
        return state


def checksum(content: bytes, label: bytes = b"") -> int:
    """Computes the CRC-32 of `label + content`."""
    return zlib.crc32(content, zlib.crc32(label))


def state_label(place: int, round_number: int) -> bytes:
    """Returns the label of a state for `checksum`: the client's place and the round."""
    return f"{place} {round_number}".encode()
