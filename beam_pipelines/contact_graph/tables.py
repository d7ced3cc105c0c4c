"""The tables of the US/UK PETs pandemic challenge: their columns, the files they are in, and a reader.

A population is a folder with one file per table (`person.parquet`, `person.csv`, `person.csv.gz`) or one folder of
files (`person/part-00000.parquet`). `about.json` says what the tables cannot: see `write_about`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from tff_pdp.errors import DataError
from tff_pdp.files import replace_text

HOME, WORK, SHOPPING, OTHER, SCHOOL, COLLEGE, RELIGION = range(1, 8)
ACTIVITY_NAMES = ("home", "work", "shopping", "other", "school", "college", "religion")
MALE, FEMALE, UNKNOWN_SEX = 1, 2, 0
STATE_NAMES = ("S", "I", "R")
FORMATS = ("parquet", "csv", "csv.gz")

_CATEGORY = pa.dictionary(pa.int8(), pa.string())
_REGION = pa.dictionary(pa.int32(), pa.string())


def _table(ids: str, **others: pa.DataType) -> pa.Schema:
    return pa.schema([(name, pa.int64()) for name in ids.split()] + list(others.items()))


# Times are seconds since midnight, durations seconds. `region` is ours: silos can be made by it.
TABLES: Mapping[str, pa.Schema] = {
    "person": _table("pid hid", person_number=pa.int32(), age=pa.int32(), sex=pa.int8(), region=_REGION),
    "household": _table("hid", hh_size=pa.int32()),
    "residence_locations": _table("rlid", longitude=pa.float64(), latitude=pa.float64()),
    "activity_locations": _table(
        "alid",
        longitude=pa.float64(),
        latitude=pa.float64(),
        **{name: pa.int8() for name in ("work", "shopping", "school", "other", "college", "religion")},
    ),
    "activity_location_assignment": _table(
        "pid lid", activity_type=pa.int8(), start_time=pa.int32(), duration=pa.int32()
    ),
    "population_network": _table(
        "pid1 pid2 lid", start_time=pa.int32(), duration=pa.int32(), activity1=pa.int8(), activity2=pa.int8()
    ),
    "disease_outcome_training": pa.schema([("day", pa.int32()), ("pid", pa.int64()), ("state", _CATEGORY)]),
    "target": _table("pid", infected=pa.int8()),
}

_ABOUT_FILE = "about.json"


def read_batches(folder: Path, table: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The given columns of a table, in the order of the files' names and rows, with the types of `TABLES`.

    Other columns are not looked at. Memory does not grow with the table.

    Raises:
      DataError: the table or a column is missing, or a value has the wrong type or is missing; names the file.
    """
    paths = paths_of(folder, table)
    if not paths:
        raise DataError(f"{folder}: no table {table}: neither {table}.parquet, .csv or .csv.gz nor a folder {table}")
    if len(paths) > 1:
        raise DataError(f"{paths[0]}: {paths[1].name} is the same table; remove one of them")
    files = sorted(path for path in paths[0].iterdir() if path.is_file()) if paths[0].is_dir() else paths
    schema = pa.schema([TABLES[table].field(name) for name in columns])
    for path in files:
        try:
            yield from _read_file(path, schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, KeyError, OSError) as error:
            raise DataError(f"{path}: cannot be read as table {table} with {', '.join(columns)}: {error}") from error


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes `about.json`: `observed_days` (days that durations of contacts are totals of) and how the tables came."""
    replace_text(folder / _ABOUT_FILE, json.dumps(about, indent=2) + "\n")


def read_observed_days(folder: Path) -> int:
    """The number of days that durations of contacts are totals of; 1 where `about.json` says nothing.

    Raises:
      DataError: `about.json` is not JSON, or the number is not a positive integer.
    """
    path = folder / _ABOUT_FILE
    if not path.exists():
        return 1
    try:
        days = json.loads(path.read_text(encoding="utf-8")).get("observed_days", 1)
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a JSON object: {error}") from error
    if type(days) is not int or days < 1:
        raise DataError(f"{path}: observed_days is {days!r}; it must be a positive integer")
    return days


def _read_file(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if path.name.endswith(".parquet"):
        source = pyarrow.dataset.dataset(path, format="parquet")
    else:
        types = {field.name: plain_type(field.type) for field in schema}
        options = pyarrow.csv.ConvertOptions(column_types=types)
        source = pyarrow.dataset.dataset(path, format=pyarrow.dataset.CsvFileFormat(convert_options=options))
    # Few batches ahead: by default Arrow would hold 16 of them.
    for batch in source.to_batches(columns=schema.names, batch_readahead=2, fragment_readahead=1):
        cast = pa.Table.from_batches([batch]).cast(schema)
        for name in schema.names:
            if cast[name].null_count:
                raise pa.ArrowInvalid(f"column {name} has {cast[name].null_count} rows without a value")
        yield from cast.to_batches()


def paths_of(folder: Path, table: str) -> list[Path]:
    """The files or folders that hold a table: one, unless it is missing or there in several formats.

    Raises:
      DataError: a link leads nowhere.
    """
    candidates = [folder / table, *(folder / f"{table}.{kind}" for kind in FORMATS)]
    for path in candidates:
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{path}: a link to {path.readlink()}, which is not there; fetch the file or remove the link"
            )
    return [path for path in candidates if path.exists()]


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column where strings are not numbered, as in CSV."""
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind
