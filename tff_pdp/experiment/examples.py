"""Reads clients' examples of one split in the form that computations take: stacked, and padded to a few sizes.

The sizes are chosen so that clients of different sizes can be stacked with little waste.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.data.shards import places_in_runs
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

    def sizes(self, split: str) -> np.ndarray:
        """Counts every client's examples in a split: int64 `[clients]`."""
        ...

    def load_many(self, places: np.ndarray, split: str) -> ClientExamples:
        """Reads the examples of a split of the clients at `places` in `client_ids`, one client after another."""
        ...


class Examples:
    """Reads one split of clients from disk, many clients at a time, and keeps a small split in memory.

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
        self._sizes = np.asarray(clients.sizes(split), np.int64)
        self._padded = padded_sizes(self._sizes, model)
        num_bytes = 4 * int(self._sizes.sum()) * int(np.prod(model.input_shape))
        self._kept = _Kept(self._sizes, model, self._read) if num_bytes <= _KEPT_BYTES else None

    def select(self, places: Sequence[int] | np.ndarray) -> ClientValues:
        """Returns the examples of the clients at `places` in the dataset, in this order, stacked by padded size.

        Raises:
          DataError: a record is corrupt.
        """
        chosen = np.asarray(places, np.int64)
        # In the order of the first client of each padded size.
        sizes = dict.fromkeys(self._padded[chosen].tolist())
        rows, first = self._rows(chosen)
        groups = [
            self._group(np.flatnonzero(self._padded[chosen] == size), size, rows, first, self._sizes[chosen])
            for size in sizes
        ]
        return ClientValues(self.member_type, groups)

    @property
    def num_clients(self) -> int:
        """Number of clients in the dataset."""
        return len(self._sizes)

    def padded(self, places: np.ndarray) -> np.ndarray:
        """Returns the sizes that the examples of the clients at `places` are padded to: int64 `[places]`."""
        return self._padded[places]

    def all(self) -> ClientValues:
        """Returns the examples of every client, in the order of the dataset."""
        return self.select(range(len(self._sizes)))

    def _rows(self, chosen: np.ndarray) -> tuple[ClientExamples, np.ndarray]:
        """Returns rows that hold the examples of the clients at `chosen`, and each client's first row."""
        if self._kept is not None:
            return self._kept.rows(chosen), self._kept.first[chosen]
        sizes = self._sizes[chosen]
        return self._read(chosen), np.cumsum(sizes) - sizes

    def _group(
        self, indices: np.ndarray, size: int, rows: ClientExamples, first: np.ndarray, sizes: np.ndarray
    ) -> ClientGroup:
        columns = collections.OrderedDict(
            x=_padded_stack(rows.x, first[indices], sizes[indices], size),
            y=_padded_stack(rows.y, first[indices], sizes[indices], size),
            num_examples=sizes[indices].astype(np.int32),
        )
        return ClientGroup(indices, tuple(from_python(columns, with_client_axis(self.member_type), "examples")), True)

    def _read(self, chosen: np.ndarray) -> ClientExamples:
        """Reads the examples of the clients at `chosen`, one client after another, with scaled features."""
        examples = self._clients.load_many(chosen, self._split)
        if not self._scalings or not len(chosen):
            return examples
        sizes = self._sizes[chosen]
        parts = np.split(examples.x, np.cumsum(sizes)[:-1])
        scaled = [
            self._scalings[self._clients.client_ids[place]].apply(x) for place, x in zip(chosen, parts, strict=True)
        ]
        return ClientExamples(np.concatenate(scaled), examples.y)


class _Kept:
    """The examples of all clients in one array; a client's rows are read when they are first asked for.

    Several threads may share an object: two that read the same client write the same values.

    Attributes:
      first: int64 `[clients]`: the first row of each client.
    """

    def __init__(self, sizes: np.ndarray, model: Model, read: Callable[[np.ndarray], ClientExamples]):
        """Reads nothing yet; `read` returns the examples of the clients at some places, one client after another."""
        self._sizes, self._read = sizes, read
        self.first = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        # Pages that are never written take no memory.
        x, y = np.empty((total, *model.input_shape), np.float32), np.empty(total, model.label_dtype)
        self._everything = ClientExamples(x, y)
        self._is_read = np.zeros(len(sizes), bool)

    def rows(self, chosen: np.ndarray) -> ClientExamples:
        """Returns all rows, of which those of the clients at `chosen` have been read."""
        missing = np.unique(chosen[~self._is_read[chosen]])
        if len(missing):
            read = self._read(missing)
            counts = self._sizes[missing]
            rows = np.repeat(self.first[missing], counts) + places_in_runs(counts)
            self._everything.x[rows], self._everything.y[rows] = read.x, read.y
            # Set last: another thread then finds the rows.
            self._is_read[missing] = True
        return self._everything


def padded_sizes(num_examples: Sequence[int] | np.ndarray, model: Model) -> np.ndarray:
    """Returns the size that each client's examples are padded to: int64 `[clients]`."""
    return bucket_sizes(num_examples, rows_of_a_call=_WEIGHTS_OF_A_CALL / model.num_parameters())


def _padded_stack(rows: np.ndarray, first: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Stacks runs of rows, padded with zeros: `[runs, size, ...]`; run i is `rows[first[i] : first[i] + counts[i]]`."""
    stack = np.zeros((len(first), size, *rows.shape[1:]), rows.dtype)
    stack[np.arange(size) < counts[:, np.newaxis]] = rows[np.repeat(first, counts) + places_in_runs(counts)]
    return stack
