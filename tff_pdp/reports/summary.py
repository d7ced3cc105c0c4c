"""Numbers that describe many clients, silos or users, in a line: means, the worst tenth, spread, gain over learning
alone.

Entries that are NaN, of clients without test examples or, for a ranking, without positive ones, are left out
everywhere.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tff_pdp.models.metrics import Metric
from tff_pdp.reports import content


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far clients lie apart: standard deviation (of them all, not an estimate from a sample), smallest, largest."""

    standard_deviation: float
    minimum: float
    maximum: float


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One method's line in the headline table.

    Attributes:
      algorithm: the method's result.
      minimum: smallest test metric of a personal model over clients; NaN without test results.
      maximum: largest test metric of a personal model over clients; NaN without test results.
      gain: mean over clients of how much better this method is than learning alone, on clients that have both, negative
        where it is worse; `None` for the baseline itself and where no client has both.
      clients_better: how many clients are strictly better off than alone.
      clients_compared: how many clients have both numbers.
    """

    algorithm: content.AlgorithmResult
    minimum: float
    maximum: float
    gain: float | None
    clients_better: int
    clients_compared: int


def mean_over_silos(values: Iterable[float]) -> float:
    """Mean in which every silo, or user, counts the same; NaN of nothing.

    >>> mean_over_silos([0.9, 0.5, float("nan")])
    0.7
    """
    present = _present(values)
    return float(np.mean(present)) if present else math.nan


def left_out(clients: Sequence[content.ClientScores]) -> tuple[int, int]:
    """How many clients are left out: without test examples, and with some that their metric is undefined on."""
    empty = sum(not client.num_test for client in clients)
    undefined = sum(client.num_test > 0 and any(map(math.isnan, client.personal.values())) for client in clients)
    return empty, undefined


def mean_over_examples(values: Sequence[float], num_examples: Sequence[int]) -> float:
    """Mean in which every test example counts the same: each client's value weighted by its number; NaN of nothing.

    Of a metric that is a mean over examples it is that over all clients' examples. Of a ranking it is no more than a
    weighted mean of clients' figures: `runtime.pooled` has the figure of all their examples.

    >>> mean_over_examples([0.9, 0.5], [30, 10])
    0.8
    """
    pairs = [(value, size) for value, size in zip(values, num_examples, strict=True) if not math.isnan(value)]
    total = sum(size for _, size in pairs)
    return sum(value * size for value, size in pairs) / total if total else math.nan


def worst_decile(values: Iterable[float], metric: Metric) -> float:
    """Mean of the worst tenth of the values, at least one of them.

    >>> from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
    >>> worst_decile([0.9, 0.5, 0.7], ACCURACY), worst_decile([0.9, 0.5, 0.7], MEAN_SQUARED_ERROR)
    (0.5, 0.9)
    """
    ordered = worst_first(values, metric)
    if not ordered:
        return math.nan
    return float(np.mean(ordered[: max(1, len(ordered) // 10)]))


def worst_first(values: Iterable[float], metric: Metric) -> list[float]:
    """The values in order, the worst one first."""
    return sorted(_present(values), reverse=not metric.higher_is_better)


def spread(values: Iterable[float]) -> Spread:
    """Standard deviation, minimum and maximum; three NaNs of nothing."""
    present = _present(values)
    if not present:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(float(np.std(present)), min(present), max(present))


def personal_values(clients: Sequence[content.ClientScores], algorithm: str) -> list[float]:
    """Each client's test metric of its personal model under one method; NaN where the client has none."""
    return [client.personal.get(algorithm, math.nan) for client in clients]


def shared_values(clients: Sequence[content.ClientScores], algorithm: str) -> list[float]:
    """Each client's test metric of the shared model of one method; NaN where there is none."""
    found = [client.shared.get(algorithm) for client in clients]
    return [math.nan if value is None else value for value in found]


def comparison_rows(
    algorithms: Sequence[content.AlgorithmResult],
    clients: Sequence[content.ClientScores],
    metric: Metric,
    baseline: str = "local_only",
) -> list[ComparisonRow]:
    """The headline table: one row per method, in the order given.

    Gains are paired client by client, so that one that lacks one of the two numbers does not tilt the difference.

    Args:
      algorithms: the compared methods.
      clients: their results.
      metric: what the results are.
      baseline: name of the method in which each client learns alone.
    """
    alone = personal_values(clients, baseline)
    return [_comparison_row(algorithm, clients, metric, alone, baseline) for algorithm in algorithms]


def worst_clients(
    clients: Sequence[content.ClientScores], algorithm: str, metric: Metric, count: int
) -> list[content.ClientScores]:
    """The clients that one method serves worst, the worst one first; those without a result come last."""

    def badness(client: content.ClientScores) -> float:
        value = client.personal.get(algorithm, math.nan)
        return math.inf if math.isnan(value) else _towards_better(value, metric)

    return sorted(clients, key=badness)[:count]


def featured_algorithm(
    algorithms: Sequence[content.AlgorithmResult], metric: Metric, baseline: str = "local_only"
) -> content.AlgorithmResult | None:
    """The method the report leads with: the exported one, else the personalised one with the best *validation* mean.

    The test mean is not used to choose: choosing by it would make the number that is then printed too good.
    """
    exported = [algorithm for algorithm in algorithms if algorithm.exported]
    candidates = exported or [algorithm for algorithm in algorithms if algorithm.name != baseline] or list(algorithms)
    return max(candidates, key=lambda algorithm: _last_validation(algorithm, metric), default=None)


def _comparison_row(
    algorithm: content.AlgorithmResult,
    clients: Sequence[content.ClientScores],
    metric: Metric,
    alone: Sequence[float],
    baseline: str,
) -> ComparisonRow:
    personal = personal_values(clients, algorithm.name)
    gains = _present(_towards_better(mine - theirs, metric) for mine, theirs in zip(personal, alone, strict=True))
    shown = gains if algorithm.name != baseline else []
    bounds = spread(personal)
    return ComparisonRow(
        algorithm=algorithm,
        minimum=bounds.minimum,
        maximum=bounds.maximum,
        gain=float(np.mean(shown)) if shown else None,
        clients_better=sum(gain > 0 for gain in shown),
        clients_compared=len(shown),
    )


def _last_validation(algorithm: content.AlgorithmResult, metric: Metric) -> float:
    """Larger where the method is better; least without validation results."""
    value = algorithm.history[-1][1] if algorithm.history else math.nan
    return -math.inf if math.isnan(value) else _towards_better(value, metric)


def _towards_better(value: float, metric: Metric) -> float:
    return value if metric.higher_is_better else -value


def _present(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not math.isnan(value)]
