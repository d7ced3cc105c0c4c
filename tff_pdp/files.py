"""Writes files atomically: a file is whole or absent, even if two processes write at once.

A file is replaced by one rename. Content that must survive a power cut is flushed to disk before the rename.
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
    """Opens a temporary file for writing, and renames it to `path` if the block ends without an error.

    If `is_durable`, the content is flushed to disk before the rename, and so survives a power cut.
    """
    with replacing(path) as attempt, open(attempt, "wb") as file:
        yield file
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def is_attempt(path: Path) -> bool:
    """Checks if a file has the name of a temporary file, which only a killed writer leaves behind."""
    return bool(_ATTEMPT.search(path.name))


def remove_attempts(folder: Path, name: str = "") -> None:
    """Removes temporary files that killed writers left in a folder: all, or only those for the file `name`.

    Assumes: no process is writing in the folder.
    """
    for path in folder.glob(f"{glob.escape(name)}*"):
        if is_attempt(path):
            path.unlink()


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes chunks of bytes as one file, completely or not at all; the file survives a power cut."""
    with atomic_file(path) as file:
        file.writelines(chunks)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path; the file written there replaces `path` if the block ends without an error."""
    attempt = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with naming(path):
            yield attempt
        os.replace(attempt, path)
    except BaseException:
        attempt.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes a text file atomically: a reader sees the old file or the whole new file, never a part."""
    with replacing(path) as staging:
        staging.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds a file's name to each `OSError` without one, such as the error of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def discard(folder: Path) -> None:
    """Removes a folder and all in it; if the process is killed meanwhile, the folder is whole or has another name.

    Leftovers of earlier calls under that other name are removed, too. If the folder is a symbolic link, only the link
    is removed: the target of the link stays.
    """
    moved = folder.with_name(f".{folder.name}.removed")
    remove_tree(moved, ignore_errors=True)
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        folder.rename(moved)
        remove_tree(moved, ignore_errors=True)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a folder and all in it; if the path is a symbolic link, removes only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def overwrite_and_remove(path: Path) -> None:
    """Overwrites a file with random bytes, flushes the bytes to disk, and removes the file.

    A symbolic link is refused: the bytes would overwrite the target of the link.

    Assumes: the file system overwrites blocks in place. File systems that copy on write, snapshots, and the spare
      blocks of a solid-state disk may keep the old content.

    Raises:
      OSError: the file is a symbolic link, or cannot be written or removed.
    """
    with naming(path), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            left -= file.write(os.urandom(min(left, 2**20)))
        os.fsync(file.fileno())
    path.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes one file or folder to disk, so that the present content survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Reads `nbytes` bytes at an offset of an open file; returns fewer bytes only if the file ends earlier."""
    content = os.pread(descriptor, nbytes, offset)
    # The system returns at most 2 GiB at a time.
    while len(content) < nbytes:
        more = os.pread(descriptor, nbytes - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
