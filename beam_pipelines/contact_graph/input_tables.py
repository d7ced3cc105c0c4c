"""Reads a population's tables in chunks; returns columns as arrays, and a dead letter for each row it cannot read."""

import dataclasses
import functools
import gzip
import io
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from beam_pipelines.contact_graph.tables import STATE_NAMES, TABLES, paths_of, plain_type
from beam_pipelines.options import files_in
from beam_pipelines.records import DeadLetter, Reason
from tff_pdp.errors import DataError

# The type stubs do not know its functions.
_COMPUTE: Any = pyarrow.compute
# Number of uncompressed bytes that a task reads at a time.
_CHUNK_BYTES = 64 << 20
_LOGGER = logging.getLogger(__name__)
_LONGEST_HEADER = 1 << 20
# Largest share of rows that are not UTF-8; with more, the whole file cannot be read.
_MOST_OF_ANOTHER_ENCODING = 0.01
_INTEGER = r"^-?\d{1,19}(\.0*)?$"
_DECIMAL = r"^-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
# Columns whose names differ between releases of the challenge's data: found by position if the name is missing.
_BY_PLACE = {"population_network": tuple(TABLES["population_network"].names), "target": ("pid", "infected")}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Part of one file of a table: a row group of Parquet, a range of bytes of CSV, or a whole `.csv.gz` file."""

    table: str
    path: Path
    start: int
    stop: int

    @property
    def source(self) -> str:
        """Returns the file's name for dead letters, without the path of the population's folder."""
        return self.path.name if self.path.stem.startswith(self.table) else f"{self.table}/{self.path.name}"


@dataclasses.dataclass(frozen=True)
class InputRows:
    """Some rows of a table: columns as arrays of equal length, and dead letters of the rows that could not be read.

    Strings are object arrays; states of the disease are 0 (S), 1 (I) and 2 (R).
    """

    columns: Mapping[str, np.ndarray]
    letters: Sequence[DeadLetter]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def find_table(folder: Path, table: str, columns: Sequence[str]) -> tuple[Path, ...]:
    """Finds the files of a table and checks that each has the columns; returns `()` if there is no such table.

    Raises:
      DataError: the table exists twice, or a file cannot be read or lacks a column.
    """
    paths = paths_of(folder, table)
    if len(paths) > 1:
        raise DataError(f"{paths[0]}: {paths[1].name} is the same table; remove one of the two")
    if not paths:
        return ()
    files = paths
    if paths[0].is_dir():
        # Not data, but leftovers of other tools (`_SUCCESS`, `.part-0.csv.crc`).
        files = [path for path in files_in(paths[0]) if path.name[0] != "_"]
    for path in files:
        _places(path, table, columns)
        if path.suffix == ".csv" and not _ends_its_last_line(path):
            _LOGGER.warning("%s: the last line does not end with a line feed: was the file cut short?", path)
    return tuple(files)


def _ends_its_last_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read() in (b"", b"\n")


def chunks_of(table: str, files: Sequence[Path]) -> list[Chunk]:
    """Divides a table's files into chunks; each task reads one chunk."""
    chunks = []
    for path in files:
        if path.suffix == ".parquet":
            metadata = pyarrow.parquet.ParquetFile(path).metadata
            groups = range(metadata.num_row_groups)
            chunks += [Chunk(table, path, group, group + 1) for group in groups if metadata.row_group(group).num_rows]
        elif path.suffix == ".gz":
            chunks.append(Chunk(table, path, 0, path.stat().st_size))
        else:
            size = path.stat().st_size
            chunks += [
                Chunk(table, path, start, min(start + _CHUNK_BYTES, size)) for start in range(0, size, _CHUNK_BYTES)
            ]
    return chunks


def read_chunk(chunk: Chunk, columns: Sequence[str]) -> Iterator[InputRows]:
    """Reads columns of a chunk, some rows at a time. Rows with a missing or wrong value become dead letters.

    Raises:
      DataError: the file is damaged, or a column of a Parquet file has values outside the type in `TABLES`.
    """
    known = TABLES[chunk.table]
    # A column outside of the challenge's schema is read as text.
    schema = pyarrow.schema(
        [(name, plain_type(known.field(name).type) if name in known.names else pyarrow.string()) for name in columns]
    )
    places, header = _places(chunk.path, chunk.table, columns)
    try:
        if chunk.path.suffix == ".parquet":
            file = pyarrow.parquet.ParquetFile(chunk.path)
            groups, names = list(range(chunk.start, chunk.stop)), [header[place] for place in places]
            for batch in file.iter_batches(1 << 20, groups, columns=names):
                table = pyarrow.Table.from_batches([batch]).select(names).rename_columns(list(columns))
                yield _without_bad_rows(chunk, table.cast(schema, safe=True), table, [])
        else:
            for block in _text_blocks(chunk):
                yield _parse(chunk, block, schema, places, len(header))
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{chunk.path}: cannot be read as table {chunk.table}: {error}") from error


