"""What all jobs that write a client dataset have in common: run the stages, judge the counts, publish."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow

import tff_pdp
from beam_pipelines.dataset.accounting import EXAMPLES, Counts, add_up
from beam_pipelines.dataset.shards import shard_name, write_index
from beam_pipelines.dataset.staging import keep_dead_letters, publish, staging_folder
from beam_pipelines.engine.run import Engine, run_stages
from beam_pipelines.stages import Stage
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
from tff_pdp.data.row_influence import RowInfluence
from tff_pdp.errors import DataError

_LOGGER = logging.getLogger(__name__)
EXCHANGES = ("files", "runner")


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What every job is told.

    Attributes:
      input: where the raw data lie, as the user named it; for messages.
      output: folder to write; every worker must see it under this name.
      seed: keys whatever the job decides by hash.
      max_bad_fraction: the job fails if more than this share of the input cannot be used.
      dead_letters: where a failing job keeps its dead letters; default: `<output>.dead_letters`.
      overwrite: replace a finished dataset that was prepared differently.
      exchange: how what one stage makes gets to the next: `files`, stage after stage, in bounded memory, and a job that
        was killed goes on where it was; or `runner`, all stages as one pipeline, for a cluster.
      runner: the Beam runner. Not DirectRunner, which may download Prism, another runner, and use that.
      pipeline_args: further Beam flags, e.g. `("--direct_num_workers=2", ...)`.

    Raises:
      DataError: a value is out of range.
    """

    input: str | os.PathLike[str]
    output: str | os.PathLike[str]
    seed: int = 0
    max_bad_fraction: float = 0.01
    dead_letters: str | os.PathLike[str] | None = None
    overwrite: bool = False
    exchange: str = "files"
    runner: str = "FnApiRunner"
    pipeline_args: tuple[str, ...] = ()

    def __post_init__(self):
        self._require(self.seed >= 0, "seed must be at least 0")
        self._require(0 <= self.max_bad_fraction <= 1, "max_bad_fraction must lie in [0, 1]")
        self._require(self.exchange in EXCHANGES, f"exchange must be one of {', '.join(EXCHANGES)}")

    def parameters(self) -> dict[str, Any]:
        """The options that decide what the dataset holds, as JSON has them; where and how it is computed does not."""
        elsewhere = {"input", "output", "dead_letters", "overwrite", "exchange", "runner", "pipeline_args"}
        parameters = {key: value for key, value in dataclasses.asdict(self).items() if key not in elsewhere}
        return json.loads(json.dumps(parameters))

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise DataError(f"{rule}; got {self.parameters()}")


