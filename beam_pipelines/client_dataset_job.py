"""The job for any raw data: users in, a client dataset out (`tff_pdp.data.manifest` describes its folder)."""

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.parquet
from apache_beam.options.pipeline_options import PipelineOptions
from tqdm import tqdm

from beam_pipelines.accounting import Counts, collect_counts
from beam_pipelines.io.shards import WriteDeadLetters, WriteIndex, WriteShard, shard_name
from beam_pipelines.io.staging import keep_dead_letters, progress_bar, publish, source_errors, staging_folder
from beam_pipelines.raw_data import RawData
from beam_pipelines.schema import DeadLetter
from beam_pipelines.splits import SplitRule
from beam_pipelines.transforms import (
    DEAD_LETTERS,
    ReadUsers,
    ResolveDuplicates,
    SplitAndEncode,
    ValidateExamples,
    shard_of,
)
from beam_pipelines.validation import ExampleRule
from tff_pdp.data.manifest import (
    DEAD_LETTER_FOLDER,
    FORMAT_VERSION,
    INDEX_FILE,
    MANIFEST_FILE,
    SPLITS,
    SUCCESS_FILE,
    FeatureSpec,
    FileRecord,
    Manifest,
)
from tff_pdp.errors import DataError

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ClientDatasetOptions:
    """What to prepare, and how.

    Attributes:
      input: where the raw data lie, as the user named it; for messages.
      output: folder to write; every worker must see it under this name.
      input_shape: shape of one example: `(height, width, channels)` of an image, `(d,)` of a feature vector.
      num_classes: labels are integers in `[0, num_classes)`; 0 for a regression, whose labels are any finite numbers.
      test_fraction: expected share of each client's examples in `test`; not used where the raw data have test examples.
      validation_fraction: expected share in `validation` (of the others, where the raw data have test examples); the
        rest is `train`.
      exact_split: make the shares of every client exact, rounded up to whole examples; see
        `beam_pipelines.splits.SplitRule`.
      min_examples_per_client: clients with fewer valid examples are dropped and counted.
      num_shards: number of shard files. One worker holds one shard in memory.
      seed: keys the split and the sharding.
      max_bad_fraction: the job fails if more than this share of the examples read cannot be used.
      dead_letters: where a failing job keeps its dead letters; default: `<output>.dead_letters`.
      overwrite: replace a finished dataset that was prepared differently.
      runner: the Beam runner. Not DirectRunner, which may download Prism, another runner, and use that.
      pipeline_args: further Beam flags, e.g. `("--direct_num_workers=2", ...)`.

    Raises:
      DataError: a value is out of range.
    """

    input: str | os.PathLike[str]
    output: str | os.PathLike[str]
    input_shape: tuple[int, ...]
    num_classes: int
    test_fraction: float = 0.2
    validation_fraction: float = 0.2
    exact_split: bool = False
    min_examples_per_client: int = 10
    num_shards: int = 8
    seed: int = 0
    max_bad_fraction: float = 0.01
    dead_letters: str | os.PathLike[str] | None = None
    overwrite: bool = False
    runner: str = "FnApiRunner"
    pipeline_args: tuple[str, ...] = ()

    def __post_init__(self):
        fractions = (self.test_fraction, self.validation_fraction)
        rules: Iterable[tuple[bool, str]] = (
            (bool(self.input_shape) and min(self.input_shape) >= 1, "input_shape needs positive sizes"),
            (self.num_classes >= 0, "num_classes must be at least 0"),
            (
                min(fractions) >= 0 and sum(fractions) < 1,
                "test_fraction and validation_fraction must leave room for train",
            ),
            (self.min_examples_per_client >= 1, "min_examples_per_client must be at least 1"),
            (self.num_shards >= 1, "num_shards must be at least 1"),
            (self.seed >= 0, "seed must be at least 0"),
            (0 <= self.max_bad_fraction <= 1, "max_bad_fraction must lie in [0, 1]"),
        )
        for holds, rule in rules:
            if not holds:
                raise DataError(f"{rule}; got {self.parameters()}")

    def parameters(self) -> dict[str, Any]:
        """The options that decide what the dataset holds; where and how it is computed does not."""
        elsewhere = {"input", "output", "dead_letters", "overwrite", "runner", "pipeline_args"}
        parameters = {key: value for key, value in dataclasses.asdict(self).items() if key not in elsewhere}
        return {**parameters, "input_shape": list(self.input_shape)}


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a job did. `skipped` means that the output already held exactly this dataset."""

    output: Path
    manifest: Manifest
    skipped: bool

    def as_dict(self) -> dict[str, Any]:
        """The counts and the folder, flat, for printing or JSON."""
        manifest = self.manifest
        return {
            "clients": manifest.kept.users,
            **{f"{split}_examples": manifest.num_examples[split] for split in SPLITS},
            "examples_read": manifest.read.examples,
            **{f"dropped ({reason})": tally.examples for reason, tally in sorted(manifest.dropped.items())},
            "dead_letters": str(self.output / DEAD_LETTER_FOLDER),
            "output": str(self.output),
            "skipped": self.skipped,
        }

    def table(self) -> str:
        """The same as aligned lines of text."""
        return "\n".join(f"{key:<48} {value}" for key, value in self.as_dict().items())


def run_client_dataset_job(raw: RawData, options: ClientDatasetOptions) -> Summary:
    """Prepares a client dataset, or finds that it is already there.

    Raises:
      DataError: a file cannot be read; more than `max_bad_fraction` of the input is unusable
        or no client is left; or the output is in the way. Nothing is written under the output's name then.
    """
    output = Path(options.output).absolute()
    parameters = _parameters(raw, options)
    sources = tuple(FileRecord.of(raw.folder, name) for name in tqdm(raw.files, desc="hash sources", unit="file"))
    config_hash = _config_hash(parameters, sources)
    finished = _finished_dataset(output, config_hash, options.overwrite)
    if finished is not None:
        _LOGGER.warning("%s already holds this dataset (same input and options): skipped", output)
        return Summary(output, finished, skipped=True)
    with staging_folder(output) as staging:
        with progress_bar(staging, len(sources), options.num_shards):
            result = _build_pipeline(raw, options, staging).run()
            result.wait_until_finish()
        errors = source_errors(staging)
        if errors:
            more = f" (and {len(errors) - 1} more unusable files)" if len(errors) > 1 else ""
            raise DataError(errors[0] + more)
        counts = collect_counts(result)
        _check_quality(options, counts, staging, output)
        manifest = _describe(options, parameters, sources, config_hash, counts, staging)
        manifest.save(staging)
        publish(staging, output)
    return Summary(output, manifest, skipped=False)


def _build_pipeline(raw: RawData, options: ClientDatasetOptions, staging: Path) -> beam.Pipeline:
    num_shards, seed = options.num_shards, options.seed
    pipeline = beam.Pipeline(options=PipelineOptions([f"--runner={options.runner}", *options.pipeline_args]))
    resolved = (
        pipeline
        | "Sources" >> beam.Create(raw.files)
        # Without it, a runner may fuse reading into one worker.
        | "SpreadSources" >> beam.Reshuffle()
        | "ReadUsers" >> beam.ParDo(ReadUsers(raw, staging))
        | "GroupCopies" >> beam.GroupByKey()
        | "ResolveDuplicates" >> beam.ParDo(ResolveDuplicates()).with_outputs(DEAD_LETTERS, main="users")
    )
    validated = resolved["users"] | "ValidateExamples" >> beam.ParDo(
        ValidateExamples(ExampleRule(math.prod(options.input_shape), options.num_classes, raw.are_images))
    ).with_outputs(DEAD_LETTERS, main="clients")
    clients = validated["clients"] | "SplitAndEncode" >> beam.ParDo(
        SplitAndEncode(
            SplitRule(options.test_fraction, options.validation_fraction, options.exact_split, seed),
            options.min_examples_per_client,
            num_shards,
        )
    )
    # A shard without clients is written too, empty: a gap in the numbers would look like a lost file.
    every_shard = pipeline | "EveryShard" >> beam.Create([(shard, []) for shard in range(num_shards)])
    _ = (
        (clients, every_shard)
        | "Shards" >> beam.Flatten()
        | "GroupByShard" >> beam.GroupByKey()
        | "WriteShard" >> beam.ParDo(WriteShard(staging, num_shards))
        | "OneIndex" >> beam.WithKeys(None)
        | "GroupIndex" >> beam.GroupByKey()
        | "WriteIndex" >> beam.ParDo(WriteIndex(staging))
    )

    def letter_shard(letter: DeadLetter) -> int:
        return shard_of(letter.client, num_shards, seed)

    _ = (
        (resolved[DEAD_LETTERS], validated[DEAD_LETTERS])
        | "DeadLetters" >> beam.Flatten()
        | "KeyDeadLetters" >> beam.WithKeys(letter_shard)
        | "GroupDeadLetters" >> beam.GroupByKey()
        | "WriteDeadLetters" >> beam.ParDo(WriteDeadLetters(staging, num_shards))
    )
    return pipeline


def _parameters(raw: RawData, options: ClientDatasetOptions) -> dict[str, Any]:
    """All that decides the content besides the files: the options, and what the raw data say of themselves."""
    unused = {"test_fraction": None} if raw.has_test_examples else {}
    return {**options.parameters(), **unused, "source": raw.source, **raw.parameters}


def _config_hash(parameters: dict[str, Any], sources: tuple[FileRecord, ...]) -> str:
    content = {
        "format_version": FORMAT_VERSION,
        "parameters": parameters,
        "sources": [dataclasses.asdict(source) for source in sources],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _finished_dataset(output: Path, config_hash: str, overwrite: bool) -> Manifest | None:
    """The dataset at `output` if it is the one asked for, None if `output` is free or may be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    # Only what is recognisably a dataset is ever replaced: `--output ~ --overwrite` must not delete a home folder.
    if not ((output / SUCCESS_FILE).is_file() and (output / MANIFEST_FILE).is_file()):
        raise DataError(f"{output}: exists and is not a client dataset; choose another --output or remove it yourself")
    if overwrite:
        return None
    manifest = Manifest.load(output)
    if manifest.config_hash != config_hash:
        raise DataError(
            f"{output}: holds a dataset prepared from other input or with other options; "
            "choose another --output, or pass --overwrite to replace it"
        )
    return manifest


