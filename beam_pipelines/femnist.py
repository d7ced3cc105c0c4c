"""The FEMNIST job: LEAF JSON in, a client dataset out (`tff_pdp.data.manifest` describes its folder)."""

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
from beam_pipelines.leaf import list_sources
from beam_pipelines.schema import DeadLetter
from beam_pipelines.transforms import (
    DEAD_LETTERS,
    ReadUsers,
    ResolveDuplicates,
    SplitAndEncode,
    ValidateExamples,
    shard_of,
)
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
class FemnistOptions:
    """What to prepare, and how.

    Attributes:
      input: folder of LEAF's unsplit `.json` or `.json.gz` files.
      output: folder to write; every worker must see it under this name.
      image_shape: height, width, channels of one image.
      num_classes: labels are integers in `[0, num_classes)`.
      test_fraction: expected share of each client's examples in `test`.
      validation_fraction: expected share in `validation`; the rest is `train`.
      min_examples_per_client: clients with fewer valid examples are dropped and counted.
      num_shards: number of shard files. One worker holds one shard in memory.
      seed: keys the split and the sharding.
      max_bad_fraction: the job fails if more than this share of the examples read cannot be used.
      dead_letters: where a failing job keeps its dead letters; default: `<output>.dead_letters`.
      overwrite: replace a finished dataset that was prepared differently.
      runner: the Beam runner. Not DirectRunner, which may download Prism, another runner, and use that.
      pipeline_args: further Beam flags, e.g. `("--direct_num_workers=2", ...)`.
    """

    input: str | os.PathLike[str]
    output: str | os.PathLike[str]
    image_shape: tuple[int, ...] = (28, 28, 1)
    num_classes: int = 62
    test_fraction: float = 0.2
    validation_fraction: float = 0.2
    min_examples_per_client: int = 10
    num_shards: int = 8
    seed: int = 0
    max_bad_fraction: float = 0.01
    dead_letters: str | os.PathLike[str] | None = None
    overwrite: bool = False
    runner: str = "FnApiRunner"
    pipeline_args: tuple[str, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """The options that decide what the dataset holds; where and how it is computed does not."""
        elsewhere = {"input", "output", "dead_letters", "overwrite", "runner", "pipeline_args"}
        parameters = {key: value for key, value in dataclasses.asdict(self).items() if key not in elsewhere}
        return {**parameters, "image_shape": list(self.image_shape)}


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


def run_femnist(options: FemnistOptions) -> Summary:
    """Prepares a client dataset, or finds that it is already there.

    Raises:
      DataError: an option is out of range; the input is missing or not LEAF JSON; more than `max_bad_fraction` of it
        is unusable or no client is left; or the output is in the way. Nothing is written under the output's name then.
    """
    _check_options(options)
    folder, output = Path(options.input), Path(options.output).absolute()
    names = list_sources(folder)
    sources = tuple(FileRecord.of(folder, name) for name in tqdm(names, desc="hash sources", unit="file"))
    config_hash = _config_hash(options, sources)
    finished = _finished_dataset(output, config_hash, options.overwrite)
    if finished is not None:
        _LOGGER.warning("%s already holds this dataset (same input and options): skipped", output)
        return Summary(output, finished, skipped=True)
    with staging_folder(output) as staging:
        with progress_bar(staging, len(sources), options.num_shards):
            result = _build_pipeline(options, names, staging).run()
            result.wait_until_finish()
        errors = source_errors(staging)
        if errors:
            more = f" (and {len(errors) - 1} more unusable files)" if len(errors) > 1 else ""
            raise DataError(errors[0] + more)
        counts = collect_counts(result)
        _check_quality(options, counts, staging, output)
        manifest = _describe(options, sources, config_hash, counts, staging)
        manifest.save(staging)
        publish(staging, output)
    return Summary(output, manifest, skipped=False)


def _build_pipeline(options: FemnistOptions, names: list[str], staging: Path) -> beam.Pipeline:
    num_shards, seed = options.num_shards, options.seed
    pipeline = beam.Pipeline(options=PipelineOptions([f"--runner={options.runner}", *options.pipeline_args]))
    resolved = (
        pipeline
        | "Sources" >> beam.Create(names)
        # Without it, a runner may fuse reading into one worker.
        | "SpreadSources" >> beam.Reshuffle()
        | "ReadUsers" >> beam.ParDo(ReadUsers(Path(options.input), staging))
        | "GroupCopies" >> beam.GroupByKey()
        | "ResolveDuplicates" >> beam.ParDo(ResolveDuplicates()).with_outputs(DEAD_LETTERS, main="users")
    )
    validated = resolved["users"] | "ValidateExamples" >> beam.ParDo(
        ValidateExamples(math.prod(options.image_shape), options.num_classes)
    ).with_outputs(DEAD_LETTERS, main="clients")
    clients = validated["clients"] | "SplitAndEncode" >> beam.ParDo(
        SplitAndEncode(
            options.test_fraction, options.validation_fraction, options.min_examples_per_client, num_shards, seed
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


def _check_options(options: FemnistOptions) -> None:
    fractions = (options.test_fraction, options.validation_fraction)
    rules: Iterable[tuple[bool, str]] = (
        (all(size >= 1 for size in options.image_shape), "image_shape needs positive sizes"),
        (options.num_classes >= 1, "num_classes must be at least 1"),
        (min(fractions) >= 0 and sum(fractions) < 1, "test_fraction and validation_fraction must leave room for train"),
        (options.min_examples_per_client >= 1, "min_examples_per_client must be at least 1"),
        (options.num_shards >= 1, "num_shards must be at least 1"),
        (0 <= options.max_bad_fraction <= 1, "max_bad_fraction must lie in [0, 1]"),
    )
    for holds, rule in rules:
        if not holds:
            raise DataError(f"{rule}; got {options.parameters()}")


def _config_hash(options: FemnistOptions, sources: tuple[FileRecord, ...]) -> str:
    content = {
        "format_version": FORMAT_VERSION,
        "parameters": options.parameters(),
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


def _check_quality(options: FemnistOptions, counts: Counts, staging: Path, output: Path) -> None:
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
    options: FemnistOptions, sources: tuple[FileRecord, ...], config_hash: str, counts: Counts, staging: Path
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
        features=FeatureSpec(tuple(options.image_shape), options.num_classes),
        seed=options.seed,
        parameters=options.parameters(),
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
