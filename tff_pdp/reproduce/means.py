"""Averages results over seeds, and compares the means with each other."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.reproduce.budget import Budget, from_entry, in_order
from tff_pdp.reproduce.setting import Band, Statement


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean over seeds of one method's test metric under one budget.

    Attributes:
      method: a name in `METHODS`.
      budget: epsilon of every silo or of all users, or the name of budgets.
      prox_weight: lambda, for a point of the grid; None otherwise.
      mean: mean of the test metric over seeds.
      deviation: sample standard deviation over seeds; None for one seed.
      seeds: number of seeds.
      with_secret_key: claim and epsilon that the training would have with a secret key, as in `result_row`; taken from
        the seed with the largest epsilon.
      worst_decile: mean over seeds of the mean test metric of the worst tenth of the clients.
      shared: mean over seeds of the shared model's test metric; None if not measured, or without a shared model.
      shared_deviation: sample standard deviation of the shared model's test metric; None for one seed.
      pooled: mean over seeds of the metric of all clients' test examples together; None without a ranking metric.
      prevalence: mean over seeds of the share of positive test examples; None without a ranking metric.
      noise_to_signal: result of `UserPlan.noise_to_signal` on users' noised means; None for silos.
      uplink_bytes: mean over seeds of the bytes that all clients of a real run would send; None if not counted.
      downlink_bytes: mean over seeds of the bytes that all clients of a real run would receive; None if not counted.
      is_at_every_epsilon: whether the result is the same at every epsilon, so that runs at one epsilon hold for all.
    """

    method: str
    budget: Budget
    prox_weight: float | None
    mean: float
    deviation: float | None
    seeds: int
    with_secret_key: Mapping[str, Any]
    worst_decile: float
    shared: float | None = None
    shared_deviation: float | None = None
    pooled: float | None = None
    prevalence: float | None = None
    noise_to_signal: float | None = None
    uplink_bytes: float | None = None
    downlink_bytes: float | None = None
    is_at_every_epsilon: bool = False


def means_over_seeds(
    rows: Iterable[Mapping[str, Any]],
    *,
    is_grid: bool = False,
    is_at_every_epsilon: Callable[[str], bool] = lambda method: False,
) -> list[Mean]:
    """Computes a `Mean` for each method and budget (in a grid, also each lambda), in the order of their first rows."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["method"], from_entry(row), row["prox_weight"] if is_grid else None)
        groups.setdefault(key, []).append(row)
    return [
        Mean(
            *key,
            mean=statistics.fmean(row["value"] for row in group),
            deviation=_deviation(row["value"] for row in group),
            seeds=len(group),
            with_secret_key=max((row["with_secret_key"] for row in group), key=cost),
            worst_decile=statistics.fmean(row["worst_decile"] for row in group),
            shared=_mean_of("shared", group),
            shared_deviation=_deviation(row["shared"] for row in group) if "shared" in group[0] else None,
            pooled=_mean_of("pooled_average_precision", group),
            prevalence=_mean_of("prevalence", group),
            noise_to_signal=group[0].get("noise_to_signal"),
            uplink_bytes=_mean_of("uplink_bytes", group),
            downlink_bytes=_mean_of("downlink_bytes", group),
            is_at_every_epsilon=is_at_every_epsilon(key[0]),
        )
        for key, group in groups.items()
    ]


def cost(claimed: Mapping[str, Any]) -> float:
    """Returns the epsilon of a claim as in `Mean.with_secret_key`; infinite if the claim has no epsilon."""
    return math.inf if claimed["epsilon"] is None else claimed["epsilon"]


def _mean_of(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean of a field over rows; None if rows lack the field, which only some settings have."""
    return statistics.fmean(row[name] for row in rows) if name in rows[0] else None


def _deviation(values: Iterable[float]) -> float | None:
    """Returns the sample standard deviation; None for one value."""
    found = list(values)
    return statistics.stdev(found) if len(found) > 1 else None


def by_budget(means: Sequence[Mean]) -> list[Mean]:
    """Sorts means by budget as `in_order` does; means under one budget keep their order."""
    places = {budget: place for place, budget in enumerate(in_order(mean.budget for mean in means))}
    return sorted(means, key=lambda mean: places[mean.budget])


def best_of_grid(means: Sequence[Mean], metric: Metric) -> list[Mean]:
    """Finds the best lambda for each method and budget of a grid, by the test metric, as the publication does."""
    best: dict[tuple[str, Budget], Mean] = {}
    for mean in means:
        key = (mean.method, mean.budget)
        if key not in best or is_better(mean.mean, best[key].mean, metric):
            best[key] = mean
    return list(best.values())


def is_better(one: float, other: float, metric: Metric) -> bool:
    """Checks if one value of a metric is better than another."""
    return one > other if metric.higher_is_better else one < other


def holds(statement: Statement, means: Sequence[Mean], metric: Metric) -> bool | None:
    """Checks if a statement on two methods holds for these means; None if there are no two means to compare."""
    value = _values(means)
    compared = [
        is_better(one, other, metric)
        for one, other in (
            (value(statement.better, budget), value(statement.worse, budget)) for budget in _budgets(statement, means)
        )
        if one is not None and other is not None
    ]
    return all(compared) if compared else None


def measured_in(band: Band, means: Sequence[Mean]) -> float | None:
    """Returns the mean, or the difference of two means, that a band limits; None if a mean is missing."""
    value = _values(means)
    one, other = (value(name, band.budget) if name else 0.0 for name in (band.method, band.minus))
    return None if one is None or other is None else one - other


def _values(means: Sequence[Mean]) -> Callable[[str, Budget], float | None]:
    """Returns a function from a method and a budget to the mean, or None if the method was not run."""
    by_budget = {(mean.method, mean.budget): mean.mean for mean in means}
    at_every_epsilon = {mean.method: mean.mean for mean in means if mean.is_at_every_epsilon}
    return lambda method, budget: by_budget.get((method, budget), at_every_epsilon.get(method))


def _budgets(statement: Statement, means: Sequence[Mean]) -> set[Budget]:
    """Returns the budgets of a statement; without any, all budgets of the means."""
    stated = statement.epsilon if statement.budgets is None else statement.budgets
    return {mean.budget for mean in means} if stated is None else {stated}
