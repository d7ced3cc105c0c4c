"""Names the metrics of models: a mean of something measured on each example, or a ranking of all."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Metric:
    """A client's figure for one model, and its direction.

    Attributes:
      name: of the client's figure, in results and reports.
      example_name: the figure's key in an evaluation's result: the name of the measurement on one example or, where the
        figure is no mean but of all the client's examples together, the metric's own.
      higher_is_better: false for errors.
    """

    name: str
    example_name: str
    higher_is_better: bool


@dataclasses.dataclass(frozen=True)
class Ranking:
    """A metric of how well the scores of a classifier of two classes set its positive examples before the others.

    Attributes:
      metric: the figure's name and direction.
      figure: `(scores [..., n], y [..., n], included [..., n]) -> float32 [...]`, of tensors inside a computation; NaN
        where no example that is included is positive.
      pooled: `(scores [n], y [n]) -> float`, the same of arrays, and of any number of examples.
    """

    metric: Metric
    figure: Callable[[Any, Any, Any], Any]
    pooled: Callable[[np.ndarray, np.ndarray], float]


ACCURACY = Metric("accuracy", "accuracy", higher_is_better=True)
MEAN_SQUARED_ERROR = Metric("mean_squared_error", "squared_error", higher_is_better=False)
AVERAGE_PRECISION = Metric("average_precision", "average_precision", higher_is_better=True)
