"""Positioned reads of a client dataset's shards."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from tff_pdp.errors import DataError
from tff_pdp.files import read_at

# Shards in use at a time; most systems let a process open 1,024 files.
_OPEN_FILES = 128


class ShardFiles:
    """The shards of a dataset, of which the last used ones stay open until they or this object are no longer used.

    Safe to share between threads, and with processes that are forked: reads have no position in common, and there is no
    lock that a fork could copy while it is held.
    """

    def __init__(self, folder: Path, names: Sequence[str]):
        """Opens nothing yet.

        Args:
          folder: the dataset.
          names: the shards, relative to it; they are referred to by position.
        """
        self._folder, self._names = folder, tuple(names)
        self._paths = [str(folder / name) for name in names]
        # Whoever reads holds the file: one that the cache drops for another thread meanwhile is closed after the read.
        self._open = functools.lru_cache(_OPEN_FILES)(_OpenFile)

    def __reduce__(self):
        return ShardFiles, (self._folder, self._names)

    def path(self, shard: int) -> str:
        """Where a shard lies."""
        return self._paths[shard]

    def read(self, shard: int, offset: int, nbytes: int) -> bytes:
        """Reads a range of bytes; fewer come back where the file ends.

        Raises:
          DataError: the shard cannot be read.
        """
        try:
            return self._open(self._paths[shard]).read(offset, nbytes)
        except OSError as error:
            raise DataError(
                f"{self.path(shard)}: cannot be read ({error.strerror}); restore it or prepare the data again"
            ) from error


class _OpenFile:
    """A descriptor that is closed with the last reference to it."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)

    def read(self, offset: int, nbytes: int) -> bytes:
        return read_at(self.descriptor, offset, nbytes)

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
