"""One SQLite file of a client store: its owner alone can read it, one process at a time uses it, errors name it.

The settings were measured with rounds of 500 states of 3 KB and of 100 KB. A rollback journal writes new pages once;
a write-ahead log writes them twice, and needs shared memory or a lock of its own. Tables have a rowid, so that states
are appended and only small indexes are written at random: without, reads and writes of 100 KB take three times as
long. Pages of 4 KiB take 1.4 times as long to write there as those of 16 KiB, and 64 KiB 3 times as long to prune;
states of 3 KB fill pages of 16 KiB best.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tff_pdp.errors import DataError

_PAGE_SIZE = 16384
_SETTINGS = (
    # Until it is closed, no other process reads or writes the file, and no lock is asked for again.
    "locking_mode = EXCLUSIVE",
    "journal_mode = TRUNCATE",
    # A transaction is on disk when its commit returns.
    "synchronous = FULL",
    # A large transaction is flushed once, at its end, and not whenever the cache is full.
    "cache_spill = OFF",
    # What was deleted is no more secret than what lies beside it; some builds write zeros over it, at a high price.
    "secure_delete = OFF",
)


class Database:
    """An open file.

    Attributes:
      path: its name.
    """

    def __init__(self, path: Path):
        """Opens a file that is there.

        Raises:
          DataError: it is missing, no database, or open elsewhere.
        """
        self.path = path
        with _naming(path):
            # As a URI, since any other way to open makes a missing file.
            uri = f"{path.absolute().as_uri()}?mode=rw"
            self._connection = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
            with contextlib.ExitStack() as stack:
                stack.callback(self._connection.close)
                for setting in _SETTINGS:
                    self._connection.execute(f"PRAGMA {setting}")
                stack.pop_all()

    @classmethod
    def create(cls, path: Path, schema: str) -> "Database":
        """Makes a file with tables and opens it.

        Raises:
          DataError: it cannot be written.
        """
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        database = cls(path)
        with _naming(path):
            database._connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
            database._connection.executescript(f"BEGIN; {schema} COMMIT;")
        return database

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection, whose changes are on disk together when the block has ended well, and undone otherwise.

        Raises:
          DataError: SQLite failed: the file is damaged, open elsewhere, or the disk is full.
        """
        with _naming(self.path):
            try:
                self._connection.execute("BEGIN EXCLUSIVE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # Some failures end the transaction by themselves; one that cannot be undone now is when next opened.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._connection.close()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        in_use = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
        reason = "it is in use by another process or object" if in_use else str(error)
        raise DataError(f"{path}: the client store cannot be used: {reason}") from None
