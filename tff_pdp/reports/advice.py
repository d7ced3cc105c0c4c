"""Says in one sentence each what a reader of results may try next, and what the attempt costs.

Advice follows from figures of the summary alone. Most advice is about results that were computed without noise: such a
sentence says "not private", and a choice by it is no private choice. Noise that is larger than the signal is known
before training, so the privacy plan warns of it (`tff_pdp.privacy.plans.plan.PrivacyPlan.warning`).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tff_pdp.reports import content, summary
from tff_pdp.reports.summary import metric_text
from tff_pdp.reports.words import plain, upper

# A mean difference counts if it is this many standard errors from zero.
_CLEAR = 2.0
# A learning curve is compared by quarters, each with at least this many validations.
_QUARTERS, _ROWS_OF_A_QUARTER = 4, 2
# Settings of the strength that pulls clients' models together: small to learn alone, large to share a model.
_PULL = "prox_weight"
_NOT_PRIVATE = "(not private)"


def advice_on(report: content.Report) -> list[str]:
    """Lists advice on a report's methods: personal models that lose, and training that was best long before its end.

    Methods are compared client by client, so that clients without results of both methods are left out.
    """
    found = []
    for algorithm in report.algorithms:
        found += _on_losses(report, algorithm)
        found += _on_rounds(report, algorithm)
    return found


def advice_on_search(selected: Mapping[str, Mapping[str, Any]], values: Mapping[str, Sequence[float]]) -> list[str]:
    """Lists advice on a private search: hyper-parameters that most silos selected at an end of their values.

    The silos' selections are released by the search, and are in its epsilon: this advice costs nothing.

    Args:
      selected: for each silo, `hparams`, the selected values by name.
      values: tried values by name.

    >>> found = advice_on_search({"a": {"hparams": {"prox_weight": 1.0}}}, {"prox_weight": [0.1, 1.0]})
    >>> found[0].partition(";")[0]
    'prox_weight: 1 of 1 silos selected 1, the largest value tried'
    """
    found = []
    for name, tried in values.items():
        own = [float(one["hparams"][name]) for one in selected.values() if name in one["hparams"]]
        if len(set(tried)) < 2 or not own:
            continue
        for end, word, direction in ((min(tried), "smallest", "smaller"), (max(tried), "largest", "larger")):
            count = sum(math.isclose(value, end, rel_tol=1e-6) for value in own)
            if 2 * count > len(own):
                found.append(
                    f"{name}: {count} of {len(own)} silos selected {end:g}, the {word} value tried; the best may be "
                    f"{direction}: search again with values beyond it, which costs each silo the budget of a search "
                    "once more"
                )
    return found


def _on_losses(report: content.Report, algorithm: content.AlgorithmResult) -> list[str]:
    name, title = algorithm.facts.name, algorithm.facts.title
    if name == report.baseline:
        return []
    personal = summary.personal_values(report.clients, name)
    alone = summary.personal_values(report.clients, report.baseline)
    found = []
    lost = _clear_loss(report, personal, alone)
    if lost is not None:
        found.append(
            f"{title}: {lost} worse than learning alone {_NOT_PRIVATE}; try {_less_sharing(report, name)}. "
            f"{_cost(report)}"
        )
    shared = [("its own shared model", summary.shared_values(report.clients, name))]
    shared += [
        (other.facts.title, summary.personal_values(report.clients, other.facts.name))
        for other in report.algorithms
        if report.kind_of(other.facts.name) == "fed_avg" and other is not algorithm
    ]
    for words, values in shared:
        lost = _clear_loss(report, personal, values)
        if lost is not None:
            found.append(
                f"{title}: {lost} worse than {words} {_NOT_PRIVATE}; try {_more_sharing(report, name)}. {_cost(report)}"
            )
            break
    return found


def _clear_loss(report: content.Report, own: Sequence[float], others: Sequence[float]) -> str | None:
    """Returns the mean loss of clients' results in words; None if there is no clear loss."""
    sign = 1.0 if report.metric.higher_is_better else -1.0
    losses = [sign * (other - mine) for mine, other in zip(own, others, strict=True)]
    losses = [loss for loss in losses if not math.isnan(loss)]
    if len(losses) < 2:
        return None
    mean, error = statistics.fmean(losses), statistics.stdev(losses) / math.sqrt(len(losses))
    if not mean > _CLEAR * error:
        return None
    text = metric_text(report.metric)
    return f"in the mean {text.gain(mean).lstrip('+')} {text.gain_unit or text.label}".rstrip()


def _less_sharing(report: content.Report, name: str) -> str:
    value = report.settings_of(name).get(_PULL)
    if isinstance(value, int | float):
        or_auto = f"{_PULL}: auto, " if report.kind_of(name) == "mr_mtl" else ""
        return f"a smaller {_PULL} than {value:g}, {or_auto}or local_only"
    return "a method with weaker sharing, such as mr_mtl with a small prox_weight, or local_only"


def _more_sharing(report: content.Report, name: str) -> str:
    value = report.settings_of(name).get(_PULL)
    if isinstance(value, int | float):
        return f"a larger {_PULL} than {value:g}, or fed_avg"
    return "more sharing: fewer rounds or a smaller rate of personal training, or fed_avg"


def _on_rounds(report: content.Report, algorithm: content.AlgorithmResult) -> list[str]:
    if not report.privacy.private:
        return []
    rows, sign = algorithm.history, 1.0 if report.metric.higher_is_better else -1.0
    size = len(rows) // _QUARTERS
    if size < _ROWS_OF_A_QUARTER:
        return []
    # The newest rows fill the last quarter.
    rows = rows[len(rows) - _QUARTERS * size :]
    quarters = [rows[place : place + size] for place in range(0, len(rows), size)]
    means = [sign * statistics.fmean(value for _, value in quarter) for quarter in quarters]
    best = max(range(_QUARTERS), key=means.__getitem__)
    noise = max(statistics.stdev([value for _, value in quarter]) for quarter in (quarters[best], quarters[-1]))
    if not means[best] - means[-1] > _CLEAR * noise * math.sqrt(2 / size):
        return []
    last, planned = quarters[best][-1][0], algorithm.rounds
    return [
        f"{algorithm.facts.title}: the validation {metric_text(report.metric).label} was best before round {last} of "
        f"{planned} {_NOT_PRIVATE}; more rounds mean more noise in each, so try training.rounds: {last}. "
        f"{_cost(report)}"
    ]


def _cost(report: content.Report) -> str:
    """Returns a sentence on the epsilon of one more run."""
    facts = report.privacy.facts
    if not report.privacy.private or not math.isfinite(facts.most_spent):
        return "A further run costs no epsilon here, as this one has no guarantee."
    both = 2 * facts.most_spent
    return (
        f"A further run costs up to {upper(facts.most_spent)} of epsilon more, {upper(both)} in all at delta "
        f"{plain(2 * facts.largest_delta)}."
    )
