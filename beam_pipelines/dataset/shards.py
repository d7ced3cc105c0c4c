"""Writes the files of a client dataset, byte-deterministic: shards, their index, and dead letters."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import pyarrow
import pyarrow.parquet

from beam_pipelines.dataset.staging import INDEX_FOLDER
from beam_pipelines.records import DeadLetter
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, INDEX_FILE, SHARD_FOLDER
from tff_pdp.files import atomic_file, write_atomically

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
    """Returns the name of a shard file, relative to the dataset."""
    return f"{SHARD_FOLDER}/part-{shard:05d}-of-{num_shards:05d}.tfrecord"


@dataclasses.dataclass(frozen=True)
class Extent:
    """Examples of one client and split as framed TFRecords, to be appended to a shard."""

    client: str
    split: str
    records: bytes
    num_examples: int


def write_shard(staging: Path, shard: int, num_shards: int, extents: Iterable[Extent]) -> None:
    """Writes a shard as its extents, sorted by client and split, are made, and the index of where they lie."""
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
    """Joins the indices of all shards to one, sorted by client, split and shard."""
    parts = [pyarrow.parquet.read_table(staging / INDEX_FOLDER / f"{shard:05d}.parquet") for shard in range(num_shards)]
    order = [("client_id", "ascending"), ("split", "ascending"), ("shard", "ascending"), ("offset", "ascending")]
    index = pyarrow.concat_tables(parts).sort_by(order).combine_chunks()
    _write_rows(staging / INDEX_FILE, index)
    return index


class DeadLetterFile:
    """The dead letters of one task, written when the `with` block ends; without letters there is no file."""

    def __init__(self, staging: Path, stage: str, task: int):
        self._path = staging / DEAD_LETTER_FOLDER / f"{stage}-{task:05d}.jsonl"
        self._lines: list[str] = []

    def add(self, letter: DeadLetter) -> None:
        """Adds a letter."""
        self._lines.append(letter.to_json())

    def add_all(self, letters: Iterable[DeadLetter]) -> None:
        """Adds letters."""
        for letter in letters:
            self.add(letter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None and self._lines:
            write_atomically(self._path, (f"{line}\n".encode() for line in sorted(self._lines)))


def _write_rows(path: Path, table: pyarrow.Table) -> None:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    write_atomically(path, [sink.getvalue().to_pybytes()])
