"""Reads the examples of extents (runs of records in one shard) by positioned reads."""

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tff_pdp.data.example_codec import decode_example_ids, decode_examples, record_extents
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.data.tfrecord import unframe
from tff_pdp.errors import DataError
from tff_pdp.files import read_at

# Shards in use at a time; most systems let a process open 1,024 files.
_OPEN_FILES = 128
# Number of bytes that are read and decoded together, and of bytes between two extents that are read with both: a read
# costs about as much as copying the latter.
_READ_BYTES, _GAP_BYTES = 1 << 25, 1 << 14


class ShardFiles:
    """The shards of a dataset; the most recently used ones stay open.

    Threads and forked processes may share an object: reads share no position in a file, and there is no lock that a
    fork could copy in the locked state.
    """

    def __init__(self, folder: Path | str, names: Sequence[str]):
        """Sets the names of the shards; opens no shard yet.

        Args:
          folder: folder of the dataset, or its fsspec URL.
          names: names of the shards, relative to the folder; a shard's number is its position in `names`.
        """
        self._folder, self._names = folder, tuple(names)
        self._paths = [f"{str(folder).rstrip('/')}/{name}" for name in names]
        # A reader holds the file, so a file that the cache drops meanwhile is closed after the read.
        self._open = functools.lru_cache(_OPEN_FILES)(_UrlFile if is_url(folder) else _OpenFile)

    def __reduce__(self):
        return ShardFiles, (self._folder, self._names)

    def path(self, shard: int) -> str:
        """Returns the path of a shard."""
        return self._paths[shard]

    def read(self, shard: int, offset: int, nbytes: int) -> bytes:
        """Reads a range of bytes of one shard; returns fewer bytes if the file ends within the range.

        Raises:
          DataError: the shard cannot be read.
        """
        try:
            return self._open(self._paths[shard]).read(offset, nbytes)
        except OSError as error:
            raise DataError(
                f"{self.path(shard)}: cannot be read ({error.strerror or error}); restore it or prepare the data again"
            ) from error


class _OpenFile:
    """A descriptor that is closed with the last reference to it."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def read(self, offset: int, nbytes: int) -> bytes:
        return read_at(self.descriptor, offset, nbytes)


class _UrlFile:
    """A file at an fsspec URL, which is read by requests for ranges of bytes."""

    def __init__(self, url: str):
        import fsspec.core  # Only workers of other machines need it.

        self._system, self._path = fsspec.core.url_to_fs(url)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._system.cat_file(self._path, offset, offset + nbytes)


def is_url(path: object) -> bool:
    """Checks if a path is an fsspec URL, such as `s3://bucket/clients`."""
    return "://" in str(path)


def read_examples(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads and decodes extents, one after another, and checks every checksum.

    Files are read from front to back, some megabytes at a time, and neighbouring extents in one read.

    Args:
      features: shape and types of an example.
      files: the shards.
      extents: int64 `[n, 4]`: shard, first byte, number of bytes and number of records of each extent.

    Returns:
      `x` float32 `[examples, *shape]` and `y` `[examples]`, int64 or, for a regression, float32.

    Raises:
      DataError: a shard cannot be read, a record is corrupt, or an extent has another number of records than stated;
        the message names file and byte.
    """
    order = np.lexsort((extents[:, 1], extents[:, 0]))
    parts = _parts(extents[order])
    if len(parts) == 1 and np.array_equal(order, np.arange(len(order))):
        return _read_part(features, files, extents)
    counts = np.maximum(extents[:, 3], 0)
    first = np.cumsum(counts) - counts
    x, y = np.empty((counts.sum(), *features.shape), np.float32), np.empty(counts.sum(), features.y_dtype)
    for part in parts:
        members = order[part]
        rows = np.repeat(first[members], counts[members]) + places_in_runs(counts[members])
        x[rows], y[rows] = _read_part(features, files, extents[members])
    return x, y


