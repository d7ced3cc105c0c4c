"""Contacts of a population in memory: for how long any two people meet."""

import dataclasses
from pathlib import Path

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from tqdm import tqdm

from beam_pipelines.contact_graph.tables import read_batches, read_observed_days
from tff_pdp.errors import DataError

# Seconds are summed as int32, which is 68 years: with 49 people, 17 months without a break.
_MOST_SECONDS = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Contacts:
    """Who meets whom for how long.

    Attributes:
      pids: `[people]` int64, ascending.
      seconds: `[people, people]` int32, the sum of a pair's durations, either above or below the diagonal.
      observed_days: the days that durations are totals of.
    """

    pids: NDArray[np.int64]
    seconds: scipy.sparse.csr_matrix
    observed_days: int = 1

    def seconds_with(self, group: NDArray[np.bool_]) -> NDArray[np.int32]:
        """`[people]`: the seconds that each person spends with people of a group, one by one."""
        members = group.astype(np.int32)
        return self.seconds @ members + self.seconds.T @ members

    def mean_seconds(self) -> float:
        """The seconds that a person spends with others, one by one; the mean of all people."""
        return 2.0 * float(self.seconds.data.sum(dtype=np.int64)) / max(len(self.pids), 1)


def read_contacts(folder: Path) -> Contacts:
    """Reads the tables person and population_network; 12 bytes a contact row while reading, 20 at the end of it.

    Raises:
      DataError: a table is missing or malformed, a pid occurs twice in person or not at all, or a duration is negative
        or too large.
    """
    pids = np.sort(_concatenate([batch["pid"].to_numpy() for batch in read_batches(folder, "person", ["pid"])]))
    repeated = pids[1:][pids[1:] == pids[:-1]]
    if len(repeated):
        raise DataError(f"{folder}: table person: pid {repeated[0]} occurs more than once")
    if len(pids) > np.iinfo(np.int32).max:
        raise DataError(
            f"{folder}: table person: {len(pids)} people; at most {np.iinfo(np.int32).max} can be simulated"
        )
    place_of = _Places(pids)
    firsts, seconds, durations = [], [], []
    with tqdm(desc="read contacts", unit="row", unit_scale=True) as bar:
        for batch in read_batches(folder, "population_network", ["pid1", "pid2", "duration"]):
            try:
                firsts.append(place_of(batch["pid1"].to_numpy()))
                seconds.append(place_of(batch["pid2"].to_numpy()))
            except KeyError as error:
                raise DataError(f"{folder}: table population_network: pid {error} is not in table person") from error
            durations.append(batch["duration"].to_numpy())
            if len(durations[-1]) and durations[-1].min() < 0:
                raise DataError(f"{folder}: table population_network: duration {durations[-1].min()} is negative")
            bar.update(batch.num_rows)
    matrix = _sum_of_pairs(len(pids), firsts, seconds, durations)
    if matrix is None or _most_seconds(matrix) > _MOST_SECONDS:
        raise DataError(f"{folder}: table population_network: someone has more than {_MOST_SECONDS} seconds of contact")
    return Contacts(pids, matrix, read_observed_days(folder))


class _Places:
    """Maps pids to their places in a sorted array."""

    def __init__(self, pids: NDArray[np.int64]) -> None:
        self._pids = pids
        # Pids that nearly follow one another are looked up; in a search, every one would take 23 steps.
        is_dense = len(pids) and pids[-1] - pids[0] < 8 * len(pids)
        self._first = pids[0] if is_dense else 0
        self._table = np.full(pids[-1] - pids[0] + 1 if is_dense else 0, -1, np.int32)
        if is_dense:
            self._table[pids - self._first] = np.arange(len(pids), dtype=np.int32)

    def __call__(self, pids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Raises KeyError(pid) for one that is not there."""
        if len(self._table):
            offsets = pids - self._first
            is_inside = (offsets >= 0) & (offsets < len(self._table))
            places = np.where(is_inside, self._table[np.where(is_inside, offsets, 0)], -1)
        elif len(self._pids):
            places = np.minimum(np.searchsorted(self._pids, pids), len(self._pids) - 1).astype(np.int32)
            places[self._pids[places] != pids] = -1
        else:
            places = np.full(len(pids), -1, np.int32)
        if len(places) and places.min() < 0:
            raise KeyError(int(pids[places < 0][0]))
        return places


def _sum_of_pairs(
    num_people: int, firsts: list[NDArray], seconds: list[NDArray], durations: list[NDArray]
) -> scipy.sparse.csr_matrix | None:
    """The sums of each pair's durations; None if one does not fit."""
    # One column after the other, so that only one of them is in memory twice.
    total = sum(int(part.sum(dtype=np.int64)) for part in durations)
    columns = []
    for parts in (durations, firsts, seconds):
        columns.append(_concatenate(parts).astype(np.int32, copy=False))
        parts.clear()
    data, row, column = columns
    del columns
    matrix = scipy.sparse.coo_matrix((data, (row, column)), (num_people, num_people), copy=False).tocsr()
    # A sum that does not fit wraps around, which makes it smaller.
    return matrix if matrix.data.sum(dtype=np.int64) == total else None


def _most_seconds(matrix: scipy.sparse.csr_matrix) -> float:
    totals = matrix.sum(axis=0, dtype=np.float64).A1 + matrix.sum(axis=1, dtype=np.float64).A1
    return totals.max(initial=0.0)


def _concatenate(parts: list[NDArray]) -> NDArray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
