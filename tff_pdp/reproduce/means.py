"""Result rows put together over seeds, and held against what a publication says."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.reproduce.setting import Statement


@dataclasses.dataclass(frozen=True)
class Mean:
    """The figure of one method at one epsilon, over seeds.

    Attributes:
      method: a name in `METHODS`.
      epsilon: of every silo, or of all users.
      prox_weight: lambda, for a point of the grid.
      mean: over seeds.
      deviation: sample standard deviation over seeds; None of one seed.
      seeds: how many.
      epsilon_spent: the largest over clients and seeds.
      worst_decile: mean over seeds of what the tenth of the clients gets that is served worst.
      pooled: mean over seeds of the figure of all clients' test examples together; None where it is no other.
      prevalence: mean over seeds of the share of positive test examples; None where that says nothing.
      noise_to_signal: of users' noised means, as `UserPlan.noise_to_signal`; None where clients are silos.
      is_at_every_epsilon: whether it was run once for all of them.
    """

    method: str
    epsilon: float
    prox_weight: float | None
    mean: float
    deviation: float | None
    seeds: int
    epsilon_spent: float
    worst_decile: float
    pooled: float | None = None
    prevalence: float | None = None
    noise_to_signal: float | None = None
    is_at_every_epsilon: bool = False


def means_over_seeds(
    rows: Iterable[Mapping[str, Any]],
    *,
    is_grid: bool = False,
    is_at_every_epsilon: Callable[[str], bool] = lambda method: False,
) -> list[Mean]:
    """One mean for each method, epsilon and, of a grid, lambda, in the order of their first rows."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["method"], float(row["epsilon"]), row["prox_weight"] if is_grid else None)
        groups.setdefault(key, []).append(row)
    return [
        Mean(
            *key,
            mean=statistics.fmean(row["value"] for row in group),
            deviation=statistics.stdev(row["value"] for row in group) if len(group) > 1 else None,
            seeds=len(group),
            epsilon_spent=max(float(row["epsilon_spent"]) for row in group),
            worst_decile=statistics.fmean(row["worst_decile"] for row in group),
            pooled=_mean_of("pooled_average_precision", group),
            prevalence=_mean_of("prevalence", group),
            noise_to_signal=group[0].get("noise_to_signal"),
            is_at_every_epsilon=is_at_every_epsilon(key[0]),
        )
        for key, group in groups.items()
    ]


def _mean_of(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """None where rows do not have it: figures of all clients together are those of rankings alone."""
    return statistics.fmean(row[name] for row in rows) if name in rows[0] else None


def best_of_grid(means: Sequence[Mean], metric: Metric) -> list[Mean]:
    """For each method and epsilon of a grid the best lambda: chosen on test examples, as is published."""
    best: dict[tuple[str, float], Mean] = {}
    for mean in means:
        key = (mean.method, mean.epsilon)
        if key not in best or is_better(mean.mean, best[key].mean, metric):
            best[key] = mean
    return list(best.values())


def is_better(one: float, other: float, metric: Metric) -> bool:
    """Whether one value of a metric is better than another."""
    return one > other if metric.higher_is_better else one < other


def holds(statement: Statement, means: Sequence[Mean], metric: Metric) -> bool | None:
    """Whether what is said of two methods holds here; None where not both were run at its epsilon."""
    values: dict[Any, float] = {(mean.method, mean.epsilon): mean.mean for mean in means}
    values |= {mean.method: mean.mean for mean in means if mean.is_at_every_epsilon}
    epsilons = {mean.epsilon for mean in means} if statement.epsilon is None else {statement.epsilon}
    pairs = [
        [values.get((method, epsilon), values.get(method)) for method in (statement.better, statement.worse)]
        for epsilon in epsilons
    ]
    compared = [is_better(one, other, metric) for one, other in pairs if one is not None and other is not None]
    return all(compared) if compared else None
