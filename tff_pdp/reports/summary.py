"""Numbers that describe many silos in a line: means, the worst tenth, spread, gain over learning alone."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tff_pdp.reports import content


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far silos lie apart: standard deviation (of all silos, not an estimate from a sample), smallest, largest."""

    standard_deviation: float
    minimum: float
    maximum: float


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One method's line in the headline table.

    Attributes:
      algorithm: the method's result.
      minimum: smallest accuracy of a personal model over silos; NaN without test results.
      maximum: largest accuracy of a personal model over silos; NaN without test results.
      gain: mean over silos of (this method - learning alone), on silos that have both; `None` for the baseline itself
        and where no silo has both.
      silos_better: how many silos are strictly better off than alone.
      silos_compared: how many silos have both numbers.
    """

    algorithm: content.AlgorithmResult
    minimum: float
    maximum: float
    gain: float | None
    silos_better: int
    silos_compared: int


def worst_decile(values: Iterable[float]) -> float:
    """Mean of the smallest tenth of the values, at least one of them; NaN entries (no test data) are left out.

    >>> worst_decile([0.9, 0.5, 0.7])
    0.5
    """
    ordered = sorted(_present(values))
    if not ordered:
        return math.nan
    return float(np.mean(ordered[: max(1, len(ordered) // 10)]))


def spread(values: Iterable[float]) -> Spread:
    """Standard deviation, minimum and maximum; NaN entries are left out, and nothing at all gives three NaNs."""
    present = _present(values)
    if not present:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(float(np.std(present)), min(present), max(present))


def personal_accuracies(silos: Sequence[content.SiloResult], algorithm: str) -> list[float]:
    """Each silo's personal test accuracy under one method; NaN where the silo has none."""
    return [silo.accuracy.get(algorithm, math.nan) for silo in silos]


def global_accuracies(silos: Sequence[content.SiloResult], algorithm: str) -> list[float]:
    """Each silo's test accuracy of the shared model of one method; NaN where there is none."""
    found = [silo.global_accuracy.get(algorithm) for silo in silos]
    return [math.nan if accuracy is None else accuracy for accuracy in found]


def comparison_rows(
    algorithms: Sequence[content.AlgorithmResult], silos: Sequence[content.SiloResult], baseline: str = "local_only"
) -> list[ComparisonRow]:
    """The headline table: one row per method, in the order given.

    Gains are paired silo by silo, so that a silo that lacks one of the two numbers does not tilt the difference.

    Args:
      algorithms: the compared methods.
      silos: the silos' results.
      baseline: name of the method that learns in each silo alone.
    """
    alone = personal_accuracies(silos, baseline)
    return [_comparison_row(algorithm, silos, alone, baseline) for algorithm in algorithms]


def featured_algorithm(
    algorithms: Sequence[content.AlgorithmResult], baseline: str = "local_only"
) -> content.AlgorithmResult | None:
    """The method the report leads with: the exported one, else the personalised one with the best *validation* mean.

    The test mean is not used to choose: choosing by it would make the number that is then printed too good.
    """
    exported = [algorithm for algorithm in algorithms if algorithm.exported]
    candidates = exported or [algorithm for algorithm in algorithms if algorithm.name != baseline] or list(algorithms)
    return max(candidates, key=_last_validation, default=None)


def _comparison_row(
    algorithm: content.AlgorithmResult, silos: Sequence[content.SiloResult], alone: Sequence[float], baseline: str
) -> ComparisonRow:
    personal = personal_accuracies(silos, algorithm.name)
    gains = _present(mine - theirs for mine, theirs in zip(personal, alone, strict=True))
    shown = gains if algorithm.name != baseline else []
    bounds = spread(personal)
    return ComparisonRow(
        algorithm=algorithm,
        minimum=bounds.minimum,
        maximum=bounds.maximum,
        gain=float(np.mean(shown)) if shown else None,
        silos_better=sum(gain > 0 for gain in shown),
        silos_compared=len(shown),
    )


def _last_validation(algorithm: content.AlgorithmResult) -> float:
    return algorithm.history[-1][1] if algorithm.history else -math.inf


def _present(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not math.isnan(value)]
