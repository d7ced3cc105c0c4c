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
def only_writer(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Keeps every other process from writing to a folder until the block ends, or this process does.

    The lock is a file beside the folder, which may thus be replaced as a whole. That file stays: were it removed, two
    processes could lock two files of one name. Of a link there are two: beside the folder that it leads to, for those
    who write there under another name, and beside the link, for those who find a folder where the link was.

    Args:
      folder: need not exist.
      waits: for another process that writes there, in place of an error.

    Raises:
      DataError: another process writes to it; the message has its number and the folder. Or the folder is a link that
        leads to itself.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(lock_path(folder), folder, waits))
        if folder.is_symlink():
            stack.enter_context(_locked(_beside(folder.parent.resolve() / folder.name), folder, waits))
        yield


def lock_path(folder: Path) -> Path:
    """The file that is locked for a folder; of a link, that of the folder it leads to.

    Raises:
      DataError: the link leads to itself.
    """
    try:
        return _beside(folder.resolve())
    except RuntimeError:
        raise DataError(f"{folder} is a link that leads to itself: remove the link") from None


def _beside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


@contextlib.contextmanager
def _locked(path: Path, folder: Path, waits: bool) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
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
