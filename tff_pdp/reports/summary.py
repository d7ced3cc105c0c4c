"""Summarises the results of many clients (silos or users), and formats metrics for readers.

A summary has means, the mean of the worst tenth, the spread, and the gain over learning alone. The metric is NaN for a
client without test examples. A ranking metric is also NaN for a client without positive test examples. NaN is left out
of all figures.

`summary.json` has the headline figures of every method, the privacy costs, and each client's results.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import asdict

from tff_pdp.models.metrics import ACCURACY, AVERAGE_PRECISION, MEAN_SQUARED_ERROR, Metric
from tff_pdp.privacy.facts import SiloFacts
from tff_pdp.reports import content
from tff_pdp.reports import words as numbers
from tff_pdp.reports.statement import Statement, objects_content
from tff_pdp.reports.words import ClientWords


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One method's line in the headline table.

    Attributes:
      algorithm: the method's result.
      minimum: smallest test metric of a personal model over clients; NaN without test results.
      maximum: largest test metric of a personal model over clients; NaN without test results.
      gain: mean gain of this method over learning alone, for clients with results of both methods; negative if this
        method is worse; None for the baseline itself, or if no client has results of both methods.
      clients_better: number of clients for which the method is strictly better than learning alone.
      clients_compared: number of clients that have results of both methods.
    """

    algorithm: content.AlgorithmResult
    minimum: float
    maximum: float
    gain: float | None
    clients_better: int
    clients_compared: int


def mean_over_silos(values: Iterable[float]) -> float:
    """Computes the unweighted mean over silos or users, leaving out NaN; NaN without values.

    >>> mean_over_silos([0.9, 0.5, float("nan")])
    0.7
    """
    present = _present(values)
    return float(np.mean(present)) if present else math.nan


def mean_over_examples(values: Sequence[float], num_examples: Sequence[int]) -> float:
    """Computes the mean of clients' values, weighted by numbers of test examples; leaves out NaN.

    For a metric that is a mean over examples, the result is the mean over all clients' examples. For a ranking metric,
    such as average precision, the result is only a weighted mean of clients' metrics; `training.evaluate` computes the
    metric of all examples together.

    >>> mean_over_examples([0.9, 0.5], [30, 10])
    0.8
    """
    pairs = [(value, size) for value, size in zip(values, num_examples, strict=True) if not math.isnan(value)]
    total = sum(size for _, size in pairs)
    return sum(value * size for value, size in pairs) / total if total else math.nan


