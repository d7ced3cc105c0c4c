"""Raw client data -> client dataset, with the settings of the experiment."""

from pathlib import Path

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import ClientDatasetOptions, Summary
from beam_pipelines.raw_data import RawData
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.registry import DATASETS, lookup
from tff_pdp.settings import check_arguments

# Under the experiment's output: what a kind of raw data has to write before the job reads it.
_WORKSPACE = "raw"


def prepare_clients(config: ExperimentConfig, *, overwrite: bool = False) -> Summary:
    """Runs the job of the experiment's raw data and returns what it read, kept and left out.

    Raises:
      ConfigError: the kind of data or one of its arguments is unknown or out of range.
      DataError: the input is missing or malformed, too much of it is unusable, or another dataset is in the way.
    """
    data = config.data
    options = ClientDatasetOptions(
        input=data.input,
        output=config.clients_folder,
        input_shape=data.input_shape,
        num_classes=data.num_classes,
        test_fraction=data.test_fraction,
        validation_fraction=data.validation_fraction,
        exact_split=data.exact_split,
        min_examples_per_client=data.min_examples_per_client,
        num_shards=data.num_shards,
        seed=data.seed,
        max_bad_fraction=data.max_bad_fraction,
        overwrite=overwrite,
    )
    build = lookup(DATASETS, data.source, "data.source")
    arguments = check_arguments(build, data.arguments, f"source {data.source!r}", "data.arguments")
    source = build(data, Path(config.output) / _WORKSPACE, **arguments)
    return run_client_dataset_job(source, options) if isinstance(source, RawData) else source.run(options)
