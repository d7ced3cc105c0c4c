"""Files that are never half-written: replaced in one move, and flushed where a power cut must not undo a promise."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to instead of `path`: what lies there replaces it, in one move, when the block ends well."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield staging
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes a text file in one move: a reader sees the old file or the whole new one, never a part."""
    with replacing(path) as staging:
        staging.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flushes one file or folder to disk, so that a power cut cannot leave what was published half-written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
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