def places_in_runs(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... within each of successive runs of `counts` (int64 `[n]`) members: int64 `[sum of counts]`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _parts(extents: np.ndarray) -> list[slice]:
    """Cuts extents into ranges that are read together; an extent is never divided."""
    parts = (extents[:, 2].cumsum() - extents[:, 2]) // _READ_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(extents)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _read_part(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads and decodes extents, which are sorted by shard and first byte; returns and raises as `read_examples`."""
    content = _read_sorted(files, extents)
    try:
        # One call for everything: it costs as much for one record as for some tens.
        x, y = decode_examples(features, content, "")
    except DataError:
        raise _located_error(features, files, extents) from None
    if not _are_whole(features, content, len(y), extents):
        raise _located_error(features, files, extents)
    return x, y


def _read_sorted(files: ShardFiles, extents: np.ndarray) -> bytes:
    """Reads extents, which are sorted by shard and first byte, and joins their bytes."""
    if not len(extents):
        return b""
    if len(extents) == 1:
        shard, offset, nbytes, _ = extents[0].tolist()
        return files.read(shard, offset, nbytes)
    shards, starts, nbytes, _ = extents.T
    stops = starts + nbytes
    is_apart = (np.diff(shards) != 0) | (starts[1:] - stops[:-1] > _GAP_BYTES)
    bounds = [0, *(np.flatnonzero(is_apart) + 1).tolist(), len(extents)]
    pieces = []
    for first, last in itertools.pairwise(bounds):
        start, stop = int(starts[first]), int(stops[first:last].max())
        content = memoryview(files.read(int(shards[first]), start, stop - start))
        ranges = zip((starts[first:last] - start).tolist(), (stops[first:last] - start).tolist(), strict=True)
        pieces += [content[begin:end] for begin, end in ranges]
    return b"".join(pieces)


def read_example_ids(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> np.ndarray:
    """Reads the ids of the examples of extents, one after another: `S32` `[examples]`.

    Raises:
      DataError: a shard cannot be read, or a record's header is corrupt.
    """
    parts = [
        decode_example_ids(features, files.read(shard, offset, nbytes), files.path(shard), offset)
        for shard, offset, nbytes, _ in extents.tolist()
    ]
    return np.concatenate([np.zeros(0, "S32"), *parts])


def read_records(files: ShardFiles, extents: np.ndarray) -> list[bytes]:
    """Reads the records of extents, one after another, as serialized messages; checks every checksum.

    Raises:
      DataError: a shard cannot be read, a record is corrupt, or an extent has another number of records than stated;
        the message names file and byte.
    """
    records = []
    for shard, offset, nbytes, num_examples in extents.tolist():
        found = unframe(files.read(shard, offset, nbytes), files.path(shard), offset)
        if len(found) != num_examples:
            raise other_number_of_records(files.path(shard), len(found), nbytes, offset, num_examples)
        records += found
    return records


def _are_whole(features: FeatureSpec, content: bytes, num_records: int, extents: np.ndarray) -> bool:
    """Checks that each extent had the stated number of bytes and of records."""
    if len(extents) == 0:
        return True
    nbytes, num_examples = extents[:, 2].cumsum(), extents[:, 3].cumsum()
    if len(content) != nbytes[-1] or num_records != num_examples[-1]:
        return False
    if len(extents) == 1:
        return True
    starts, _ = record_extents(features, content, "")
    return np.array_equal(np.append(starts, len(content))[num_examples], nbytes)


def other_number_of_records(path: str, found: int, nbytes: int, offset: int, promised: int) -> DataError:
    """Builds the error for an extent that holds another number of records than the index states."""
    return DataError(
        f"{path}: {found} whole records in the {nbytes} bytes at byte {offset}, but the index promises {promised}; "
        "restore the file or prepare the data again"
    )


def _located_error(features: FeatureSpec, files: ShardFiles, extents: np.ndarray) -> DataError:
    """Returns the error of the first extent that is not as it should be, with the name of its file."""
    for shard, offset, nbytes, num_examples in extents.tolist():
        path, content = files.path(shard), files.read(shard, offset, nbytes)
        try:
            _, y = decode_examples(features, content, path, offset)
        except DataError as error:
            return error
        if len(content) != nbytes or len(y) != num_examples:
            return other_number_of_records(path, len(y), nbytes, offset, num_examples)
    return DataError(f"{files.path(extents[0, 0])}: changed while it was read; open the dataset again")
