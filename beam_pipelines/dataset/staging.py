"""Manages the folder in which a job prepares its output; the folder of a killed job never looks complete.

Jobs with equal input and options write shards and an index of equal bytes.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from beam_pipelines.engine.tasks import REPORT_FOLDER
from beam_pipelines.records import DeadLetter, Reason
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, INDEX_FILE, SHARD_FOLDER, SUCCESS_FILE, mark_finished
from tff_pdp.errors import DataError, UserError
from tff_pdp.files import atomic_file, is_attempt, naming, sync, write_atomically
from tff_pdp.lock import only_writer

# Folder of the index of each shard, until they are joined to one index.
INDEX_FOLDER = ".index"
_RESUME_FILE = ".resume"
_PUBLISHED_FOLDERS = (SHARD_FOLDER, DEAD_LETTER_FOLDER)


@contextlib.contextmanager
def staging_folder(output: Path, resume_key: str) -> Iterator[Path]:
    """Yields a hidden folder beside `output` for this process alone, and removes the folder when the job has ended.

    After an error that the user can solve, the folder is removed, too. If a job is killed, or has a key and fails with
    another error, the folder stays: the next job with an equal key uses the files, a job with another key removes the
    files. If an earlier job was killed while publishing its dataset, this function first completes the publication.

    Args:
      output: folder that the job will write.
      resume_key: text that is equal for jobs that may use each other's files; empty for a job that starts anew.

    Raises:
      DataError: another job is writing the same output.
    """
    staging = output.with_name(f".{output.name}.unfinished")
    with only_writer(output):
        _end_publishing(staging, output)
        staging.mkdir(exist_ok=True)
        keeps = False
        try:
            _clear_unless(staging, resume_key)
            yield staging
        except UserError:
            raise
        except BaseException:
            keeps = bool(resume_key)
            raise
        finally:
            if not keeps:
                shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, output: Path) -> None:
    """Marks a dataset as finished and renames its folder to `output`; an older dataset of this name is replaced."""
    # Removed first: a job that resumes needs all of the other files.
    remove(staging / _RESUME_FILE)
    published = {*_PUBLISHED_FOLDERS}
    for leftover in list(staging.iterdir()):
        if leftover.is_dir() and leftover.name not in published:
            remove(leftover)
    for path in [path for path in staging.rglob("*") if is_attempt(path)]:
        remove(path)
    mark_finished(staging)
    if output.exists():
        # The old dataset is renamed first: half-removed under the output's name, it could look complete.
        remove(_replaced(output))
        output.rename(_replaced(output))
    _end_publishing(staging, output)


def is_half_published(output: Path) -> bool:
    """Tells whether a job was killed while replacing the dataset at `output`; the next job ends this replacement."""
    return _replaced(output).exists()


def _end_publishing(staging: Path, output: Path) -> None:
    """Renames the newest complete dataset to `output` if nothing has that name, and removes the replaced dataset."""
    if not output.exists():
        complete = [folder for folder in (staging, _replaced(output)) if (folder / SUCCESS_FILE).is_file()]
        if not complete:
            return
        complete[0].rename(output)
        sync(output.parent)
    remove(_replaced(output))


def _replaced(output: Path) -> Path:
    return output.with_name(f".{output.name}.replaced")


def keep_dead_letters(staging: Path, destination: Path) -> None:
    """Moves a failing job's dead letters to `destination`, and replaces the dead letters of an earlier job there.

    Raises:
      DataError: the destination exists and contains anything but dead letters (`.jsonl` files).
    """
    if destination.exists() and not (
        destination.is_dir() and all(path.suffix == ".jsonl" for path in destination.iterdir())
    ):
        raise DataError(f"{destination}: not a folder of dead letters only; choose another --dead_letters or remove it")
    remove(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(staging / DEAD_LETTER_FOLDER, destination)


def read_dead_letters(staging: Path) -> Iterator[DeadLetter]:
    """Reads the dead letters that the tasks of a job have written, in the order of the files' names."""
    for path in sorted((staging / DEAD_LETTER_FOLDER).glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                fields = json.loads(line)
                yield DeadLetter(**{**fields, "reason": Reason(fields["reason"])})


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with its content; does nothing if the path does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear_unless(staging: Path, resume_key: str) -> None:
    """Prepares the folder, and empties it unless its content has the same key."""
    # Files between stages are not flushed to disk: after a restart of the machine they may exist and be empty.
    boot = Path("/proc/sys/kernel/random/boot_id")
    key = f"{resume_key} {boot.read_text().strip() if boot.exists() else ''}"
    path = staging / _RESUME_FILE
    if not (resume_key and path.is_file() and path.read_text() == key):
        for leftover in staging.iterdir():
            remove(leftover)
        with naming(path):
            path.write_text(key)
    for name in (*_PUBLISHED_FOLDERS, INDEX_FOLDER, REPORT_FOLDER):
        (staging / name).mkdir(exist_ok=True)


_INDEX_SCHEMA = pyarrow.schema(
    [
        ("client_id", pyarrow.string()),
        ("split", pyarrow.string()),
        ("shard", pyarrow.int32()),
        ("offset", pyarrow.int64()),
        ("nbytes", pyarrow.int64()),
        ("num_examples", pyarrow.int64()),
    ]
)


def shard_name(shard: int, num_shards: int) -> str:
    """Returns the path of a shard file, relative to the dataset's folder."""
    return f"{SHARD_FOLDER}/part-{shard:05d}-of-{num_shards:05d}.tfrecord"


@dataclasses.dataclass(frozen=True)
class Extent:
    """Examples of one client in one split, as framed TFRecords to be appended to a shard."""

    client: str
    split: str
    records: bytes
    num_examples: int


def write_shard(staging: Path, shard: int, num_shards: int, extents: Iterable[Extent]) -> None:
    """Writes a shard and the shard's index, one extent at a time; `extents` are sorted by client and split."""
    rows, offset = [], 0
    with atomic_file(staging / shard_name(shard, num_shards)) as file:
        for extent in extents:
            file.write(extent.records)
            size = len(extent.records)
            values = (extent.client, extent.split, shard, offset, size, extent.num_examples)
            rows.append(dict(zip(_INDEX_SCHEMA.names, values, strict=True)))
            offset += size
    index = pyarrow.Table.from_pylist(rows, schema=_INDEX_SCHEMA)
    _write_rows(staging / INDEX_FOLDER / f"{shard:05d}.parquet", index)


def write_index(staging: Path, num_shards: int) -> pyarrow.Table:
    """Joins the indices of all shards into one, sorted by client, split and shard; writes and returns the new index."""
    parts = [pyarrow.parquet.read_table(staging / INDEX_FOLDER / f"{shard:05d}.parquet") for shard in range(num_shards)]
    order = [("client_id", "ascending"), ("split", "ascending"), ("shard", "ascending"), ("offset", "ascending")]
    index = pyarrow.concat_tables(parts).sort_by(order).combine_chunks()
    _write_rows(staging / INDEX_FILE, index)
    return index


def _write_rows(path: Path, table: pyarrow.Table) -> None:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    write_atomically(path, [sink.getvalue().to_pybytes()])