@dataclasses.dataclass(frozen=True)
class DatasetJob:
    """One job, ready to run.

    Attributes:
      parameters: all that decides the content besides the input files, as JSON has it.
      sources: the input files.
      features: of the examples it writes.
      num_shards: how many shards its last stage writes.
      stages: they write the shards and dead letters.
      row_influence: what rows made of a contact graph promise.
    """

    parameters: Mapping[str, Any]
    sources: tuple[FileRecord, ...]
    features: FeatureSpec
    num_shards: int
    stages: tuple[Stage, ...]
    row_influence: RowInfluence | None = None

    def config_hash(self) -> str:
        """Equal for jobs that write the same dataset."""
        content = {
            "format_version": FORMAT_VERSION,
            "parameters": self.parameters,
            "sources": [dataclasses.asdict(source) for source in self.sources],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a job did. `skipped` means that the output already held exactly this dataset."""

    output: Path
    manifest: Manifest
    skipped: bool

    def as_dict(self) -> dict[str, Any]:
        """The counts and the folder, flat, for printing or JSON."""
        manifest = self.manifest
        held_out = sum(not counts["train"] for counts in manifest.clients.values())
        return {
            "clients": manifest.kept.users,
            **({"clients_without_train_examples": held_out} if held_out else {}),
            **{f"{split}_examples": manifest.num_examples[split] for split in SPLITS},
            "examples_read": manifest.read.examples,
            **{f"dropped ({reason})": tally.examples for reason, tally in sorted(manifest.dropped.items())},
            **{
                f"{table} {what}": number
                for table, counts in sorted(manifest.rows.items())
                for what, number in (
                    ("read", counts.read),
                    ("kept", counts.kept),
                    *((f"dropped ({reason})", dropped) for reason, dropped in sorted(counts.dropped.items())),
                )
            },
            "dead_letters": str(self.output / DEAD_LETTER_FOLDER),
            "output": str(self.output),
            "skipped": self.skipped,
        }

    def table(self) -> str:
        """The same as aligned lines of text."""
        return "\n".join(f"{key:<48} {value}" for key, value in self.as_dict().items())


def run_dataset_job(job: DatasetJob, options: JobOptions) -> Summary:
    """Writes a client dataset, or finds that it is already there.

    Raises:
      DataError: a file cannot be read; more than `max_bad_fraction` of the input is unusable or no client is left; or
        the output is in the way. Nothing is written under the output's name then.
    """
    output = Path(options.output).absolute()
    config_hash = job.config_hash()
    finished = _finished_dataset(output, config_hash, options.overwrite)
    if finished is not None:
        return _skipped(output, finished)
    is_staged = options.exchange == "files"
    with staging_folder(output, f"{config_hash} {tff_pdp.__version__}" if is_staged else "") as staging:
        # Again: until this folder was locked, another job may have been writing the output.
        finished = _finished_dataset(output, config_hash, options.overwrite)
        if finished is not None:
            return _skipped(output, finished)
        engine = Engine(options.runner, tuple(options.pipeline_args), is_staged)
        counts = add_up(run_stages(job.stages, engine, staging))
        _check_quality(options, counts, staging, output)
        manifest = _describe(job, options.seed, config_hash, counts, staging)
        manifest.save(staging)
        publish(staging, output)
    return Summary(output, manifest, skipped=False)


def _skipped(output: Path, manifest: Manifest) -> Summary:
    _LOGGER.warning("%s already holds this dataset (same input and options): skipped", output)
    return Summary(output, manifest, skipped=True)


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


def _check_quality(options: JobOptions, counts: Counts, staging: Path, output: Path) -> None:
    kind, worst, bad_fraction = counts.worst_input()
    too_bad = bad_fraction > options.max_bad_fraction
    if not too_bad and counts.kept.users:
        return
    kept_at = Path(options.dead_letters or output.with_name(f"{output.name}.dead_letters")).absolute()
    keep_dead_letters(staging, kept_at)
    if too_bad:
        problem = (
            f"{bad_fraction:.1%} of {worst.read} {kind if kind == EXAMPLES else f'rows of {kind}'} cannot be used "
            f"(max_bad_fraction is {options.max_bad_fraction:.1%})"
        )
    else:
        kind, problem = EXAMPLES, f"no client is left of the {counts.read.users} users read"
    raise DataError(f"{options.input}: {problem}; {counts.describe_dropped(kind)}; dead letters are kept in {kept_at}")


def _describe(job: DatasetJob, seed: int, config_hash: str, counts: Counts, staging: Path) -> Manifest:
    """Makes the manifest from what lies on disk, and checks that against what the tasks counted."""
    clients = _clients(write_index(staging, job.num_shards))
    num_examples = {split: sum(by_split[split] for by_split in clients.values()) for split in SPLITS}
    if (len(clients), sum(num_examples.values())) != (counts.kept.users, counts.kept.examples):
        raise RuntimeError(f"the index holds {len(clients)} clients and {num_examples}, but {counts.kept} were kept")
    shards = (shard_name(shard, job.num_shards) for shard in range(job.num_shards))
    return Manifest(
        features=job.features,
        seed=seed,
        parameters=job.parameters,
        sources=job.sources,
        config_hash=config_hash,
        read=counts.read,
        kept=counts.kept,
        dropped=counts.dropped,
        num_examples=num_examples,
        clients=clients,
        shards=tuple(FileRecord.of(staging, name) for name in shards),
        index=FileRecord.of(staging, INDEX_FILE),
        row_influence=job.row_influence,
        rows=counts.rows,
    )


def _clients(index: pyarrow.Table) -> dict[str, dict[str, int]]:
    clients: dict[str, dict[str, int]] = {}
    columns = (index[name].to_pylist() for name in ("client_id", "split", "num_examples"))
    for client, split, number in zip(*columns, strict=True):
        clients.setdefault(client, dict.fromkeys(SPLITS, 0))[split] += number
    return clients