def worst_decile(values: Iterable[float], metric: Metric) -> float:
    """Computes the mean of the worst tenth of the values; the tenth has at least one value.

    >>> from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
    >>> worst_decile([0.9, 0.5, 0.7], ACCURACY), worst_decile([0.9, 0.5, 0.7], MEAN_SQUARED_ERROR)
    (0.5, 0.9)
    """
    ordered = worst_first(values, metric)
    return mean_over_silos(ordered[: max(1, len(ordered) // 10)])


def worst_first(values: Iterable[float], metric: Metric) -> list[float]:
    """Returns the values other than NaN, the worst first."""
    return sorted(_present(values), reverse=not metric.higher_is_better)


def spread(values: Iterable[float]) -> float:
    """Computes the population standard deviation of the values, not the sample's; NaN without values."""
    present = _present(values)
    return float(np.std(present)) if present else math.nan


def personal_values(clients: Sequence[content.ClientScores], algorithm: str) -> list[float]:
    """Returns one method's test metric of each client's personal model; NaN for a client without the metric."""
    return [client.personal.get(algorithm, math.nan) for client in clients]


def shared_values(clients: Sequence[content.ClientScores], algorithm: str) -> list[float]:
    """Returns one method's test metric of the shared model on each client; NaN for a client without the metric."""
    found = [client.shared.get(algorithm) for client in clients]
    return [math.nan if value is None else value for value in found]


def comparison_rows(
    algorithms: Sequence[content.AlgorithmResult],
    clients: Sequence[content.ClientScores],
    metric: Metric,
    baseline: str = "local_only",
) -> list[ComparisonRow]:
    """Builds the headline table: one row per method, in the order given.

    Gains are relative to `baseline`, the method in which each client learns alone. A gain is the difference of one
    client's two results. Clients that lack one of the two results are left out, and so do not bias the mean gain.
    """
    alone = personal_values(clients, baseline)
    rows = []
    for algorithm in algorithms:
        personal = personal_values(clients, algorithm.facts.name)
        gains = _present(_towards_better(mine - theirs, metric) for mine, theirs in zip(personal, alone, strict=True))
        shown, present = gains if algorithm.facts.name != baseline else [], _present(personal)
        rows.append(
            ComparisonRow(
                algorithm=algorithm,
                minimum=min(present, default=math.nan),
                maximum=max(present, default=math.nan),
                gain=float(np.mean(shown)) if shown else None,
                clients_better=sum(gain > 0 for gain in shown),
                clients_compared=len(shown),
            )
        )
    return rows


def worst_clients(
    clients: Sequence[content.ClientScores], algorithm: str, metric: Metric, count: int
) -> list[content.ClientScores]:
    """Returns the `count` clients with the worst results of one method, sorted; clients without a result come last."""

    def badness(client: content.ClientScores) -> float:
        value = client.personal.get(algorithm, math.nan)
        return math.inf if math.isnan(value) else _towards_better(value, metric)

    return sorted(clients, key=badness)[:count]


def featured_algorithm(
    algorithms: Sequence[content.AlgorithmResult], metric: Metric, baseline: str = "local_only"
) -> content.AlgorithmResult | None:
    """Returns the method to feature: the exported method or, if there is none, the best by *validation* mean.

    The baseline is chosen only if there is no other method. A choice by the test mean would bias the printed test mean.
    """
    exported = [one for one in algorithms if one.facts.exported]
    others = [one for one in algorithms if one.facts.name != baseline]
    candidates = exported or others or list(algorithms)
    return max(candidates, key=lambda algorithm: _last_validation(algorithm, metric), default=None)


def _last_validation(algorithm: content.AlgorithmResult, metric: Metric) -> float:
    """Larger where the method is better; least without validation results."""
    value = algorithm.history[-1][1] if algorithm.history else math.nan
    return -math.inf if math.isnan(value) else _towards_better(value, metric)


def _towards_better(value: float, metric: Metric) -> float:
    return value if metric.higher_is_better else -value


def _present(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not math.isnan(value)]


@dataclasses.dataclass(frozen=True)
class MetricText:
    """The words for a metric in texts, and functions that format the metric's values.

    Attributes:
      label: name inside a sentence.
      axis: name on an axis, with the better direction if that is not obvious.
      value: function that formats one value.
      gain: function that formats a gain, the difference between two values; a negative gain is a loss.
      gain_unit: unit of formatted gains; empty if gains have the unit of values.
      undefined: noun that completes texts such as "3 silos without ...", about clients that have test examples but no
        value of the metric.
    """

    label: str
    axis: str
    value: Callable[[float | None], str]
    gain: Callable[[float | None], str]
    gain_unit: str
    undefined: str = "finite results"

    @property
    def title(self) -> str:
        """The metric's name as a heading."""
        return self.label[0].upper() + self.label[1:]


_TEXTS = {
    ACCURACY.name: MetricText("accuracy", "accuracy", numbers.percent, numbers.points, "points"),
    AVERAGE_PRECISION.name: MetricText(
        "average precision", "average precision", numbers.percent, numbers.points, "points", "positive test examples"
    ),
    MEAN_SQUARED_ERROR.name: MetricText(
        "mean squared error", "mean squared error (lower is better)", numbers.plain, numbers.signed, ""
    ),
}


def metric_text(metric: Metric) -> MetricText:
    """Returns a metric's words and formats: its name, and plain numbers, for a metric from elsewhere."""
    known = _TEXTS.get(metric.name)
    if known is not None:
        return known
    label = metric.name.replace("_", " ")
    if metric.name.endswith("accuracy"):
        return MetricText(label, label, numbers.percent, numbers.points, "points")
    axis = label if metric.higher_is_better else f"{label} (lower is better)"
    return MetricText(label, axis, numbers.plain, numbers.signed, "")


def left_out_notes(metric: Metric, clients: Sequence[content.ClientScores], words: ClientWords) -> list[str]:
    """Returns one sentence that counts the clients without a test metric, by reason; an empty list if all have one."""
    text = metric_text(metric)
    undefined = [any(map(math.isnan, client.personal.values())) for client in clients if client.num_test]
    counts = {"test examples": len(clients) - len(undefined), text.undefined: sum(undefined)}
    missing = [f"{count} without {what}" for what, count in counts.items() if count]
    if not missing:
        return []
    return [f"Left out of all figures of test {text.label}: of {len(clients)} {words.many}, {' and '.join(missing)}."]


def pooled_notes(metric: Metric, pooled: Mapping[str, Mapping[str, float]], words: ClientWords) -> list[str]:
    """Returns a sentence with metrics of all clients' test examples together; an empty list without metrics.

    `pooled` has the results of `training.evaluate.pooled_figures`, by title of the method.
    """
    text = metric_text(metric)
    figures = [f"{title} {text.value(value)}" for title, own in pooled.items() for value in own.values()]
    if not figures:
        return []
    return [
        f"{text.title} of all {words.many}' test examples ranked together, each scored by the personal model of its "
        f"{words.one}: {', '.join(figures)}. Not private."
    ]


# For more users, quantiles say enough, and a file of all users would name each of them.
MOST_USERS = 5000
# Fields of a method's costs that are not costs of every user.
_BY_METHOD = ("num_noised", "noise_to_signal")
_QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def summary_content(report: content.Report) -> dict[str, Any]:
    """Returns the content of `summary.json` as plain data.

    For silos, `silos` has a row per silo. For users, each method's row also has the method's privacy cost; `num_users`
    is the number of users; `users` has a row per user, or is None if there are more than 5000 users; `quantiles` has,
    for each method's personal and shared models, quantiles of users' test metrics by percentage. `notes` and
    `advice` are the report's.
    """
    start = {
        "title": report.title,
        "metric": report.metric.name,
        "higher_is_better": report.metric.higher_is_better,
        "algorithms": {algorithm.facts.name: _algorithm_row(algorithm) for algorithm in report.algorithms},
        "notes": list(report.notes),
        "advice": list(report.advice),
    }
    facts, clients = report.privacy.facts, report.clients
    if isinstance(facts, SiloFacts):
        pairs = zip(clients, facts.silos, strict=True)
        silos = [{**dataclasses.asdict(scores), **asdict(costs)} for scores, costs in pairs]
        return content.json_safe({**start, "silos": silos, "privacy": _privacy(report.privacy)})
    users = {key: value for key, value in asdict(facts.worst).items() if key not in _BY_METHOD}
    users |= {name: getattr(facts.sums, name) for name in ("sampling_rate", "num_users", "expected_cohort")}
    return content.json_safe(
        {
            **start,
            "num_users": len(clients),
            "users": list(map(dataclasses.asdict, clients)) if len(clients) <= MOST_USERS else None,
            "quantiles": {one.facts.name: _quantiles(clients, one.facts.name) for one in report.algorithms},
            "privacy": {**_privacy(report.privacy), "users": users},
        }
    )


def _privacy(statement: Statement) -> dict[str, Any]:
    """Returns the part of the statement that the summary repeats."""
    extended = statement.facts.extended if isinstance(statement.facts, SiloFacts) else ()
    return {
        "unit": statement.facts.unit,
        "adjacency": statement.adjacency,
        "claim": statement.claim,
        "claim_reason": statement.claim_reason,
        "private": statement.private,
        "composed": to_builtins(statement.composed),
        "budget_exposure": statement.facts.budget_exposure,
        **({"extended": to_builtins(extended)} if extended else {}),
        **objects_content(statement.facts),
    }


def _algorithm_row(algorithm: content.AlgorithmResult) -> dict[str, Any]:
    figures = dataclasses.asdict(algorithm)
    facts = asdict(figures.pop("facts"))
    del figures["history"]
    claim = {key: facts[key] for key in ("claim", "claim_reason", "exported", "budget_exposure")}
    return {**figures, **claim, **(asdict(facts["user_costs"]) if facts["user_costs"] else {})}


def _quantiles(users: Sequence[content.ClientScores], algorithm: str) -> dict[str, dict[str, float] | None]:
    return {
        "personal": _quantiles_of(personal_values(users, algorithm)),
        "shared": _quantiles_of(shared_values(users, algorithm)),
    }


def _quantiles_of(values: Sequence[float]) -> dict[str, float] | None:
    """Returns quantiles by percentage; None if no user has a value."""
    present = _present(values)
    return {f"{100 * share:g}": float(np.quantile(present, share)) for share in _QUANTILES} if present else None
