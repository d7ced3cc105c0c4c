"""Linear regression with half the squared error (`linear_regression`)."""

import dataclasses
from collections.abc import Sequence

from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Model
from tff_pdp.models.mlp import build_mlp


def build_linear_regression(
    input_shape: Sequence[int], num_classes: int = 0, *, input_shift: float = 0.0, input_scale: float = 1.0
) -> Model:
    """Builds `x . kernel + bias` from zero, with x the flattened `(x + input_shift) * input_scale`; all of it is head.

    Labels are float32. Shift and scale are public constants.

    Raises:
      ConfigError: the labels are classes.
    """
    if num_classes:
        raise ConfigError(
            f"model.name 'linear_regression' has float labels, but data.num_classes is {num_classes}: set it to 0, or "
            "use 'linear'"
        )
    model = build_mlp(input_shape, 0, (), input_shift=input_shift, input_scale=input_scale)
    return dataclasses.replace(model, name="linear_regression")