def read_table(folder: Path, table: str, columns: Sequence[str]) -> Iterator[Mapping[str, np.ndarray]]:
    """Reads columns of a whole table, some rows at a time; files are read in the order of their names.

    Raises:
      DataError: the table, a column or a value is missing, or a value has the wrong type; the message names the file.
    """
    files = find_table(folder, table, columns)
    if not files:
        raise DataError(f"{folder}: no table {table}: neither {table}.parquet, .csv or .csv.gz nor a folder {table}")
    for chunk in chunks_of(table, files):
        for rows in read_chunk(chunk, columns):
            for letter in rows.letters:
                raise DataError(f"{chunk.path}: table {table}, {', '.join(columns)}: {letter.reason}: {letter.raw!r}")
            yield rows.columns


def _places(path: Path, table: str, columns: Sequence[str]) -> tuple[list[int], list[str]]:
    """Finds the positions of columns in a file, and the names of all columns of the file."""
    try:
        header = _header(path)
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as table {table}: {error}") from error
    # Pandas writes an index column without a name, which is not a column of the table.
    named = [place for place, name in enumerate(header) if name and not name.startswith("Unnamed")]
    by_name = {header[place]: place for place in named}
    # A position counts only if the column there does not have the name of another column of the table.
    by_place = {
        wanted: place
        for wanted, place in zip(_BY_PLACE.get(table, ()), named, strict=False)
        if header[place] not in TABLES[table].names
    }
    found = {name: by_name.get(name, by_place.get(name)) for name in columns}
    missing = [name for name, place in found.items() if place is None]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing)} in it; it has {', '.join(header)}")
    return [place for place in found.values() if place is not None], header


def _header(path: Path) -> list[str]:
    """Returns the names of the columns of a file."""
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_schema(path).names
    with _open_text(path) as file:
        line = file.readline(_LONGEST_HEADER)
    if b"\r" in line.rstrip(b"\r\n"):
        raise DataError(f"{path}: lines end with a carriage return alone; write the file with line feeds")
    options = pyarrow.csv.ReadOptions(autogenerate_column_names=True, encoding="utf-8-sig")
    (row,) = pyarrow.csv.read_csv(io.BytesIO(line), options).to_pylist()
    return ["" if name is None else str(name).strip() for name in row.values()]


