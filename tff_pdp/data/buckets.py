"""Padded sizes for clients of different sizes, so that clients can be stacked with little waste."""

from collections.abc import Sequence

import numpy as np

_CANDIDATES = 256


def bucket_sizes(sizes: Sequence[int] | np.ndarray, *, max_buckets: int = 4, rows_of_a_call: float = 0.0) -> np.ndarray:
    """Chooses a padded size for each client: one of at most `max_buckets`, with the least padding and fewest calls.

    Args:
      sizes: each client's number of examples.
      max_buckets: the most different sizes.
      rows_of_a_call: how many rows take as long as another call; a further bucket has to save more.

    Returns:
      int64 `[clients]`, each at least the client's own size, and at least 1.

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
    """For 1, 2, ... buckets: the places of the largest sizes, and the rows with padding; by dynamic programming."""
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
