"""Files that are whole or not there: a runner may try one task twice, even at once."""

import contextlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_ATTEMPT = re.compile(r"\.[0-9a-f]{32}$")


@contextlib.contextmanager
def atomic_file(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a file for writing under a name of its own and gives it its name at the end, unless there was an error.

    Args:
      path: its name.
      is_durable: whether its content survives a power cut once it has its name.
    """
    attempt = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with open(attempt, "wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        attempt.rename(path)
    except BaseException:
        attempt.unlink(missing_ok=True)
        raise


def is_attempt(path: Path) -> bool:
    """Whether a file is what a killed writer left of one."""
    return bool(_ATTEMPT.search(path.name))


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes chunks of bytes as one file."""
    with atomic_file(path) as file:
        file.writelines(chunks)
