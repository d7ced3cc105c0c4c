"""Sinks of a client dataset: shards, their index, and dead letters, all byte-deterministic."""

import dataclasses
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import apache_beam as beam
import pyarrow
import pyarrow.parquet

from beam_pipelines.schema import ClientSplit, DeadLetter, IndexRow
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, INDEX_FILE, SHARD_FOLDER

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
    """Name of a shard file, relative to the dataset."""
    return f"{SHARD_FOLDER}/part-{shard:05d}-of-{num_shards:05d}.tfrecord"


class WriteShard(beam.DoFn):
    """`(shard, [client's splits, ...])` -> the shard's file, and an `IndexRow` for each client and split in it."""

    def __init__(self, dataset: Path, num_shards: int):
        self._dataset = dataset
        self._num_shards = num_shards

    def process(self, element: tuple[int, Iterable[list[ClientSplit]]]) -> Iterator[IndexRow]:
        """Writes one shard."""
        shard, clients = element
        splits = sorted((part for parts in clients for part in parts), key=lambda part: (part.client, part.split))
        _write(self._dataset / shard_name(shard, self._num_shards), (part.records for part in splits))
        offset = 0
        for part in splits:
            yield IndexRow(part.client, part.split, shard, offset, len(part.records), part.num_examples)
            offset += len(part.records)


class WriteIndex(beam.DoFn):
    """All index rows -> `index.parquet`, sorted by client and split."""

    def __init__(self, dataset: Path):
        self._dataset = dataset

    def process(self, element: tuple[None, Iterable[IndexRow]]) -> None:
        """Writes the index."""
        rows = sorted(element[1], key=lambda row: (row.client_id, row.split))
        table = pyarrow.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema=_INDEX_SCHEMA)
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink)
        _write(self._dataset / INDEX_FILE, [sink.getvalue().to_pybytes()])


class WriteDeadLetters(beam.DoFn):
    """`(shard, dead letters)` -> one JSON-lines file."""

    def __init__(self, dataset: Path, num_shards: int):
        self._dataset = dataset
        self._num_shards = num_shards

    def process(self, element: tuple[int, Iterable[DeadLetter]]) -> None:
        """Writes the dead letters of the clients of one shard."""
        shard, letters = element
        lines = sorted(letter.to_json() + "\n" for letter in letters)
        path = self._dataset / DEAD_LETTER_FOLDER / f"part-{shard:05d}-of-{self._num_shards:05d}.jsonl"
        _write(path, (line.encode() for line in lines))


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes a file under a name of its own and renames it: a runner may try one bundle twice, even at once."""
    attempt = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with open(attempt, "wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    attempt.rename(path)
