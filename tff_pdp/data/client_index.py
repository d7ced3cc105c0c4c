"""Where in the shards each client's examples lie."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from tff_pdp.data.manifest import SPLITS
from tff_pdp.errors import DataError

# What is known of an extent, in this order.
_COLUMNS = ("shard", "offset", "nbytes", "num_examples")


class ClientIndex:
    """Extents by client and split, as arrays: a client costs some tens of bytes for each split."""

    def __init__(self, extents: np.ndarray, first: np.ndarray):
        """Wraps extents sorted by client and split.

        Args:
          extents: int64 `[n, 4]`: shard by position in the manifest, first byte, bytes and examples.
          first: int64 `[clients * splits + 1]`, the first extent of each client's splits, and the end.
        """
        self._extents, self._first = extents, first
        examples = np.concatenate([[0], np.cumsum(extents[:, 3])])
        self._num_examples = examples[first[1:]] - examples[first[:-1]]

    @classmethod
    def read(cls, path: Path, client_ids: Sequence[str], num_shards: int) -> "ClientIndex":
        """Reads `index.parquet`, whose rows may come in any order; a client's extents of one split keep theirs.

        Args:
          path: the file.
          client_ids: every client of the dataset.
          num_shards: how many shards there are.

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
            raise DataError(f"{path}: unusable index (a shard is not among the {num_shards}); prepare the data again")
        order = np.argsort(keys, kind="stable")
        first = np.searchsorted(keys[order], np.arange(len(client_ids) * len(SPLITS) + 1))
        return cls(extents[order], first)

    def num_examples(self, client: int, split: str) -> int:
        """How many examples a client, by position, has in a split."""
        return int(self._num_examples[_key(client, split)])

    def extents(self, client: int, split: str) -> np.ndarray:
        """The extents of a client, by position, in a split, in the dataset's order: int64 `[n, 4]`."""
        key = _key(client, split)
        return self._extents[self._first[key] : self._first[key + 1]]

    def split_extents(self, split: str) -> np.ndarray:
        """All clients' extents in a split, sorted by client: int64 `[n, 4]`."""
        num_extents = np.diff(self._first)
        return self._extents[np.repeat(np.arange(len(num_extents)) % len(SPLITS) == SPLITS.index(split), num_extents)]


def _positions(column: pyarrow.ChunkedArray, values: Sequence[str]) -> np.ndarray:
    index_in = pyarrow.compute.index_in  # pyright: ignore[reportAttributeAccessIssue]
    return _integers(index_in(column, pyarrow.array(values, pyarrow.string())))


def _integers(column: pyarrow.ChunkedArray) -> np.ndarray:
    if column.null_count:
        raise pyarrow.ArrowInvalid("a value is missing, or no client or split of this dataset")
    return column.cast(pyarrow.int64()).to_numpy()


def _key(client: int, split: str) -> int:
    return client * len(SPLITS) + SPLITS.index(split)
