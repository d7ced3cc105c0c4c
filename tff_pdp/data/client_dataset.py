"""Reads a client dataset: any client's examples by one positioned read, alone or stacked with other clients'."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from tff_pdp.data import tfrecord
from tff_pdp.data.manifest import INDEX_FILE, SPLITS, FileRecord, Manifest
from tff_pdp.errors import DataError


@dataclasses.dataclass(frozen=True)
class ClientExamples:
    """One client's examples: `x` float32 `[n, *shape]`, `y` `[n]`: int64 classes, or float32 values of a regression."""

    x: np.ndarray
    y: np.ndarray


@dataclasses.dataclass(frozen=True)
class StackedClients:
    """Several clients' examples, padded with zeros to the largest client.

    Attributes:
      client_ids: the `c` clients, in the order of the first axis.
      x: float32 `[c, n_max, *shape]`.
      y: int64 `[c, n_max]`, float32 for a regression.
      num_examples: int32 `[c]`, how many rows of each client are real.
    """

    client_ids: tuple[str, ...]
    x: np.ndarray
    y: np.ndarray
    num_examples: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """Bool `[c, n_max]`, true where an example is real and false where it is padding."""
        return np.arange(self.y.shape[1]) < self.num_examples[:, np.newaxis]


@dataclasses.dataclass(frozen=True)
class _Location:
    shard: str
    offset: int
    nbytes: int
    num_examples: int


class ClientDataset:
    """A finished client dataset, as `beam_pipelines` writes it. Safe to share between threads.

    Attributes:
      path: the dataset's folder.
      manifest: its manifest: feature spec, counts, hashes, what was dropped and why.
      client_ids: every client, sorted.
    """

    def __init__(self, path: Path, manifest: Manifest, locations: dict[tuple[str, str], _Location]):
        self.path = path
        self.manifest = manifest
        self.client_ids: tuple[str, ...] = tuple(sorted(manifest.clients))
        self._locations = locations

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> "ClientDataset":
        """Opens a dataset; reads the manifest and the index, no examples.

        Args:
          path: the dataset's folder.
          verify: also read every shard and compare its sha256 with the manifest's.

        Raises:
          DataError: the dataset is missing, unfinished, of another format version, or differs from its manifest.
        """
        root = Path(path)
        manifest = Manifest.load(root)
        for expected in (manifest.index, *(manifest.shards if verify else ())):
            _check_file(root, expected)
        return cls(root, manifest, _read_index(root, manifest))

    def num_examples(self, client_id: str, split: str) -> int:
        """How many examples `client_id` has in `split`.

        Raises:
          DataError: no such client or split.
        """
        location = self._locate(client_id, split)
        return location.num_examples if location else 0

    def load(self, client_id: str, split: str) -> ClientExamples:
        """Reads one client's examples of one split, in the dataset's order.

        Raises:
          DataError: no such client or split, or its records are corrupt (names file and offset).
        """
        return self._parse(self._read_records(client_id, split))

    def stack(self, client_ids: Sequence[str], split: str) -> StackedClients:
        """Reads several clients' examples of one split into dense arrays, padded to the largest client.

        Raises:
          DataError: no such client or split, or a record is corrupt (names file and offset).
        """
        records = [self._read_records(client_id, split) for client_id in client_ids]
        num_examples = np.array([len(client_records) for client_records in records], np.int32)
        longest = int(num_examples.max(initial=0))
        x = np.zeros((len(records), longest, *self.manifest.features.shape), np.float32)
        y = np.zeros((len(records), longest), self.manifest.features.y_dtype)
        stacked = StackedClients(tuple(client_ids), x, y, num_examples)
        # One parse for the whole cohort: the cost of a call is the same for one record as for thousands.
        examples = self._parse([record for client_records in records for record in client_records])
        x[stacked.mask] = examples.x
        y[stacked.mask] = examples.y
        return stacked

    def _locate(self, client_id: str, split: str) -> _Location | None:
        if split not in SPLITS:
            raise DataError(f"{self.path}: no split {split!r}; choose one of {', '.join(SPLITS)}")
        if client_id not in self.manifest.clients:
            raise DataError(f"{self.path}: no client {client_id!r} among its {len(self.client_ids)} clients")
        return self._locations.get((client_id, split))

    def _read_records(self, client_id: str, split: str) -> list[bytes]:
        location = self._locate(client_id, split)
        if location is None:
            return []
        path = self.path / location.shard
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); restore it or prepare the data again"
            ) from error
        try:
            buffer = os.pread(descriptor, location.nbytes, location.offset)
        finally:
            os.close(descriptor)
        records = tfrecord.unframe(buffer, str(path), location.offset)
        if len(buffer) != location.nbytes or len(records) != location.num_examples:
            raise DataError(
                f"{path}: client {client_id!r} has {len(records)} records at byte {location.offset}, but the index "
                f"promises {location.num_examples}; restore the file or prepare the data again"
            )
        return records

    def _parse(self, records: list[bytes]) -> ClientExamples:
        shape, y_dtype = self.manifest.features.shape, self.manifest.features.y_dtype
        if not records:
            return ClientExamples(np.zeros((0, *shape), np.float32), np.zeros((0,), y_dtype))
        # Imported late: listing clients and counting examples should not cost TensorFlow's start-up.
        import tensorflow as tf

        features = {"x": tf.io.FixedLenFeature(shape, tf.float32), "y": tf.io.FixedLenFeature((), y_dtype)}
        parsed = tf.io.parse_example(tf.constant(records, tf.string), features)
        return ClientExamples(parsed["x"].numpy(), parsed["y"].numpy())


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


def _read_index(root: Path, manifest: Manifest) -> dict[tuple[str, str], _Location]:
    try:
        rows = pyarrow.parquet.read_table(root / INDEX_FILE).to_pylist()
        return {
            (row["client_id"], row["split"]): _Location(
                manifest.shards[row["shard"]].name, row["offset"], row["nbytes"], row["num_examples"]
            )
            for row in rows
        }
    except (pyarrow.ArrowInvalid, KeyError, IndexError) as error:
        raise DataError(f"{root / INDEX_FILE}: unusable index ({error!r}); prepare the data again") from error
