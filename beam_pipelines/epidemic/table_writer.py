"""Writes tables of a population as Parquet or CSV, chunk by chunk; only a finished table gets its name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from beam_pipelines.contact_graph.tables import TABLES, paths_of, plain_type
from beam_pipelines.dataset.staging import remove
from tff_pdp.errors import DataError
from tff_pdp.files import naming
from tff_pdp.settings import Count

_ROWS_PER_GROUP = 1 << 20


@dataclasses.dataclass(frozen=True)
class TableFormat:
    """Format of written tables.

    Attributes:
      format: format of the files.
      rows_per_file: number of rows in each file; a table is then a folder of files. Default: one file for each table.
    """

    format: Literal["parquet", "csv", "csv.gz"] = "parquet"
    rows_per_file: Count | None = None


class TableWriter:
    """Writes one table, chunk by chunk; the file or folder gets its name when the `with` block ends without an error.

    The content of the files does not depend on how rows are divided into chunks.

    Args:
      folder: folder of the population; made if it does not exist.
      table: name of the table, a key of `TABLES`.
      table_format: format of the table.
      overwrite: whether to replace the table if the folder has it already, in any format.

    Raises:
      DataError: the folder has the table already and `overwrite` is false.
    """

    def __init__(
        self, folder: Path, table: str, table_format: TableFormat | None = None, overwrite: bool = False
    ) -> None:
        self.num_rows = 0
        self._schema = TABLES[table]
        self._format = table_format or TableFormat()
        self._existing = paths_of(folder, table)
        if self._existing and not overwrite:
            raise DataError(f"{self._existing[0]}: exists already; choose another folder, or pass --overwrite")
        is_folder = self._format.rows_per_file is not None
        self._path = folder / (table if is_folder else f"{table}.{self._format.format}")
        self._unfinished = folder / f".{self._path.name}.unfinished"
        remove(self._unfinished)
        (self._unfinished if is_folder else folder).mkdir(parents=True, exist_ok=True)
        self._num_files = 0
        self._file: _File | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0

    def __enter__(self) -> Self:
        return self

    def write(self, columns: Mapping[str, Any]) -> None:
        """Adds rows; `columns` maps the name of each column to an array (NumPy or Arrow), all of one length."""
        arrays = [_as_array(columns[field.name], field.type) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        while batch.num_rows:
            head = batch.slice(0, self._rows_to_fill())
            batch = batch.slice(head.num_rows)
            self._waiting.append(head)
            self._num_waiting += head.num_rows
            self.num_rows += head.num_rows
            if not self._rows_to_fill():
                with naming(self._path):
                    self._flush()

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                with naming(self._path):
                    self._flush(is_last=True)
                for path in self._existing:
                    remove(path)
                self._unfinished.rename(self._path)
        finally:
            if self._file is not None:
                self._file.close()
            remove(self._unfinished)

    def _rows_to_fill(self) -> int:
        """Returns the number of rows that the current row group or file still lacks."""
        written = 0 if self._file is None else self._file.num_rows
        limit = min(_ROWS_PER_GROUP, (self._format.rows_per_file or _ROWS_PER_GROUP + written) - written)
        return limit - self._num_waiting

    def _flush(self, is_last: bool = False) -> None:
        # A table without rows still gets a file, which has the columns.
        if self._file is None and (self._waiting or not self._num_files):
            self._file = _File(self._next_path(), self._schema, self._format.format)
            self._num_files += 1
        if self._file is None:
            return
        self._file.write(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._num_waiting = [], 0
        if is_last or self._file.num_rows == self._format.rows_per_file:
            self._file.close()
            self._file = None

    def _next_path(self) -> Path:
        if self._format.rows_per_file is None:
            return self._unfinished
        return self._unfinished / f"part-{self._num_files:05d}.{self._format.format}"


class _File:
    """Open file of a table."""

    def __init__(self, path: Path, schema: pa.Schema, kind: str) -> None:
        self.num_rows = 0
        self._sink = pa.OSFile(str(path), "wb")
        self._schema = schema
        if kind == "parquet":
            is_integer = {field.name: pa.types.is_integer(field.type) for field in schema}
            # Nearly all ids and times differ: differences take less space and time than a dictionary.
            self._writer = pyarrow.parquet.ParquetWriter(
                self._sink,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=[field.name for field in schema if pa.types.is_dictionary(field.type)],  # pyright: ignore[reportArgumentType]
                column_encoding={name: "DELTA_BINARY_PACKED" for name, integer in is_integer.items() if integer},
            )
            return
        if kind == "csv.gz":
            self._sink = pa.CompressedOutputStream(self._sink, "gzip")
        self._schema = pa.schema([(field.name, plain_type(field.type)) for field in schema])
        self._writer = pyarrow.csv.CSVWriter(
            self._sink, self._schema, write_options=pyarrow.csv.WriteOptions(quoting_style="needed")
        )

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table.cast(self._schema))
        self.num_rows += table.num_rows

    def close(self) -> None:
        self._writer.close()
        self._sink.close()


def _as_array(values: Any, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(np.asarray(values), kind)
