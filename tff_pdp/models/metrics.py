"""Defines the metrics of models: means over examples, and metrics of the ranking of all examples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of one model on one client's examples, and its direction.

    Attributes:
      name: name of the metric in results and reports.
      example_name: key of the metric in an evaluation's result. If the metric is a mean over examples, the key names
        the value that is averaged; otherwise the key is `name`.
      higher_is_better: whether larger values are better; false for errors.
    """

    name: str
    example_name: str
    higher_is_better: bool


@dataclasses.dataclass(frozen=True)
class Ranking:
    """A metric of how well the scores of a two-class classifier rank positive examples before the others.

    Attributes:
      metric: name and direction of the metric.
      figure: `(scores [..., n], y [..., n], included [..., n]) -> float32 [...]`, for tensors inside a computation;
        NaN if no included example is positive.
      pooled: `(scores [n], y [n]) -> float`, the same metric for arrays, of any n.
    """

    metric: Metric
    figure: Callable[[Any, Any, Any], Any]
    pooled: Callable[[np.ndarray, np.ndarray], float]


@dataclasses.dataclass(frozen=True)
class ExampleMetric:
    """A metric that is the mean of a figure of each example.

    Attributes:
      metric: name and direction of the metric.
      figure: `(outputs [batch, ...], y [batch]) -> float32 [batch]`, of a model's outputs and of labels.
    """

    metric: Metric
    figure: Callable[[Any, Any], Any]


ACCURACY = Metric("accuracy", "accuracy", higher_is_better=True)
MEAN_SQUARED_ERROR = Metric("mean_squared_error", "squared_error", higher_is_better=False)
AVERAGE_PRECISION = Metric("average_precision", "average_precision", higher_is_better=True)
