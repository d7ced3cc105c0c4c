"""How each metric is named and written for a reader, and what a report notes of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tff_pdp.models.metrics import ACCURACY, AVERAGE_PRECISION, MEAN_SQUARED_ERROR, Metric
from tff_pdp.reports import content, summary
from tff_pdp.reports import words as numbers
from tff_pdp.reports.client_words import ClientWords


@dataclasses.dataclass(frozen=True)
class MetricText:
    """A metric for a reader.

    Attributes:
      label: its name inside a sentence.
      axis: its name on an axis, with the direction where that is not plain.
      value: writes one value.
      gain: writes how much better one value is than another, negative where it is worse.
      gain_unit: of what `gain` writes; empty where it is that of the values.
      undefined: of what a client has none among its examples, if they have no value.
    """

    label: str
    axis: str
    value: Callable[[float | None], str]
    gain: Callable[[float | None], str]
    gain_unit: str
    undefined: str = "finite results"

    @property
    def title(self) -> str:
        """The name as a heading."""
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
    """Returns how a metric is shown."""
    return _TEXTS[metric.name]


def left_out_notes(metric: Metric, clients: Sequence[content.ClientScores], words: ClientWords) -> list[str]:
    """How many clients have no figure, and why, as a sentence; nothing where everyone has one."""
    text = metric_text(metric)
    counts = zip(summary.left_out(clients), ("test examples", text.undefined), strict=True)
    missing = [f"{count} without {what}" for count, what in counts if count]
    if not missing:
        return []
    return [f"Left out of all figures of test {text.label}: of {len(clients)} {words.many}, {' and '.join(missing)}."]


def pooled_notes(metric: Metric, pooled: Mapping[str, Mapping[str, float]], words: ClientWords) -> list[str]:
    """The figures of all clients' test examples together as a sentence; nothing where there are none.

    Args:
      metric: what is reported.
      pooled: by title of the method, what `runtime.pooled.pooled_figures` returned.
      words: what the clients are.
    """
    text = metric_text(metric)
    figures = [f"{title} {text.value(value)}" for title, own in pooled.items() for value in own.values()]
    if not figures:
        return []
    return [
        f"{text.title} of all {words.many}' test examples ranked together, each scored by the personal model of its "
        f"{words.one}: {', '.join(figures)}. Not private."
    ]
