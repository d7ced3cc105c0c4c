"""One writer for each folder: a second command that would write there ends with a sentence.

Readers take no lock.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tff_pdp.errors import DataError


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps every other process from writing to a folder until the block ends, or this process does.

    The lock is a file beside the folder, which may thus be replaced as a whole; of a link, beside the folder that the
    link leads to. That file stays: were it removed, two
    processes could lock two files of one name.

    Args:
      folder: need not exist.

    Raises:
      DataError: another process writes to it; the message has its number and the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock_path(folder), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            raise DataError(
                f"process {owner or '(not known)'} writes to {folder}: wait until that process has ended, or stop it"
            ) from None
        # On a full disk the lock holds without the number.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def lock_path(folder: Path) -> Path:
    """The file that is locked for a folder."""
    real = folder.resolve()
    return real.parent / f".{real.name}.lock"
