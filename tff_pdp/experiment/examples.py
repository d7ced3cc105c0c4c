"""Reads clients' examples of one split in the form that computations take: stacked, and padded to a few sizes.

The sizes are chosen so that clients of different sizes can be stacked with little waste.
"""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.engines.client_values import ClientGroup, ClientValues
from tff_pdp.engines.structures import from_python, with_client_axis
from tff_pdp.models.base import Model
from tff_pdp.privacy.mechanisms.feature_scaling import FeatureScaling
from tff_pdp.processes.compose import client_data_type

_CANDIDATES = 256


def bucket_sizes(sizes: Sequence[int] | np.ndarray, *, max_buckets: int = 4, rows_of_a_call: float = 0.0) -> np.ndarray:
    """Chooses each client's padded size, with at most `max_buckets` different sizes, to save padding and calls.

    Args:
      sizes: int `[clients]`, each client's number of examples.
      max_buckets: largest number of different sizes.
      rows_of_a_call: number of rows that can be computed in the fixed time of a call. A further size is used only if it
        saves more padding rows than that.

    Returns:
      int64 `[clients]`: the padded sizes, each at least 1 and at least the client's own size.

    >>> bucket_sizes([10, 10, 9, 100], rows_of_a_call=5).tolist()
    [10, 10, 10, 100]
    >>> bucket_sizes([10, 10, 9, 100], rows_of_a_call=300).tolist()
    [100, 100, 100, 100]
    """
    # Some operations do not take clients without any row.
    own = np.maximum(np.asarray(sizes, np.int64), 1)
    if not own.size:
        return own
    candidates = np.unique(own)
    if len(candidates) > _CANDIDATES:
        candidates = np.unique(np.quantile(own, np.linspace(0, 1, _CANDIDATES), method="higher"))
    counts = np.searchsorted(np.sort(own), candidates, side="right")
    best, cuts = None, []
    for chosen, rows in _partitions(candidates, counts, max_buckets):
        cost = rows + len(chosen) * rows_of_a_call
        if best is None or cost < best:
            best, cuts = cost, chosen
    limits = candidates[np.array(cuts)]
    return limits[np.searchsorted(limits, own)]


def _partitions(candidates: np.ndarray, counts: np.ndarray, max_buckets: int) -> list[tuple[list[int], int]]:
    """Finds each bucket's largest size (a place) and the padded rows for 1, 2, ... buckets, by dynamic programming."""
    # rows[j]: fewest rows for the clients up to candidate j, the last bucket ending there.
    rows, ends = candidates * counts, [[number] for number in range(len(candidates))]
    found = [(ends[-1], int(rows[-1]))]
    for _ in range(1, min(max_buckets, len(candidates))):
        added = candidates * (counts[np.newaxis, :] - counts[:, np.newaxis])
        total = np.where(
            np.tri(len(candidates), k=-1, dtype=bool).T, rows[:, np.newaxis] + added, np.iinfo(np.int64).max
        )
        before = total.argmin(axis=0)
        shorter = total.min(axis=0) < rows
        ends = [
            [*ends[before[number]], number] if shorter[number] else ends[number] for number in range(len(candidates))
        ]
        rows = np.minimum(rows, total.min(axis=0))
        found.append((ends[-1], int(rows[-1])))
    return found


# Fixed time of a call over stacked clients, as the number of weights times rows that are computed in that time.
_WEIGHTS_OF_A_CALL = 2e7
# Splits up to this size, in bytes, are read once and kept.
_KEPT_BYTES = 2**30


class ClientSource(Protocol):
    """A source of clients' examples, such as a client dataset."""

    client_ids: tuple[str, ...]

    def num_examples(self, client_id: str, split: str) -> int:
        """Counts a client's examples in a split."""
        ...

    def load(self, client_id: str, split: str) -> ClientExamples:
        """Reads a client's examples of a split."""
        ...


class Examples:
    """Reads one split of all clients from disk, client by client, and keeps a small split in memory.

    Attributes:
      member_type: TFF type of one client's examples.
    """

    def __init__(
        self, clients: ClientSource, split: str, model: Model, scalings: Mapping[str, FeatureScaling] | None = None
    ):
        """Wraps one split of a client dataset or of another source.

        `scalings` has the shift and scale of features by client id; empty if features are used as they are. Padded
        sizes depend on the number of weights of `model`.
        """
        self._clients, self._split, self._scalings = clients, split, scalings or {}
        self.member_type = client_data_type(model)
        self._sizes = np.array([clients.num_examples(client_id, split) for client_id in clients.client_ids], np.int64)
        self._padded = padded_sizes(self._sizes, model)
        num_bytes = 4 * int(self._sizes.sum()) * int(np.prod(model.input_shape))
        self._load = functools.cache(self._read) if num_bytes <= _KEPT_BYTES else self._read

    def select(self, places: Sequence[int] | np.ndarray) -> ClientValues:
        """Returns the examples of the clients at `places` in the dataset, in this order, stacked by padded size.

        Raises:
          DataError: a record is corrupt.
        """
        chosen = np.asarray(places, np.int64)
        # In the order of the first client of each padded size.
        sizes = dict.fromkeys(self._padded[chosen].tolist())
        groups = [self._group(chosen, np.flatnonzero(self._padded[chosen] == size)) for size in sizes]
        return ClientValues(self.member_type, groups)

    def padded(self, places: np.ndarray) -> np.ndarray:
        """Returns the sizes that the examples of the clients at `places` are padded to: int64 `[places]`."""
        return self._padded[places]

    def all(self) -> ClientValues:
        """Returns the examples of every client, in the order of the dataset."""
        return self.select(range(len(self._sizes)))

    def _group(self, chosen: np.ndarray, indices: np.ndarray) -> ClientGroup:
        loaded = [self._load(int(place)) for place in chosen[indices]]
        size = int(self._padded[chosen[indices[0]]])
        columns = collections.OrderedDict(
            x=np.stack([_pad(examples.x, size) for examples in loaded]),
            y=np.stack([_pad(examples.y, size) for examples in loaded]),
            num_examples=np.array([len(examples.y) for examples in loaded], np.int32),
        )
        return ClientGroup(indices, tuple(from_python(columns, with_client_axis(self.member_type), "examples")), True)

    def _read(self, place: int) -> ClientExamples:
        client_id = self._clients.client_ids[place]
        examples = self._clients.load(client_id, self._split)
        if not self._scalings:
            return examples
        return ClientExamples(self._scalings[client_id].apply(examples.x), examples.y)


def padded_sizes(num_examples: Sequence[int] | np.ndarray, model: Model) -> np.ndarray:
    """Returns the size that each client's examples are padded to: int64 `[clients]`."""
    return bucket_sizes(num_examples, rows_of_a_call=_WEIGHTS_OF_A_CALL / model.num_parameters())


def _pad(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)])