def _check_quality(options: ClientDatasetOptions, counts: Counts, staging: Path, output: Path) -> None:
    too_bad = counts.bad_fraction > options.max_bad_fraction
    if not too_bad and counts.kept.users:
        return
    kept_at = Path(options.dead_letters or output.with_name(f"{output.name}.dead_letters")).absolute()
    keep_dead_letters(staging, kept_at)
    problem = (
        f"{counts.bad_fraction:.1%} of {counts.read.examples} examples cannot be used "
        f"(max_bad_fraction is {options.max_bad_fraction:.1%})"
        if too_bad
        else f"no client is left of the {counts.read.users} users read"
    )
    raise DataError(f"{options.input}: {problem}; {counts.describe_dropped()}; dead letters are kept in {kept_at}")


def _describe(
    options: ClientDatasetOptions,
    parameters: dict[str, Any],
    sources: tuple[FileRecord, ...],
    config_hash: str,
    counts: Counts,
    staging: Path,
) -> Manifest:
    """Makes the manifest from what lies on disk, and checks that against the metrics."""
    clients: dict[str, dict[str, int]] = {}
    for row in pyarrow.parquet.read_table(staging / INDEX_FILE).to_pylist():
        clients.setdefault(row["client_id"], dict.fromkeys(SPLITS, 0))[row["split"]] = row["num_examples"]
    num_examples = {split: sum(by_split[split] for by_split in clients.values()) for split in SPLITS}
    if (len(clients), sum(num_examples.values())) != (counts.kept.users, counts.kept.examples):
        raise RuntimeError(f"the index holds {len(clients)} clients and {num_examples}, but {counts.kept} were kept")
    shards = (shard_name(shard, options.num_shards) for shard in range(options.num_shards))
    return Manifest(
        features=FeatureSpec.of(tuple(options.input_shape), options.num_classes),
        seed=options.seed,
        parameters=parameters,
        sources=sources,
        config_hash=config_hash,
        read=counts.read,
        kept=counts.kept,
        dropped={reason.value: tally for reason, tally in counts.dropped.items()},
        num_examples=num_examples,
        clients=clients,
        shards=tuple(FileRecord.of(staging, name) for name in shards),
        index=FileRecord.of(staging, INDEX_FILE),
    )
