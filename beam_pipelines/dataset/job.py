"""Runs any job that writes a client dataset: runs the stages, checks the counts, publishes the dataset."""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow

import tff_pdp
from beam_pipelines.dataset.accounting import EXAMPLES, Counts, add_up
from beam_pipelines.dataset.staging import (
    is_half_published,
    keep_dead_letters,
    publish,
    read_dead_letters,
    shard_name,
    staging_folder,
    write_index,
)
from beam_pipelines.engine.stages import Stage
from beam_pipelines.options import JobOptions, Summary
from beam_pipelines.records import OF_CLIENTS, DeadLetter
from tff_pdp.data.manifest import (
    FORMAT_VERSION,
    INDEX_FILE,
    MANIFEST_FILE,
    SPLITS,
    SUCCESS_FILE,
    FeatureSpec,
    FileRecord,
    Manifest,
    RowInfluence,
)
from tff_pdp.errors import DataError

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DatasetJob:
    """Job that is ready to run.

    Attributes:
      parameters: everything, besides the input files, that decides the dataset's content; JSON values.
      sources: names and hashes of the input files.
      features: shape and types of the written examples.
      num_shards: number of shards that the last stage writes.
      stages: stages of the job, which write the shards and dead letters.
      row_influence: bound on how many rows one person or pair can change; None if rows are independent.
      class_names: name of each class; None if classes have numbers only.
      treated_as_public: constants taken from the examples of all clients, as in the manifest.
    """

    parameters: Mapping[str, Any]
    sources: tuple[FileRecord, ...]
    features: FeatureSpec
    num_shards: int
    stages: tuple[Stage, ...]
    row_influence: RowInfluence | None = None
    class_names: tuple[str, ...] | None = None
    treated_as_public: tuple[str, ...] = ()

    def config_hash(self) -> str:
        """Hashes everything that decides the dataset's content; jobs that write the same dataset have equal hashes."""
        content = {
            "format_version": FORMAT_VERSION,
            "parameters": self.parameters,
            "sources": [dataclasses.asdict(source) for source in self.sources],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run_dataset_job(job: DatasetJob, options: JobOptions) -> Summary:
    """Writes a client dataset, unless the output already contains that dataset.

    Raises:
      DataError: a file cannot be read; more than `max_bad_fraction` of the input is unusable; no client is left; or the
        output exists and may not be replaced. After an error, nothing has been written under the output's name.
    """
    # Imports Beam, which the description of a job does not need.
    from beam_pipelines.engine.run import run_stages

    output = Path(options.output).absolute()
    config_hash = job.config_hash()
    finished = _finished_dataset(output, config_hash, options.overwrite)
    if finished is not None and not is_half_published(output):
        return _skipped(output, finished)
    is_staged = options.exchange == "files"
    with staging_folder(output, f"{config_hash} {tff_pdp.__version__}" if is_staged else "") as staging:
        # Checked again: before this process held the staging folder, another process may have finished or been killed.
        finished = _finished_dataset(output, config_hash, options.overwrite)
        if finished is not None:
            return _skipped(output, finished)
        flags = [f"--runner={options.runner}", *options.pipeline_args]
        counts = add_up(run_stages(job.stages, staging, is_staged=is_staged, flags=flags))
        _check_quality(options, counts, staging, output)
        manifest = _describe(job, options.seed, config_hash, counts, staging)
        manifest.save(staging)
        publish(staging, output)
    return Summary(output, manifest, skipped=False)


def _skipped(output: Path, manifest: Manifest) -> Summary:
    _LOGGER.warning("%s already holds this dataset (same input and options): skipped", output)
    return Summary(output, manifest, skipped=True)


def _finished_dataset(output: Path, config_hash: str, overwrite: bool) -> Manifest | None:
    """Returns the manifest at `output` if the job would write the same; None if `output` is free or may be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    # Only a dataset is ever replaced: `--output ~ --overwrite` must not delete a home folder.
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
    letters = list(read_dead_letters(staging))
    keep_dead_letters(staging, kept_at)
    if too_bad:
        problem = (
            f"{bad_fraction:.1%} of {worst.read} {kind if kind == EXAMPLES else f'rows of {kind}'} cannot be used "
            f"(max_bad_fraction is {options.max_bad_fraction:.1%})"
        )
    else:
        kind, problem = EXAMPLES, f"no client is left of the {counts.read.users} users read"
    raise DataError(
        f"{options.input}: {problem}; {counts.describe_dropped(kind)}{_examples_of(letters)}; dead letters are kept in "
        f"{kept_at}"
    )


# Number of reasons of which an error shows a record.
_REASONS_SHOWN = 3


def _examples_of(letters: Sequence[DeadLetter]) -> str:
    """Describes one dead letter of each of the most frequent reasons; empty without letters that have a value."""
    # Clients that are left out by a rule are the reason only where nothing was bad.
    bad = [letter for letter in letters if letter.raw and letter.reason.is_bad_input]
    shown_of = bad or [letter for letter in letters if letter.raw]
    first = {letter.reason: letter for letter in reversed(shown_of)}
    frequent = Counter(letter.reason for letter in shown_of).most_common(_REASONS_SHOWN)
    shown = [f"{reason}: {first[reason].text()}" for reason, _ in frequent]
    return f"; for example {' | '.join(shown)}" if shown else ""


def _left_out(letters: Iterable[DeadLetter]) -> dict[str, tuple[str, ...]]:
    """Returns the sorted names of the clients that were left out as a whole, by reason."""
    names: dict[str, set[str]] = {}
    for letter in letters:
        if letter.example is None and letter.reason in OF_CLIENTS and letter.client:
            names.setdefault(letter.reason.value, set()).add(letter.client)
    return {reason: tuple(sorted(found)) for reason, found in sorted(names.items())}


def _describe(job: DatasetJob, seed: int, config_hash: str, counts: Counts, staging: Path) -> Manifest:
    """Makes the manifest from the files on disk, and checks the files against the counts of the tasks."""
    clients = _clients(write_index(staging, job.num_shards))
    num_examples = {split: sum(by_split[split] for by_split in clients.values()) for split in SPLITS}
    if (len(clients), sum(num_examples.values())) != (counts.kept.users, counts.kept.examples):
        raise RuntimeError(f"the index has {len(clients)} clients and {num_examples}, but tasks counted {counts.kept}")
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
        class_names=job.class_names,
        left_out=_left_out(read_dead_letters(staging)),
        treated_as_public=job.treated_as_public,
    )


def _clients(index: pyarrow.Table) -> dict[str, dict[str, int]]:
    clients: dict[str, dict[str, int]] = {}
    columns = (index[name].to_pylist() for name in ("client_id", "split", "num_examples"))
    for client, split, number in zip(*columns, strict=True):
        clients.setdefault(client, dict.fromkeys(SPLITS, 0))[split] += number
    return clients
