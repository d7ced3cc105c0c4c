"""Raw client data -> client dataset, with the settings of the experiment."""

from beam_pipelines.femnist import FemnistOptions, Summary, run_femnist
from tff_pdp.config import ExperimentConfig


def prepare_clients(config: ExperimentConfig, *, overwrite: bool = False) -> Summary:
    """Runs the LEAF FEMNIST job and returns what it read, kept and left out.

    Raises:
      DataError: the input is missing or malformed, too much of it is unusable, or another dataset is in the way.
    """
    data = config.data
    return run_femnist(
        FemnistOptions(
            input=data.input,
            output=config.clients_folder,
            image_shape=data.image_shape,
            num_classes=data.num_classes,
            test_fraction=data.test_fraction,
            validation_fraction=data.validation_fraction,
            min_examples_per_client=data.min_examples_per_client,
            num_shards=data.num_shards,
            seed=data.seed,
            max_bad_fraction=data.max_bad_fraction,
            overwrite=overwrite,
        )
    )
