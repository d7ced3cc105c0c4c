"""Reads a client dataset: any client's examples by positioned reads, or all examples in random order.

`ClientIndex` says where in the shards each client's examples lie.
"""

import copy
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from tff_pdp.data.manifest import INDEX_FILE, MANIFEST_FILE, SPLITS, SUCCESS_FILE, FileRecord, Manifest
from tff_pdp.data.shards import ShardFiles, is_url, places_in_runs, read_example_ids, read_examples, read_records
from tff_pdp.data.shuffled_epoch import shuffled_epoch
from tff_pdp.errors import DataError

# Columns of an extent, in this order.
_COLUMNS = ("shard", "offset", "nbytes", "num_examples")


class ClientIndex:
    """The extents (runs of records in one shard) of each client's splits; takes some tens of bytes for each split."""

    def __init__(self, extents: np.ndarray, first: np.ndarray):
        """Wraps extents sorted by client and split.

        Args:
          extents: int64 `[n, 4]`, with the columns shard (position in the manifest), first byte, number of bytes, and
            number of examples.
          first: int64 `[clients * splits + 1]`: row of `extents` at which each split of each client begins; the
            last entry is n.
        """
        self._extents, self._first = extents, first
        examples = np.concatenate([[0], np.cumsum(extents[:, 3])])
        self._num_examples = examples[first[1:]] - examples[first[:-1]]

    @classmethod
    def read(cls, path: Path, client_ids: Sequence[str], num_shards: int) -> "ClientIndex":
        """Reads `index.parquet`, whose rows may be in any order; extents of one client and split keep the file's order.

        Raises:
          DataError: the file is not an index of this dataset.
        """
        try:
            table = pyarrow.parquet.read_table(path)
            extents = np.stack([_integers(table[name]) for name in _COLUMNS], axis=1)
            keys = _positions(table["client_id"], client_ids) * len(SPLITS) + _positions(table["split"], SPLITS)
        except (pyarrow.ArrowException, OSError, KeyError) as error:
            raise DataError(f"{path}: unusable index ({error!r}); prepare the data again") from error
        if ((extents[:, 0] < 0) | (extents[:, 0] >= num_shards)).any():
            raise DataError(f"{path}: unusable index (a shard is not one of {num_shards}); prepare the data again")
        order = np.argsort(keys, kind="stable")
        first = np.searchsorted(keys[order], np.arange(len(client_ids) * len(SPLITS) + 1))
        return cls(extents[order], first)

    def num_examples(self, client: int, split: str) -> int:
        """Counts the examples in a split of the client at position `client`."""
        return int(self._num_examples[client * len(SPLITS) + SPLITS.index(split)])

    def sizes(self, split: str) -> np.ndarray:
        """Counts every client's examples in a split: int64 `[clients]`."""
        return self._num_examples[SPLITS.index(split) :: len(SPLITS)]

    def extents(self, clients: np.ndarray, split: str) -> np.ndarray:
        """Returns the extents in a split of the clients at positions `clients`, client by client: int64 `[n, 4]`."""
        keys = clients * len(SPLITS) + SPLITS.index(split)
        counts = self._first[keys + 1] - self._first[keys]
        return self._extents[np.repeat(self._first[keys], counts) + places_in_runs(counts)]

    def split_extents(self, split: str) -> np.ndarray:
        """Returns all clients' extents in a split, sorted by client: int64 `[n, 4]`."""
        num_extents = np.diff(self._first)
        return self._extents[np.repeat(np.arange(len(num_extents)) % len(SPLITS) == SPLITS.index(split), num_extents)]


def _positions(column: pyarrow.ChunkedArray, values: Sequence[str]) -> np.ndarray:
    index_in = pyarrow.compute.index_in  # pyright: ignore[reportAttributeAccessIssue]
    return _integers(index_in(column, pyarrow.array(values, pyarrow.string())))


def _integers(column: pyarrow.ChunkedArray) -> np.ndarray:
    if column.null_count:
        raise pyarrow.ArrowInvalid("a value is missing, or names no client or split of this dataset")
    return column.cast(pyarrow.int64()).to_numpy()


@dataclasses.dataclass(frozen=True)
class ClientExamples:
    """Examples of one client, or of several clients, one after another.

    Attributes:
      x: float32 `[n, *shape]`.
      y: `[n]`, int64 classes or, for a regression, float32 values.
    """

    x: np.ndarray
    y: np.ndarray


