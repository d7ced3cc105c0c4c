"""Locks a folder for one writer: a second command that would write to the folder ends with a message.

Readers need no lock. A lock file has the number of the process that holds the lock; the number is removed when the
process gives the lock back. A number in a file that nobody holds was therefore left by a process that was killed.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tff_pdp.errors import DataError


@contextlib.contextmanager
def only_writer(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Keeps all other processes from writing to a folder, until the block or this process ends.

    The lock is a file beside the folder, so that the folder may be replaced. The file is never removed: otherwise two
    processes could lock different files of one name. For a symbolic link, two files are locked: one beside the target,
    which other processes may reach by another name, and one beside the link, which a folder may replace.

    Args:
      folder: folder to lock; need not exist.
      waits: whether to wait while another process writes to the folder, instead of raising an error.

    Raises:
      DataError: another process writes to the folder (the message has the process's number), or the folder is a
        symbolic link that leads to itself.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(lock_path(folder), folder, waits))
        if folder.is_symlink():
            stack.enter_context(_locked(_beside(folder.parent.resolve() / folder.name), folder, waits))
        yield


class Writer(NamedTuple):
    """The last process that locked a folder.

    Attributes:
      holds_lock: whether the process has the lock now.
      process: number of the process; None if the process has given the lock back, or if there was none.
      since: time at which the process took the lock, in seconds since 1970; None without a number.
    """

    holds_lock: bool
    process: int | None
    since: float | None


def writer_of(folder: Path) -> Writer:
    """Finds out which process writes to a folder, or has been killed while it did; waits for nobody.

    Raises:
      DataError: the folder is a symbolic link that leads to itself.
    """
    try:
        descriptor = os.open(lock_path(folder), os.O_RDONLY)
    except FileNotFoundError:
        return Writer(False, None, None)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            holds_lock = False
        except BlockingIOError:
            holds_lock = True
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        process = int(text) if text.isdecimal() else None
        return Writer(holds_lock, process, os.fstat(descriptor).st_mtime if process is not None else None)
    finally:
        os.close(descriptor)


def lock_path(folder: Path) -> Path:
    """Returns the path of a folder's lock file; for a symbolic link, of the target's lock file.

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
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
