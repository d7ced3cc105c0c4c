"""Describes a job: stages of tasks, and the pieces of tables that go from one stage to a later stage.

Pieces travel as bytes between the steps of one pipeline, and in files between pipelines. The bytes of a piece are an
Arrow IPC stream of one batch. The metadata of the batch's schema name the piece's table and origin (stage, task, and
order in the task). A file contains the pieces of one task, then a table of contents `int64 [pieces, 4]` (number of the
table in the stage's `gives`, partition, offset, length), then the number of pieces as int64.
"""

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from beam_pipelines.records import DeadLetter
from tff_pdp.files import atomic_file, read_at


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a table, sent to the task of one partition."""

    table: str
    partition: int
    batch: pyarrow.RecordBatch


@dataclasses.dataclass
class TaskContext:
    """Inputs and counts of a running task.

    Attributes:
      number: number of the task in the stage.
      folder: staging folder of the job; a task writes files there atomically, under names that no other task uses.
      tables: batches that earlier stages sent to this task's partition, by table. The batches are sorted by stage, task
        and order of creation, so that the order does not depend on the engine.
      counts: numbers of records read, kept and dropped, for `beam_pipelines.dataset.accounting`.
      letters: dead letters, which are written into the job's folder of dead letters if the task succeeds.
    """

    number: int
    folder: Path
    tables: Mapping[str, list[pyarrow.RecordBatch]]
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    letters: list[DeadLetter] = dataclasses.field(default_factory=list)

    def count(self, record: str, what: str, number: int = 1) -> None:
        """Counts `number` records of the kind `record`.

        The kind is `users`, `examples`, or a name of rows, such as the name of a table; `what` is `read`, `kept`, or
        the reason for dropping.
        """
        if number:
            self.counts[f"{record}/{what}"] += int(number)


Work = Callable[[Any, TaskContext], Iterable[Piece]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Stage of tasks that do not depend on each other.

    Attributes:
      name: unique name, also the name of a folder.
      tasks: a small picklable value for each task; in a stage that reads tables, the numbers of partitions (0, 1, ...).
      work: picklable function `(task, context) -> pieces`. The function may run twice for a task, even at the same
        time, and raises DataError for input that the job cannot use; the user sees the message.
      gives: names of the tables that the stage's pieces belong to.
      takes: names of the tables from earlier stages that the tasks read.
      after: names of the earlier stages whose files the tasks read; these stages must be finished first.
    """

    name: str
    tasks: tuple[Any, ...]
    work: Work
    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def partition_stage(name: str, num_partitions: int, work: Work, takes: tuple[str, ...], **others: Any) -> Stage:
    """Builds a stage with a task for each partition of the tables in `takes`; `others` are passed to `Stage`."""
    return Stage(name, tuple(range(num_partitions)), work, takes=takes, **others)


_TABLE, _ORIGIN = b"table", b"origin"


def encode_piece(piece: Piece, *origin: int) -> pyarrow.Buffer:
    """Packs a piece as bytes, with `origin` (stage, task, order in the task), by which pieces are sorted later."""
    metadata = {_TABLE: piece.table.encode(), _ORIGIN: ".".join(map(str, origin))}
    batch = piece.batch.replace_schema_metadata(metadata)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def decode_pieces(encoded: Iterable[bytes]) -> dict[str, list[pyarrow.RecordBatch]]:
    """Unpacks pieces; returns the batches of each table, sorted by origin. Empty bytes are ignored."""
    found: list[tuple[list[int], str, pyarrow.RecordBatch]] = []
    for content in encoded:
        if content:
            with pyarrow.ipc.open_stream(pyarrow.py_buffer(content)) as stream:
                batch = stream.read_next_batch()
            metadata = batch.schema.metadata
            origin = [int(number) for number in metadata[_ORIGIN].split(b".")]
            found.append((origin, metadata[_TABLE].decode(), batch.replace_schema_metadata()))
    tables: dict[str, list[pyarrow.RecordBatch]] = {}
    for _, table, batch in sorted(found, key=lambda item: item[0]):
        tables.setdefault(table, []).append(batch)
    return tables


def write_pieces(path: Path, pieces: Iterable[Piece], stage: int, task: int, gives: Sequence[str]) -> None:
    """Writes the pieces of a task (given by stage and task number) to a file; `gives` names the stage's tables."""
    contents: list[tuple[int, int, int, int]] = []
    offset = 0
    # The file is only for later stages of this job, and a power cut ends those too.
    with atomic_file(path, is_durable=False) as file:
        for order, piece in enumerate(pieces):
            encoded = encode_piece(piece, stage, task, order)
            file.write(encoded)
            contents.append((gives.index(piece.table), piece.partition, offset, encoded.size))
            offset += encoded.size
        file.write(np.array(contents, "<i8").tobytes())
        file.write(np.array([len(contents)], "<i8").tobytes())


def read_pieces(path: Path, tables: Iterable[int], partition: int) -> Iterator[bytes]:
    """Reads those pieces of a file that are of some tables and for one partition; `tables` are positions in `gives`."""
    status = path.stat()
    contents = _contents(path, status.st_ino, status.st_mtime_ns)
    chosen = contents[(contents[:, 1] == partition) & np.isin(contents[:, 0], list(tables))]
    if not len(chosen):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _, _, offset, length in chosen.tolist():
            yield read_at(descriptor, offset, length)
    finally:
        os.close(descriptor)


@functools.lru_cache(maxsize=8192)
def _contents(path: Path, *version: int) -> np.ndarray:
    """Reads a file's table of contents and caches it: many tasks of a stage read the same files."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - 8)
        (count,) = np.frombuffer(file.read(8), "<i8").tolist()
        file.seek(size - 8 - 32 * count)
        return np.frombuffer(file.read(32 * count), "<i8").reshape(count, 4)
