"""Compares two methods seed by seed, with a confidence interval of the mean difference.

A seed decides data, batches and noise of both methods, so the difference of one seed's two results varies less than
either result.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tff_pdp.reproduce.budget import Budget, from_entry, in_order
from tff_pdp.reproduce.methods import METHODS
from tff_pdp.settings import Name, Settings

CONFIDENCE = 0.95


class Comparison(Settings):
    """Two methods whose results are compared seed by seed.

    Attributes:
      method: name of a method, in `METHODS`.
      minus: name of the method whose results are subtracted, in `METHODS`.
    """

    method: Name
    minus: Name

    @property
    def text(self) -> str:
        """The comparison in words."""
        return f"{METHODS[self.method].title} minus {METHODS[self.minus].title}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean over seeds of the difference between two methods' test metrics, under one budget.

    Attributes:
      comparison: the two methods.
      budget: epsilon of every client, or the name of budgets.
      mean: mean of the differences.
      margin: half the width of the confidence interval; None for one seed.
      seeds: number of seeds that both methods have.
    """

    comparison: Comparison
    budget: Budget
    mean: float
    margin: float | None
    seeds: int

    @property
    def is_finding(self) -> bool:
        """True if the confidence interval exists and does not contain zero."""
        return self.margin is not None and abs(self.mean) > self.margin


def differences_over_seeds(rows: Sequence[Mapping[str, Any]], comparisons: Iterable[Comparison]) -> list[Difference]:
    """Computes differences by comparison and budget; leaves out comparisons without a seed that both methods have.

    The interval is that of Student's t distribution for the mean of paired differences, with `CONFIDENCE`. Differences
    are taken to be independent between seeds and normally distributed.

    Args:
      rows: result rows of one variant, from `result_row`; `value` is compared.
      comparisons: the compared methods.

    >>> rows = [
    ...     {"method": method, "epsilon": 2.0, "seed": seed, "value": value}
    ...     for method, values in {"pppfl": (0.5, 0.7), "fed_avg": (0.4, 0.5)}.items()
    ...     for seed, value in enumerate(values)
    ... ]
    >>> (found,) = differences_over_seeds(rows, [Comparison(method="pppfl", minus="fed_avg")])
    >>> round(found.mean, 3), round(found.margin, 3), found.is_finding
    (0.15, 0.635, False)
    """
    values: dict[tuple[str, Budget], dict[int, float]] = {}
    for row in rows:
        values.setdefault((row["method"], from_entry(row)), {})[row["seed"]] = row["value"]
    found = []
    for comparison in comparisons:
        for budget in in_order(budget for _, budget in values):
            ours, theirs = (values.get((name, budget), {}) for name in (comparison.method, comparison.minus))
            paired = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            if paired:
                found.append(
                    Difference(comparison, budget, statistics.fmean(paired), confidence_margin(paired), len(paired))
                )
    return found


def confidence_margin(values: Sequence[float]) -> float | None:
    """Returns half the width of the t interval of a mean, with `CONFIDENCE`; None for one value.

    >>> round(confidence_margin([1.0, 2.0, 3.0, 4.0, 5.0]), 3), confidence_margin([1.0])
    (1.963, None)
    """
    if len(values) < 2:
        return None
    # Takes a third of a second to import, which `--help` must not take.
    from scipy import stats

    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
