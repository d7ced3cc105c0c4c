"""Prepares a client dataset from raw client data, with the settings of the experiment."""

import dataclasses
from pathlib import Path

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import RawData, Summary
from tff_pdp.data.tfds_copy import write_tfds_copy
from tff_pdp.experiment.config import ExperimentConfig

# Under the experiment's output: files that a kind of raw data writes before the job reads them.
_WORKSPACE = "raw"


def prepare_clients(config: ExperimentConfig, *, overwrite: bool = False, dead_letters: Path | None = None) -> Summary:
    """Runs the Beam job on the experiment's raw data, and returns counts of data read, kept and left out.

    A job that fails keeps records that it cannot use in the folder `dead_letters`, by default beside the dataset.

    Raises:
      ConfigError: a setting does not suit the input.
      DataError: the input is missing, malformed or has too many unusable records, or the folder has another dataset.

    >>> prepare_clients(config).manifest.num_examples["test"]
    382
    """
    options = config.data.job_options(config.clients_folder, overwrite=overwrite)
    options = dataclasses.replace(options, dead_letters=dead_letters)
    source = config.data.build(Path(config.output) / _WORKSPACE)
    summary = run_client_dataset_job(source, options) if isinstance(source, RawData) else source.run(options)
    if config.data.tfds_copy:
        write_tfds_copy(summary.output)
    return summary
