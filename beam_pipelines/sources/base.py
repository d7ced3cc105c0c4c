"""Shares between builders of kinds of raw data: images written as arrays, and features that have to fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beam_pipelines.options import DataConfig
from beam_pipelines.raw_data import RawData
from beam_pipelines.sources.silo_files import SiloFileReader
from tff_pdp.errors import ConfigError

_BRIGHTEST = 255


def array_images(
    source: str, workspace: Path, data: DataConfig, parameters: Mapping[str, Any], *, has_test_examples: bool
) -> RawData:
    """The raw data of 8-bit images in `workspace/<source>.npz`, as `beam_pipelines.sources.silo_arrays` writes them."""
    return RawData(
        source=source,
        folder=workspace,
        files=(f"{source}.npz",),
        read_users=SiloFileReader(data.num_classes, brightest=_BRIGHTEST),
        are_images=True,
        has_test_examples=has_test_examples,
        parameters=parameters,
    )


def check_features(data: DataConfig, shape: tuple[int, ...], num_classes: int) -> None:
    """Compares an experiment's `input_shape` and `num_classes` with those of its source.

    Raises:
      ConfigError: they differ; the message has both.
    """
    if (data.input_shape, data.num_classes) != (shape, num_classes):
        raise ConfigError(
            f"data.input_shape and data.num_classes are {list(data.input_shape)} and {data.num_classes}; "
            f"{data.source} has {list(shape)} and {num_classes}"
        )
