"""How each metric is named and written for a reader."""

import dataclasses
from collections.abc import Callable

from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR, Metric
from tff_pdp.reports import numbers


@dataclasses.dataclass(frozen=True)
class MetricText:
    """A metric for a reader.

    Attributes:
      label: its name inside a sentence.
      axis: its name on an axis, with the direction where that is not plain.
      value: writes one value.
      gain: writes how much better one value is than another, negative where it is worse.
      gain_unit: of what `gain` writes; empty where it is that of the values.
    """

    label: str
    axis: str
    value: Callable[[float | None], str]
    gain: Callable[[float | None], str]
    gain_unit: str

    @property
    def title(self) -> str:
        """The name as a heading."""
        return self.label[0].upper() + self.label[1:]


_TEXTS = {
    ACCURACY.name: MetricText("accuracy", "accuracy", numbers.percent, numbers.points, "points"),
    MEAN_SQUARED_ERROR.name: MetricText(
        "mean squared error", "mean squared error (lower is better)", numbers.plain, numbers.signed, ""
    ),
}


def metric_text(metric: Metric) -> MetricText:
    """Returns how a metric is shown."""
    return _TEXTS[metric.name]
