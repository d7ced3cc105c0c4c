"""Builds models from settings, as an experiment does: ranges of numbers are checked where settings are read."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tff_pdp.experiment.model import build_model
from tff_pdp.models.base import Model


def build_from_settings(kind: str, input_shape: Sequence[int], num_classes: int, **given: Any) -> Model:
    """The model of a kind, with settings by name."""
    data = SimpleNamespace(input_shape=input_shape, num_classes=num_classes)
    config: Any = SimpleNamespace(model={"kind": kind, **given}, data=data)
    return build_model(config)
