"""Computes all one- and two-way marginals of a table, their distances from those of another table, and a noise floor.

A marginal is a histogram over the categories of one column, or over pairs of categories of two columns. Columns of
numbers are divided into bins of equal width between their public bounds. The distance of two marginals is half the sum
of absolute differences of shares (total variation): 0 for equal histograms, 1 for histograms without a common cell.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tff_pdp.privacy.synthetic.table import Categorical, TableSchema

# Of a column of numbers.
BINS = 10


class Binned(NamedTuple):
    """The rows of a table, with a bin or a category for each cell.

    Attributes:
      places: place of each cell's bin or category, int64 `[rows, columns]`, columns in the order of the schema.
      sizes: number of bins or categories of each column.
    """

    places: np.ndarray
    sizes: tuple[int, ...]


class Distances(NamedTuple):
    """Distances of all marginals of a table from those of another table.

    Attributes:
      one_way: mean over the columns.
      two_way: mean over the pairs of columns.
      worst: the largest distance of all.
    """

    one_way: float
    two_way: float
    worst: float


def bin_cells(header: Sequence[str], cells: Sequence[Sequence[str]], schema: TableSchema) -> Binned:
    """Finds the bin or the category of each cell of a table that its schema allows.

    Args:
      header: names of the columns, in the order of the cells.
      cells: cells by row.
      schema: public description of the columns.
    """
    columns, sizes = [], []
    for name, column in schema.columns.items():
        texts = [row[header.index(name)] for row in cells]
        if isinstance(column, Categorical):
            columns.append([column.index(text) for text in texts])
            sizes.append(len(column.names))
        else:
            shares = (np.array(texts, np.float64) - column.low) / (column.high - column.low)
            # The upper bound is in the last bin.
            columns.append(np.minimum((shares * BINS).astype(np.int64), BINS - 1))
            sizes.append(BINS)
    return Binned(np.array(columns, np.int64).T, tuple(sizes))


def marginals(table: Binned) -> dict[tuple[int, ...], np.ndarray]:
    """Counts the rows of each cell of all one- and two-way marginals: int64 `[cells]` by the places of columns."""
    found: dict[tuple[int, ...], np.ndarray] = {}
    for one, size in enumerate(table.sizes):
        found[one,] = np.bincount(table.places[:, one], minlength=size)
    for one, other in itertools.combinations(range(len(table.sizes)), 2):
        pairs = table.places[:, one] * table.sizes[other] + table.places[:, other]
        found[one, other] = np.bincount(pairs, minlength=table.sizes[one] * table.sizes[other])
    return found


def distances(found: dict[tuple[int, ...], np.ndarray], wanted: dict[tuple[int, ...], np.ndarray]) -> Distances:
    """Returns the distances of marginals from others with the same cells; a histogram without rows has equal shares."""

    def shares(counts: np.ndarray) -> np.ndarray:
        return counts / counts.sum() if counts.any() else np.full(len(counts), 1 / len(counts))

    each = {key: float(np.abs(shares(found[key]) - shares(wanted[key])).sum() / 2) for key in wanted}
    return _summary(each)


def release_directly(
    exact: dict[tuple[int, ...], np.ndarray], noise_multiplier: float, normals: Callable[[int], np.ndarray]
) -> dict[tuple[int, ...], np.ndarray]:
    """Adds the Gaussian mechanism's noise to all marginals, and sets negative counts to 0.

    A record is in one cell of each of m marginals, so that the L2 sensitivity is sqrt(m).

    Args:
      exact: counts of all marginals.
      noise_multiplier: standard deviation of the noise divided by the sensitivity.
      normals: draws this many standard normal numbers.
    """
    stddev = noise_multiplier * math.sqrt(len(exact))
    return {key: np.maximum(counts + stddev * normals(len(counts)), 0) for key, counts in exact.items()}


def noise_alone(exact: dict[tuple[int, ...], np.ndarray], noise_multiplier: float) -> Distances:
    """Returns the expected distances that the noise of `release_directly` causes if negative counts are kept.

    The mean of an absolute value of a centred Gaussian is sqrt(2 / pi) standard deviations. Half the sum of the noise
    on shares can be above 1.
    """
    stddev = noise_multiplier * math.sqrt(len(exact))
    each = {
        key: len(counts) * stddev * math.sqrt(2 / math.pi) / (2 * int(counts.sum())) for key, counts in exact.items()
    }
    return _summary(each)


def _summary(each: dict[tuple[int, ...], float]) -> Distances:
    of_columns = [distance for key, distance in each.items() if len(key) == 1]
    of_pairs = [distance for key, distance in each.items() if len(key) == 2]
    return Distances(float(np.mean(of_columns)), float(np.mean(of_pairs)), max(each.values()))