def _open_text(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # pyright: ignore[reportReturnType]


def _text_blocks(chunk: Chunk) -> Iterator[bytes]:
    """Yields whole lines that begin in the chunk, without the header, some megabytes at a time."""
    with _open_text(chunk.path) as file:
        is_whole = chunk.path.suffix == ".gz"
        if chunk.start:
            # A line that begins exactly at the start belongs to this chunk, so read from one byte before.
            file.seek(chunk.start - 1)
        file.readline()
        while is_whole or file.tell() < chunk.stop:
            # The line that contains the chunk's last byte is the chunk's last line.
            size = _CHUNK_BYTES if is_whole else chunk.stop - 1 - file.tell()
            block = file.read(size) + file.readline()
            if not block:
                return
            yield block


def _parse(chunk: Chunk, block: bytes, schema: pyarrow.Schema, places: Sequence[int], num_columns: int) -> InputRows:
    """Parses text as rows: all at once if all values have the right types, otherwise value by value."""
    letters: list[DeadLetter] = []
    names = [f"f{place}" for place in range(num_columns)]
    wanted = [names[place] for place in places]

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        letters.append(_letter(chunk, Reason.ROW_LENGTH, row.text))
        return "skip"

    def read(types: pyarrow.Schema) -> pyarrow.Table:
        letters.clear()
        table = pyarrow.csv.read_csv(
            io.BytesIO(block),
            pyarrow.csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1),
            pyarrow.csv.ParseOptions(invalid_row_handler=skip),
            pyarrow.csv.ConvertOptions(
                include_columns=wanted,
                column_types=dict(zip(wanted, types.types, strict=True)),
                # Arrow's own list would read a region called NA as a missing value.
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        return table.rename_columns(schema.names)

    # Arrow would accept hexadecimal numbers as integers.
    if not (b"0x" in block or b"0X" in block):
        try:
            table = read(schema)
            return _without_bad_rows(chunk, table, table, letters)
        except pyarrow.ArrowInvalid:
            pass
    stored = read(pyarrow.schema([(name, pyarrow.binary()) for name in schema.names]))
    shown = pyarrow.table({name: _decoded(stored[name]) for name in schema.names})
    texts = {
        # Null where the bytes are not UTF-8.
        name: _COMPUTE.if_else(_COMPUTE.equal(texts.cast(pyarrow.binary()), stored[name]), texts, None)
        for name, texts in zip(schema.names, shown.columns, strict=True)
    }
    bad = sum(column.null_count - shown[name].null_count for name, column in texts.items())
    if bad > max(1, _MOST_OF_ANOTHER_ENCODING * len(shown)):
        raise pyarrow.ArrowInvalid(f"{bad} values are not UTF-8: the file seems to have another encoding")
    columns = [_convert(texts[field.name], field.type) for field in schema]
    return _without_bad_rows(chunk, pyarrow.table(columns, schema=schema), shown, letters)


def _decoded(values: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Decodes bytes as UTF-8, with replacement characters for invalid bytes."""
    try:
        return values.cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        texts = [value and value.decode("utf-8", "replace") for value in values.to_pylist()]
        return pyarrow.chunked_array([texts], pyarrow.string())


def _convert(texts: pyarrow.ChunkedArray, kind: pyarrow.DataType) -> pyarrow.ChunkedArray:
    """Converts texts to values of a type, null where a text is not such a value."""
    if pyarrow.types.is_string(kind):
        return texts
    # Arrow's cast accepts neither spaces nor a plus sign.
    texts = _COMPUTE.replace_substring_regex(_COMPUTE.utf8_trim_whitespace(texts), r"^\+([\d.])", r"\1")
    if pyarrow.types.is_integer(kind):
        matches = _COMPUTE.match_substring_regex(texts, _INTEGER)
        digits = _COMPUTE.replace_substring_regex(_COMPUTE.if_else(matches, texts, None), r"\.0*$", "")
        # Wide enough for 19 digits, as in the largest int64, so that larger numbers are recognised.
        wide = pyarrow.decimal128(19)
        numbers = digits.cast(wide)
        limits = np.iinfo(f"int{kind.bit_width}")
        least, most = (pyarrow.scalar(Decimal(int(limit)), wide) for limit in (limits.min, limits.max))
        fits = _COMPUTE.and_(_COMPUTE.greater_equal(numbers, least), _COMPUTE.less_equal(numbers, most))
        return _COMPUTE.if_else(fits, numbers, None).cast(kind)
    matches = _COMPUTE.match_substring_regex(texts, _DECIMAL)
    return _COMPUTE.if_else(matches, texts, None).cast(kind)


def _without_bad_rows(chunk: Chunk, table: pyarrow.Table, texts: pyarrow.Table, letters: list[DeadLetter]) -> InputRows:
    if "state" in table.column_names:
        codes = _COMPUTE.index_in(table["state"], pyarrow.array(STATE_NAMES)).cast(pyarrow.int8())
        table = table.set_column(table.column_names.index("state"), "state", codes)
    for place, field in enumerate(table.schema):
        if pyarrow.types.is_floating(field.type):
            is_finite = _COMPUTE.is_finite(table[field.name])
            table = table.set_column(place, field.name, _COMPUTE.if_else(is_finite, table[field.name], None))
    if any(column.null_count for column in table.columns):
        is_bad = functools.reduce(_COMPUTE.or_, (_COMPUTE.is_null(column) for column in table.columns))
        letters += [
            _letter(chunk, Reason.ROW_VALUES, ",".join(str(value) for value in row.values()))
            for row in texts.filter(is_bad).to_pylist()
        ]
        table = table.filter(_COMPUTE.invert(is_bad))
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return InputRows(columns, tuple(letters))


def _letter(chunk: Chunk, reason: Reason, raw: str) -> DeadLetter:
    return DeadLetter(chunk.source, "", None, reason, raw[:200])
