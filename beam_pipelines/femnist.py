"""The FEMNIST job: LEAF JSON of images in, a client dataset out (`tff_pdp.data.manifest` describes its folder)."""

import dataclasses
from pathlib import Path

from beam_pipelines.client_dataset_job import ClientDatasetOptions, run_client_dataset_job
from beam_pipelines.dataset.job import Summary
from beam_pipelines.sources.leaf import leaf_images


@dataclasses.dataclass(frozen=True, kw_only=True)
class FemnistOptions(ClientDatasetOptions):
    """What to prepare, and how: `input` is the folder of LEAF's files, or of its `train` and `test`."""

    input_shape: tuple[int, ...] = (28, 28, 1)
    num_classes: int = 62


def run_femnist(options: FemnistOptions) -> Summary:
    """Prepares a client dataset, or finds that it is already there.

    Raises:
      DataError: the input is missing or not LEAF JSON, or `run_client_dataset_job` refuses it.
    """
    return run_client_dataset_job(leaf_images(Path(options.input)), options)
