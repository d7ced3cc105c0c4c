"""Defines the tables of the US/UK PETs pandemic challenge: their columns and files.

A population is a folder. It has each table as one file (`person.parquet`, `person.csv` or `person.csv.gz`) or as one
folder of files (`person/part-00000.parquet`), and may have `about.json`; see `write_about`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from beam_pipelines.options import check_links
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


# Times are seconds since midnight, durations seconds. The challenge has no `region`: it is added to make silos by.
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


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes `about.json`: `observed_days` (number of days over which durations are summed) and the tables' origin."""
    replace_text(folder / _ABOUT_FILE, json.dumps(about, indent=2) + "\n")


def read_observed_days(folder: Path) -> int:
    """Reads the number of days over which durations of contacts are summed; 1 if `about.json` states none.

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


def paths_of(folder: Path, table: str) -> list[Path]:
    """Finds a table's file or folder; the list has one path unless the table is missing or exists in several formats.

    Raises:
      DataError: the target of a link is missing.
    """
    candidates = [folder / table, *(folder / f"{table}.{kind}" for kind in FORMATS)]
    check_links(candidates)
    return [path for path in candidates if path.exists()]


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns a column's type; dictionary-encoded strings become plain strings, as in CSV."""
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind
