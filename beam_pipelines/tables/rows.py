"""Reads the rows of a table as checked arrays; of a row that cannot be used, line, column and value are kept."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow

from beam_pipelines.records import Reason, Unusable
from beam_pipelines.tables.columns import Fault, as_texts
from beam_pipelines.tables.files import Lines, lines_of, read_batches, read_header
from beam_pipelines.tables.survey import TableSchema
from tff_pdp.data.manifest import SPLITS
from tff_pdp.errors import DataError

# Other words for a split, as tables have them.
_WORDS_OF_SPLITS = {**{split: place for place, split in enumerate(SPLITS)}, "valid": 1, "val": 1, "dev": 1}
_SPLIT_WORDS = f"one of {', '.join(SPLITS)}"
# Longer values are cut in messages.
_VALUE_LENGTH = 60


@dataclasses.dataclass(frozen=True)
class Rows:
    """Successive rows of one table.

    Attributes:
      clients: name of each row's client, empty where it is missing; None if the table has no column of clients.
      x: features, float32 `[n, values]`; zeros where a row cannot be used.
      y: numbers of classes, or labels of a regression, float64 `[n]`.
      splits: place of each row's split in `SPLITS`, int64 `[n]`; None if the table has no column of splits.
      problems: for rows that cannot be used, the first problem of the row.
    """

    clients: list[str] | None
    x: np.ndarray
    y: np.ndarray
    splits: np.ndarray | None
    problems: dict[int, Unusable]

    def __len__(self) -> int:
        return len(self.y)


def missing_columns(path: Path, schema: TableSchema) -> Unusable | None:
    """Returns the problem that a table lacks columns of the schema; None if there is no such problem.

    Raises:
      DataError: the file cannot be read, or has no header.
    """
    header = read_header(path)
    missing = [name for name in schema.columns if name not in header]
    if not missing:
        return None
    found = f"no column {', '.join(map(repr, missing))}, but {', '.join(map(repr, header))}"
    return Unusable(Reason.COLUMNS_MISSING, found[:500], f"a header with {', '.join(map(repr, schema.columns))}")


def read_rows(path: Path, schema: TableSchema) -> Iterator[Rows]:
    """Reads the rows of a table in batches, in order; last come rows with another number of values than the header.

    Raises:
      DataError: the file cannot be read, or lacks a column of the schema.
    """
    if problem := missing_columns(path, schema):
        raise DataError(f"{path}: {problem.found}; allowed: {problem.allowed}")
    lines, first, skipped = _LazyLines(path), 0, Counter[str]()
    for batch in read_batches(path, schema.columns, skipped):
        yield _rows_of(batch, schema, lines, first)
        first += len(batch)
    if skipped:
        yield _other_rows(path, schema, lines.found(), skipped.total())


def _other_rows(path: Path, schema: TableSchema, lines: Lines, number: int) -> Rows:
    """Returns the rows that have another number of values than the header, none of which can be used."""
    if len(lines.of_others) != number:
        raise DataError(
            f"{path}: {number} rows have another number of values than the header; check quotes in the file"
        )
    allowed = f"{len(read_header(path))} values, as in the header"
    problems = [Unusable(Reason.ROW_LENGTH, f"line {line}: {size} values", allowed) for line, size in lines.of_others]
    x = np.zeros((number, schema.num_values), np.float32)
    splits = None if schema.roles.split is None else np.zeros(number, np.int64)
    clients = None if schema.roles.client is None else [""] * number
    return Rows(clients, x, np.zeros(number), splits, dict(enumerate(problems)))


class _LazyLines:
    """The lines of a table's rows, which are looked up only if a row has a problem: that reads the file once more."""

    def __init__(self, path: Path):
        self._path = path
        self._lines: Lines | None = None

    def place(self, row: int) -> str:
        """Returns the place of a row in words."""
        return self.found().place(row)

    def found(self) -> Lines:
        """Returns the lines of all rows."""
        if self._lines is None:
            self._lines = lines_of(self._path)
        return self._lines


def _rows_of(batch: pyarrow.RecordBatch, schema: TableSchema, lines: _LazyLines, first: int) -> Rows:
    x = np.zeros((len(batch), schema.num_values), np.float32)
    problems: dict[int, Unusable] = {}

    def note(column: str, faults: list[Fault], allowed: str) -> None:
        for fault in faults:
            if fault.row not in problems:
                value = fault.found if len(fault.found) <= _VALUE_LENGTH else f"{fault.found[:_VALUE_LENGTH]}…"
                found = f"{lines.place(first + fault.row)}, column {column!r}: {value!r}"
                problems[fault.row] = Unusable(fault.reason, found, allowed)

    start = 0
    for name, column in schema.features:
        numbers, faults = column.numbers(batch[name])
        x[:, start : start + column.width] = numbers
        note(name, faults, column.words)
        start += column.width
    y = np.zeros(len(batch))
    if schema.label is not None and schema.roles.label is not None:
        labels, faults = schema.label.numbers(batch[schema.roles.label])
        y = labels[:, 0].astype(np.float64)
        note(schema.roles.label, faults, schema.label.words)
    splits = clients = None
    if schema.roles.split is not None:
        words = [(text or "").lower() for text in as_texts(batch[schema.roles.split]).to_pylist()]
        splits = np.array([_WORDS_OF_SPLITS.get(word, -1) for word in words], np.int64)
        faults = [
            Fault(row, Reason.VALUE_RANGE if words[row] else Reason.VALUE_MISSING, words[row])
            for row in np.flatnonzero(splits < 0).tolist()
        ]
        note(schema.roles.split, faults, _SPLIT_WORDS)
    if schema.roles.client is not None:
        clients = [text or "" for text in as_texts(batch[schema.roles.client]).to_pylist()]
        faults = [Fault(row, Reason.VALUE_MISSING, "") for row, client in enumerate(clients) if not client]
        note(schema.roles.client, faults, "the name of a client")
    return Rows(clients, x, y, splits, problems)
