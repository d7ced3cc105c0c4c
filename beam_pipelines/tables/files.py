"""Finds tables in a folder, reads a table in batches, and finds the lines of rows.

| file | read as |
|---|---|
| `.csv`, `.csv.gz` | comma-separated values with a header; semicolons, if the header has these and no comma |
| `.tsv`, `.tsv.gz` | tab-separated values with a header |
| `.parquet` | Apache Parquet |

Texts are UTF-8. All values of a CSV file are read as texts: what they mean is decided by the schema of all files, not
by the first rows of one file. Rows are counted from 0, without the header, without empty lines, and without rows that
have another number of values than the header.
"""

import csv
import dataclasses
import gzip
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from beam_pipelines.options import files_in
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import replacing

_SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
PARQUET = ".parquet"
SUFFIXES = (*_SEPARATORS, PARQUET)
# A row must fit into a block of a CSV file.
_BLOCK_BYTES, _BATCH_ROWS = 16 << 20, 1 << 16
_UNREADABLE = (pyarrow.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)


def list_tables(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Finds the folder and the sorted names of the tables at a path: one table, or a folder of tables.

    Raises:
      DataError: there is no table.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; data.input must be a {_words()} file, or a folder of them")
    found = files_in(path) if path.is_dir() else [path]
    names = tuple(sorted(file.name for file in found if suffix_of(file)))
    if not names:
        raise DataError(f"{path}: no table; data.input must be a {_words()} file, or a folder of them")
    return (path if path.is_dir() else path.parent), names


def suffix_of(path: Path) -> str:
    """Returns the suffix by which a file is a table; empty if the file is none."""
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if path.name.endswith(suffix)), "")


def client_of(path: Path) -> str:
    """Returns the client whose examples a file has: the name of the file without its suffix.

    >>> client_of(Path("people/ann.csv.gz"))
    'ann'
    """
    return path.name.removesuffix(suffix_of(path))


def read_header(path: Path) -> tuple[str, ...]:
    """Returns the names of a table's columns.

    Raises:
      DataError: the file cannot be read, has no header, or two columns have the same name.
    """
    try:
        if suffix_of(path) == PARQUET:
            names = pyarrow.parquet.read_schema(path).names
        else:
            with _text_of(path) as file:
                names = next(csv.reader(file, delimiter=separator_of(path)), [])
    except _UNREADABLE as error:
        raise unreadable(path, error) from error
    if not names:
        raise DataError(f"{path}: empty; the first line must have the names of the columns")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: the column {repeated[0]!r} occurs more than once in the header")
    return tuple(names)


def read_batches(
    path: Path, columns: Sequence[str], skipped: Counter[str] | None = None
) -> Iterator[pyarrow.RecordBatch]:
    """Reads the columns of a table, some thousand rows at a time.

    Args:
      path: the table.
      columns: names of the columns to read.
      skipped: counts, under the path, rows with another number of values than the header; these rows are left out.

    Raises:
      DataError: the file cannot be read.
    """
    try:
        if suffix_of(path) == PARQUET:
            with pyarrow.parquet.ParquetFile(path) as file:
                yield from file.iter_batches(_BATCH_ROWS, columns=list(columns))
            return
        header = read_header(path)
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(header, pyarrow.string()),
            include_columns=list(columns),
            strings_can_be_null=True,
            null_values=[""],
        )

        def skip(_: Any) -> str:
            if skipped is not None:
                skipped[str(path)] += 1
            return "skip"

        separator = separator_of(path)
        parse = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip)
        read = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES)
        with pyarrow.csv.open_csv(path, read, parse, convert) as file:
            yield from file
    except _UNREADABLE as error:
        raise unreadable(path, error) from error


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines of a table's rows in the file.

    Attributes:
      of_rows: line on which each row ends, counted from 1; None for a file without lines.
      of_others: line and number of values of each row whose number of values is not that of the header.
    """

    of_rows: Sequence[int] | None
    of_others: tuple[tuple[int, int], ...] = ()

    def place(self, row: int) -> str:
        """Returns the place of a row in words: its line or, in a file without lines, its number from 1."""
        return f"row {row + 1}" if self.of_rows is None else f"line {self.of_rows[row]}"


def lines_of(path: Path) -> Lines:
    """Finds the lines of all rows of a table, by reading the file once more; raises DataError if this is not possible.

    Arrow does not tell the line of a row, which depends on empty lines and on line ends within values.
    """
    if suffix_of(path) == PARQUET:
        return Lines(None)
    of_rows, of_others = [], []
    try:
        with _text_of(path) as file:
            reader = csv.reader(file, delimiter=separator_of(path))
            size = len(next(reader, []))
            for values in reader:
                if len(values) == size:
                    of_rows.append(reader.line_num)
                elif values:
                    of_others.append((reader.line_num, len(values)))
    except _UNREADABLE as error:
        raise unreadable(path, error) from error
    return Lines(of_rows, tuple(of_others))


def separator_of(path: Path) -> str:
    """Returns the text between two values of a file with lines; raises OSError or UnicodeDecodeError."""
    separator = _SEPARATORS[suffix_of(path)]
    if separator == ",":
        with _text_of(path) as file:
            first = "".join(itertools.islice(file, 1))
        if ";" in first and "," not in first:
            return ";"
    return separator


def unreadable(path: Path, error: BaseException) -> DataError:
    """Returns the error that a table cannot be read, with the cause in one line."""
    return DataError(f"{path}: cannot be read as a table: {' '.join(str(error).split())[:300]}")


def write_table(frame: Any, path: Path) -> Path:
    """Writes a pandas DataFrame, or an Arrow table, as a Parquet file that `data.kind: table` reads.

    Args:
      frame: pandas DataFrame, whose index is left out, or `pyarrow.Table`.
      path: file to write; the folder is made if there is none.

    Returns:
      The path of the file, whose name gets the suffix `.parquet` if it has none.

    Raises:
      ConfigError: the argument is neither of the two, or has columns that Parquet cannot hold.
    """
    path = path if path.name.endswith(PARQUET) else path.with_name(f"{path.name}{PARQUET}")
    try:
        table = frame if isinstance(frame, pyarrow.Table) else pyarrow.Table.from_pandas(frame, preserve_index=False)
    except (AttributeError, TypeError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"a table must be a pandas DataFrame or a pyarrow.Table whose columns have one type: {error}"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as staging:
        pyarrow.parquet.write_table(table.replace_schema_metadata(), staging)
    return path


def _text_of(path: Path) -> Any:
    # Some editors begin a file with a byte-order mark.
    how: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
    return gzip.open(path, "rt", **how) if path.name.endswith(".gz") else open(path, **how)


def _words() -> str:
    return ", ".join(SUFFIXES)
