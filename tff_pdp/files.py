"""Files that are never half-written: replaced in one move, and flushed where a power cut must not undo a promise."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a text file in one move: a reader sees the old file or the whole new one, never a part."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flushes one file or folder to disk, so that a power cut cannot leave what was published half-written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
