"""The job for any raw data: users in, a client dataset out (`tff_pdp.data.manifest` describes its folder)."""

import dataclasses
import math

from tqdm import tqdm

from beam_pipelines.dataset.clients import ClientRules, client_stages
from beam_pipelines.dataset.job import DatasetJob, JobOptions, Summary, run_dataset_job
from beam_pipelines.raw_data import RawData
from beam_pipelines.rules import SplitRule
from beam_pipelines.validation import ExampleRule
from tff_pdp.data.manifest import FeatureSpec, FileRecord
from tff_pdp.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientDatasetOptions(JobOptions):
    """What to prepare, and how.

    Attributes:
      input_shape: shape of one example: `(height, width, channels)` of an image, `(d,)` of a feature vector.
      num_classes: labels are integers in `[0, num_classes)`; 0 for a regression, whose labels are any finite numbers.
      test_fraction: expected share of each client's examples in `test`; not used where the raw data have test examples.
      validation_fraction: expected share in `validation` (of the others, where the raw data have test examples); not
        used where they have validation examples, too. The rest is `train`.
      exact_split: make the shares of every client exact, rounded up to whole examples; see
        `beam_pipelines.splits.SplitRule`.
      min_examples_per_client: clients with fewer valid examples are dropped and counted.
      num_shards: number of shard files. One worker holds the users of one shard in memory.
      split_by: `sample`, every client's examples are divided; or `user`, all of a client's examples are in one split,
        so that tests are about people that training has not seen.

    Raises:
      DataError: a value is out of range.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    test_fraction: float = 0.2
    validation_fraction: float = 0.2
    exact_split: bool = False
    split_by: str = "sample"
    min_examples_per_client: int = 10
    num_shards: int = 8

    def __post_init__(self):
        super().__post_init__()
        fractions = (self.test_fraction, self.validation_fraction)
        self._require(bool(self.input_shape) and min(self.input_shape) >= 1, "input_shape needs positive sizes")
        self._require(self.num_classes >= 0, "num_classes must be at least 0")
        self._require(
            min(fractions) >= 0 and sum(fractions) < 1,
            "test_fraction and validation_fraction must leave room for train",
        )
        self._require(self.split_by in ("sample", "user"), "split_by must be sample or user")
        self._require(
            not (self.exact_split and self.split_by == "user"), "exact_split is for split_by sample: users go by hash"
        )
        self._require(self.min_examples_per_client >= 1, "min_examples_per_client must be at least 1")
        self._require(self.num_shards >= 1, "num_shards must be at least 1")


def run_client_dataset_job(raw: RawData, options: ClientDatasetOptions) -> Summary:
    """Prepares a client dataset, or finds that it is already there.

    Raises:
      DataError: a file cannot be read; more than `max_bad_fraction` of the input is unusable
        or no client is left; or the output is in the way. Nothing is written under the output's name then.
    """
    if raw.has_test_examples and options.split_by == "user":
        raise DataError(f"{options.input}: split_by user needs data without test examples of their own")
    features = FeatureSpec.of(tuple(options.input_shape), options.num_classes)
    rules = ClientRules(
        features=features,
        examples=ExampleRule(math.prod(options.input_shape), options.num_classes, raw.are_images),
        splits=SplitRule(
            options.test_fraction,
            options.validation_fraction,
            options.exact_split,
            options.seed,
            by_user=options.split_by == "user",
        ),
        min_examples=options.min_examples_per_client,
        num_shards=options.num_shards,
    )
    unused = {"test_fraction": None} if raw.has_test_examples else {}
    if raw.has_validation_examples:
        unused["validation_fraction"] = None
    job = DatasetJob(
        # All that decides the content besides the files: the options, and what the raw data say of themselves.
        parameters={**options.parameters(), **unused, "source": raw.source, **raw.parameters},
        sources=tuple(FileRecord.of(raw.folder, name) for name in tqdm(raw.files, desc="hash sources", unit="file")),
        features=features,
        num_shards=options.num_shards,
        stages=client_stages(raw, rules),
    )
    return run_dataset_job(job, options)
