"""The figures that models are judged by: means over a client's examples of something measured on each of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
    """A client's figure for one model, and which way it points.

    Attributes:
      name: of the client's figure, in results and reports.
      example_name: of what is measured on one example, of which the figure is the mean.
      higher_is_better: false for errors.
    """

    name: str
    example_name: str
    higher_is_better: bool


ACCURACY = Metric("accuracy", "accuracy", higher_is_better=True)
MEAN_SQUARED_ERROR = Metric("mean_squared_error", "squared_error", higher_is_better=False)
