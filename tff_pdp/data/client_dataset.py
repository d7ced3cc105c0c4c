"""Reads a client dataset: any client's examples by positioned reads, alone or stacked with other clients'."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tff_pdp.data.client_index import ClientIndex
from tff_pdp.data.manifest import INDEX_FILE, SPLITS, FileRecord, Manifest
from tff_pdp.data.shard_files import ShardFiles
from tff_pdp.data.shards import read_examples
from tff_pdp.data.shuffled_epoch import shuffled_epoch
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


class ClientDataset:
    """A finished client dataset, as `beam_pipelines` writes it. Safe to share between threads.

    Attributes:
      path: the dataset's folder.
      manifest: its manifest: feature spec, counts, hashes, what was dropped and why.
      client_ids: every client, sorted.
    """

    def __init__(self, path: Path, manifest: Manifest, index: ClientIndex):
        self.path = path
        self.manifest = manifest
        self.client_ids: tuple[str, ...] = tuple(sorted(manifest.clients))
        self._files = ShardFiles(path, [shard.name for shard in manifest.shards])
        self._index = index
        self._positions = {client_id: position for position, client_id in enumerate(self.client_ids)}

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
        index = ClientIndex.read(root / INDEX_FILE, sorted(manifest.clients), len(manifest.shards))
        return cls(root, manifest, index)

    def num_examples(self, client_id: str, split: str) -> int:
        """How many examples `client_id` has in `split`.

        Raises:
          DataError: no such client or split.
        """
        return self._index.num_examples(self._position(client_id, split), split)

    def load(self, client_id: str, split: str) -> ClientExamples:
        """Reads one client's examples of one split, in the dataset's order.

        Raises:
          DataError: no such client or split, or its records are corrupt (names file and offset).
        """
        extents = self._index.extents(self._position(client_id, split), split)
        return ClientExamples(*read_examples(self.manifest.features, self._files, extents))

    def stack(self, client_ids: Sequence[str], split: str) -> StackedClients:
        """Reads several clients' examples of one split into dense arrays, padded to the largest client.

        Raises:
          DataError: no such client or split, or a record is corrupt (names file and offset).
        """
        num_examples = np.array([self.num_examples(client_id, split) for client_id in client_ids], np.int32)
        longest = int(num_examples.max(initial=0))
        x = np.zeros((len(num_examples), longest, *self.manifest.features.shape), np.float32)
        y = np.zeros((len(num_examples), longest), self.manifest.features.y_dtype)
        stacked = StackedClients(tuple(client_ids), x, y, num_examples)
        extents = [self._index.extents(self._positions[client_id], split) for client_id in client_ids]
        if extents:
            x[stacked.mask], y[stacked.mask] = read_examples(
                self.manifest.features, self._files, np.concatenate(extents)
            )
        return stacked

    def epoch(self, split: str, batch_size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads all examples of a split once, in a uniformly random order: pairs of `x` and `y`, as in `load`.

        This pools clients, which federated training never does. It is for simulations that have everyone's data in one
        place: pretraining on public data, baselines of central training, a look at the data. Nothing made of it is
        private.

        Args:
          split: which.
          batch_size: examples in a batch; the last one may have fewer.
          seed: decides the order.

        Raises:
          ConfigError: `batch_size` is not positive.
          DataError: no such split, or, now or at a batch, a record is corrupt (names file and offset).
        """
        self._check_split(split)
        return shuffled_epoch(self.manifest.features, self._files, self._index.split_extents(split), batch_size, seed)

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise DataError(f"{self.path}: no split {split!r}; choose one of {', '.join(SPLITS)}")

    def _position(self, client_id: str, split: str) -> int:
        self._check_split(split)
        if client_id not in self._positions:
            raise DataError(f"{self.path}: no client {client_id!r} among its {len(self.client_ids)} clients")
        return self._positions[client_id]


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
