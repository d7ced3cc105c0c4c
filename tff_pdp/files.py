"""Writes files that are whole or not there, also where two processes try at once, and flushes what a promise rests on.

A file is replaced in one move. It is flushed where a power cut must not undo a promise.
"""

import contextlib
import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_ATTEMPT = re.compile(r"\.[0-9a-f]{32}$")


@contextlib.contextmanager
def atomic_file(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a file for writing under a name of its own and gives it its name at the end, unless there was an error.

    `is_durable` says whether its content survives a power cut once it has its name.
    """
    with replacing(path) as attempt, open(attempt, "wb") as file:
        yield file
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def is_attempt(path: Path) -> bool:
    """Whether a file is what a killed writer left of one."""
    return bool(_ATTEMPT.search(path.name))


def remove_attempts(folder: Path, name: str = "") -> None:
    """Removes what killed writers have left in a folder, or of one file; the caller alone writes there now."""
    for path in folder.glob(f"{glob.escape(name)}*"):
        if is_attempt(path):
            path.unlink()


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes chunks of bytes as one file."""
    with atomic_file(path) as file:
        file.writelines(chunks)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to instead of `path`: what lies there replaces it, in one move, when the block ends well."""
    attempt = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with naming(path):
            yield attempt
        os.replace(attempt, path)
    except BaseException:
        attempt.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes a text file in one move: a reader sees the old file or the whole new one, never a part."""
    with replacing(path) as staging:
        staging.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes errors of the system name a file: those of writing and flushing, such as on a full disk, do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def discard(folder: Path) -> None:
    """Removes a folder and all in it. A process that is killed leaves it whole, or out of the way under another name.

    What an earlier call left behind under that name is removed as well. Of a link, the link goes: what it leads to is
    not this folder's, and stays.
    """
    moved = folder.with_name(f".{folder.name}.removed")
    remove_tree(moved, ignore_errors=True)
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        folder.rename(moved)
        remove_tree(moved, ignore_errors=True)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a folder and all in it, or a link without what it leads to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def overwrite_and_remove(path: Path) -> None:
    """Removes a file after writing random bytes over its content, which are on disk before the name goes.

    A link is refused: the bytes would go to a file in another place.

    Assumes: the file system writes in place. Those that copy on write, snapshots, and the spare blocks of a solid-state
      disk may keep the old content.

    Raises:
      OSError: the file is a link, or cannot be written or removed.
    """
    with naming(path), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            left -= file.write(os.urandom(min(left, 2**20)))
        os.fsync(file.fileno())
    path.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes one file or folder to disk, so that a power cut cannot leave what was published half-written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Reads bytes at a place of an open file; fewer only where the file ends."""
    content = os.pread(descriptor, nbytes, offset)
    # The system returns at most 2 GiB at a time.
    while len(content) < nbytes:
        more = os.pread(descriptor, nbytes - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