class ClientDataset:
    """A finished client dataset, as `beam_pipelines` writes it. Threads may share one object.

    Attributes:
      path: the dataset's folder.
      manifest: the dataset's manifest: feature spec, hashes, counts, and counts of dropped data by reason.
      client_ids: ids of all clients, sorted.
    """

    def __init__(self, path: Path, manifest: Manifest, index: ClientIndex, identity: "_Identity"):
        self.path = path
        self._identity = identity
        self.manifest = manifest
        self.client_ids: tuple[str, ...] = tuple(sorted(manifest.clients))
        self._files = ShardFiles(path, [shard.name for shard in manifest.shards])
        self._index = index
        self._kept: object = None
        self._positions = {client_id: position for position, client_id in enumerate(self.client_ids)}

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> "ClientDataset":
        """Opens a dataset; reads the manifest and the index, but no examples.

        Args:
          path: the dataset's folder, or its fsspec URL, such as `s3://bucket/clients`.
          verify: whether to read every shard, and compare its sha256 with the manifest; for a folder only.

        Raises:
          DataError: the dataset is missing, unfinished, of another format version, or not as the manifest says.
        """
        if is_url(path):
            return _open_url(str(path))
        root = Path(path)
        # Taken before anything is read, so that a folder that is replaced meanwhile is noticed.
        identity = _identity_of(root)
        manifest = Manifest.load(root)
        for expected in (manifest.index, *(manifest.shards if verify else ())):
            _check_file(root, expected)
        index = ClientIndex.read(root / INDEX_FILE, sorted(manifest.clients), len(manifest.shards))
        return cls(root, manifest, index, identity)

    def with_files(self, files: ShardFiles, kept: object) -> "ClientDataset":
        """Returns the dataset with shards elsewhere; `kept` lives as long as the dataset."""
        moved = copy.copy(self)
        moved._files, moved._kept = files, kept
        return moved

    def num_examples(self, client_id: str, split: str) -> int:
        """Counts the examples of a client in a split.

        Raises:
          DataError: no such client or split.
        """
        return self._index.num_examples(self._position(client_id, split), split)

    def load(self, client_id: str, split: str) -> ClientExamples:
        """Reads one client's examples of one split, in the dataset's order.

        Raises:
          DataError: no such client or split, a record is corrupt (the message names file and offset), or the dataset
            was replaced since it was opened.
        """
        return self.load_many(np.array([self._position(client_id, split)]), split)

    def sizes(self, split: str) -> np.ndarray:
        """Counts every client's examples in a split, in the order of `client_ids`: int64 `[clients]`.

        Raises:
          DataError: no such split.
        """
        self._check_split(split)
        return self._index.sizes(split)

    def load_many(self, places: np.ndarray, split: str) -> ClientExamples:
        """Reads several clients' examples of one split; costs less than a call of `load` for each client.

        Args:
          places: positions of the clients in `client_ids`, int64 `[clients]`.
          split: `train`, `validation` or `test`.

        Returns:
          The examples of the first client, then those of the second, and so on; `sizes` tells how many each has.

        Raises:
          DataError: as in `load`.
        """
        self._check_split(split)
        extents = self._index.extents(places, split)
        examples = ClientExamples(*read_examples(self.manifest.features, self._files, extents))
        self._check_unchanged()
        return examples

    def example_ids(self, client_id: str, split: str) -> np.ndarray:
        """Reads the ids of one client's examples of one split, in the dataset's order: `S32` `[n]`.

        Raises:
          DataError: no such client or split, a record's header is corrupt (the message names file and offset), or the
            dataset was replaced since it was opened.
        """
        extents = self._index.extents(np.array([self._position(client_id, split)]), split)
        ids = read_example_ids(self.manifest.features, self._files, extents)
        self._check_unchanged()
        return ids

    def records(self, client_id: str, split: str) -> list[bytes]:
        """Reads one client's examples of one split, in the dataset's order, as serialized `tf.train.Example`s.

        Raises:
          DataError: as in `load`.
        """
        extents = self._index.extents(np.array([self._position(client_id, split)]), split)
        records = read_records(self._files, extents)
        self._check_unchanged()
        return records

    def epoch(self, split: str, batch_size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields each example of a split once, in a uniformly random order, as batches `(x, y)`.

        The arrays of a batch are as in `ClientExamples`. A batch mixes examples of several clients, which federated
        training never does. Use batches where all data may be in one place: to pretrain on public data, to train
        central baselines, or to look at data. Results computed from such batches are not private.

        Args:
          split: `train`, `validation` or `test`.
          batch_size: number of examples in a batch; the last batch may have fewer.
          seed: seed of the order.

        Raises:
          ConfigError: `batch_size` is not positive.
          DataError: no such split, or a record is corrupt (the message names file and offset). A corrupt record may be
            found only when the record's batch is read.
        """
        self._check_split(split)
        return shuffled_epoch(self.manifest.features, self._files, self._index.split_extents(split), batch_size, seed)

    def _check_unchanged(self) -> None:
        """Checks that the folder still is the one that was opened: shards are opened when they are first read."""
        if _identity_of(self.path) != self._identity:
            raise DataError(
                f"{self.path} was prepared anew, or removed, while it was in use: start the command again, "
                "with the present data"
            )

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise DataError(f"{self.path}: no split {split!r}; choose one of {', '.join(SPLITS)}")

    def _position(self, client_id: str, split: str) -> int:
        self._check_split(split)
        if client_id not in self._positions:
            raise DataError(f"{self.path}: no client {client_id!r} among its {len(self.client_ids)} clients")
        return self._positions[client_id]


def _open_url(url: str) -> ClientDataset:
    """Opens a dataset at an fsspec URL: manifest and index are copied here, shards are read where they are."""
    import fsspec.core  # Only workers of other machines need it.

    system, root = fsspec.core.url_to_fs(url)
    copies = tempfile.TemporaryDirectory(prefix="tff_pdp_clients_")
    try:
        for name in (MANIFEST_FILE, INDEX_FILE, SUCCESS_FILE):
            (Path(copies.name) / name).write_bytes(system.cat_file(f"{root}/{name}"))
    except (OSError, ValueError) as error:
        raise DataError(f"{url}: no finished client dataset can be read there ({error})") from error
    dataset = ClientDataset.open(copies.name)
    return dataset.with_files(ShardFiles(url, [shard.name for shard in dataset.manifest.shards]), copies)


# Number, size and time of writing of the manifest's file.
_Identity = tuple[int, int, int] | None


def _identity_of(root: Path) -> _Identity:
    try:
        found = (root / MANIFEST_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_file(root: Path, expected: FileRecord) -> None:
    try:
        actual = FileRecord.of(root, expected.name)
    except OSError as error:
        raise DataError(f"{root / expected.name}: cannot be read ({error.strerror}); prepare the data again") from error
    if actual != expected:
        raise DataError(
            f"{root / expected.name}: differs from the manifest (sha256 {actual.sha256[:12]}…, {actual.nbytes} bytes; "
            f"expected {expected.sha256[:12]}…, {expected.nbytes} bytes); restore it or prepare the data again"
        )
