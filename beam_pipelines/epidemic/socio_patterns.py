"""Reads SocioPatterns contacts (http://www.sociopatterns.org/datasets) and writes them as a population's tables.

A contact file has rows `t i j`, separated by tabs or spaces: i and j faced each other in the 20 seconds before time t.
A metadata file has a row of tab-separated columns for each person. The columns differ between studies, for example id
and department; id, class and sex; or row number, id and role. Columns are recognised by their values.
"""

import dataclasses
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from beam_pipelines.contact_graph.tables import FEMALE, MALE, OTHER, UNKNOWN_SEX, write_about
from beam_pipelines.epidemic.table_writer import TableFormat, TableWriter
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Count, Finite, Settings

STEP = 20
UNKNOWN_REGION = "unknown"
UNKNOWN_AGE = 0

_MISSING = ("", "NA", "NAN", "UNKNOWN")
_SEX = {"M": MALE, "F": FEMALE} | dict.fromkeys(_MISSING, UNKNOWN_SEX)
_LID = 1
_DAY = 86400
_HOUR = 3600


class ImportOptions(Settings):
    """Settings of the import of contacts.

    Attributes:
      observed_days: number of days on which people wore sensors, a public constant of the study. Durations are divided
        by this number. Do not derive the number from the contacts: a single contact could then change all rows.
      region_column: number, counted from 1, of the metadata's column that becomes `region`; None for the first column
        that has text other than ids and sexes.
      activity: activity that is assumed for all contacts, because the file does not state activities.
      hours_ahead: hours added to the file's times, so that days begin at local midnight (files may count from midnight
        UTC or from another hour).
    """

    observed_days: Count
    region_column: Count | None = None
    activity: int = OTHER
    hours_ahead: Finite = 0.0


@dataclasses.dataclass(frozen=True)
class ImportSummary:
    """Outcome of an import.

    Attributes:
      num_people: number of people in table person.
      num_without_contacts: number of people who are in the metadata, but not in the contacts.
      num_without_metadata: number of people who are in the contacts, but not in the metadata.
      num_rows: number of rows in table population_network.
      num_repeated: number of rows of the contact file that repeat another row, and are left out.
      num_self_contacts: number of rows with equal i and j, which are left out.
      num_days: number of days on which anyone met.
      regions: number of people by region.
    """

    num_people: int
    num_without_contacts: int
    num_without_metadata: int
    num_rows: int
    num_repeated: int
    num_self_contacts: int
    num_days: int
    regions: dict[str, int]

    def text(self) -> str:
        """Returns the summary in words."""
        regions = ", ".join(f"{name} {count}" for name, count in self.regions.items())
        return (
            f"{self.num_people:,} people ({self.num_without_contacts} met nobody, {self.num_without_metadata} without "
            f"metadata) with {self.num_rows:,} contacts on {self.num_days} days; left out: {self.num_repeated} "
            f"repeated rows, {self.num_self_contacts} rows of people with themselves; regions: {regions}"
        )


def import_contacts(
    contacts: Path,
    metadata: Path | None,
    folder: Path,
    options: ImportOptions,
    table_format: TableFormat | None = None,
    overwrite: bool = False,
) -> ImportSummary:
    """Writes contacts as the tables person, household and population_network, and writes `about.json`.

    A row of population_network is an unbroken run of 20-second steps in which two people faced each other; a run that
    began before midnight may end after midnight. Durations are sums over all days; `about.json` records
    `options.observed_days`, by which readers divide the durations to get daily means.

    The population is all people in the metadata or contacts. The set of participants is treated as public, including
    participants that only the contacts name. Each person has a household of one. Ages are `UNKNOWN_AGE`. Sex and
    `region` are `UNKNOWN_SEX` and `UNKNOWN_REGION` unless the metadata state them.

    Raises:
      DataError: a file is missing or malformed (the message names file and line); people met on more days, which
        begin at midnight, than the public constant `observed_days` (the error reveals one bit about the contacts); or a
        table exists and `overwrite` is false.
      ConfigError: the metadata have no column `region_column`.
    """
    rows = _read_contacts(contacts)
    rows[:, 0] += round(options.hours_ahead * _HOUR) - STEP
    num_days = len(np.unique(rows[:, 0] // _DAY))
    if num_days > options.observed_days:
        raise DataError(
            f"{contacts}: people met on more days than observed_days, {options.observed_days}: give the number of days "
            "that the study had, or correct hours_ahead if its days do not begin at midnight"
        )
    runs, num_repeated = find_runs(rows[rows[:, 1] != rows[:, 2]])
    met = np.unique(runs[:, :2])
    people = _read_metadata(metadata, met, options.region_column) if metadata else _Metadata({}, {})
    pids = np.union1d(met, np.array(list(people.region), np.int64))
    regions = [people.region.get(pid, UNKNOWN_REGION) for pid in pids.tolist()]
    with TableWriter(folder, "person", table_format, overwrite) as person:
        sexes = [people.sex.get(pid, UNKNOWN_SEX) for pid in pids.tolist()]
        ones, ages = np.ones(len(pids), np.int64), np.full(len(pids), UNKNOWN_AGE)
        names = pa.array(regions, pa.string()).dictionary_encode()
        person.write({"pid": pids, "hid": pids, "person_number": ones, "age": ages, "sex": sexes, "region": names})
    with TableWriter(folder, "household", table_format, overwrite) as household:
        household.write({"hid": pids, "hh_size": ones})
    with TableWriter(folder, "population_network", table_format, overwrite) as network:
        columns = dict(zip(("pid1", "pid2", "start_time", "duration"), runs.T, strict=True))
        activity = np.full(len(runs), options.activity)
        columns |= {"activity1": activity, "activity2": activity, "lid": np.full(len(runs), _LID)}
        network.write({**columns, "start_time": columns["start_time"] % _DAY})
    write_about(folder, {"observed_days": options.observed_days, "imported_from": contacts.name})
    return ImportSummary(
        num_people=len(pids),
        num_without_contacts=len(pids) - len(met),
        num_without_metadata=sum(pid not in people.region for pid in pids.tolist()),
        num_rows=len(runs),
        num_repeated=num_repeated,
        num_self_contacts=int(np.count_nonzero(rows[:, 1] == rows[:, 2])),
        num_days=num_days,
        regions={name: regions.count(name) for name in sorted(set(regions))},
    )


def find_runs(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Joins consecutive steps of each pair into runs.

    Args:
      rows: `[rows, 3]`, in any order. The columns are the start of a step of `STEP` seconds in which two people faced
        each other, the one person, and the other person.

    Returns:
      The runs, `[runs, 4]`, and the number of rows that repeat another row. The columns of runs are pid1, pid2 (larger
      than pid1), start and duration; runs are sorted by these columns. Overlapping steps of a pair, as from two clocks,
      are joined too.
    """
    steps = np.stack([rows[:, 1:].min(axis=1, initial=2**62), rows[:, 1:].max(axis=1, initial=-1), rows[:, 0]], axis=1)
    steps, num_rows = np.unique(steps, axis=0), len(steps)
    change = np.diff(steps, axis=0)
    begins = np.concatenate([[True], change[:, :2].any(axis=1) | (change[:, 2] > STEP)])[: len(steps)]
    first = np.flatnonzero(begins)
    last = np.append(first, len(steps))[1:] - 1
    durations = steps[last, 2] - steps[first, 2] + STEP
    return np.column_stack([steps[first], durations]), num_rows - len(steps)


@dataclasses.dataclass(frozen=True)
class _Metadata:
    region: dict[int, str]
    sex: dict[int, int]


def _read_contacts(path: Path) -> NDArray[np.int64]:
    rows = []
    for number, line in _lines(path):
        try:
            time, first, second = map(int, line.split())
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {line[:80]!r} is not three integers `t i j`") from error
        if min(time, first, second) < 0 or max(time, first, second) >= 2**62:
            raise DataError(f"{path}, line {number}: {line[:80]!r} has a number out of range")
        rows.append((time, first, second))
    return np.array(rows, np.int64).reshape(-1, 3)


def _read_metadata(path: Path, met: NDArray[np.int64], region_column: int | None) -> _Metadata:
    numbers, rows = [], []
    for number, line in _lines(path):
        columns = [column.strip() for column in (line.split("\t") if "\t" in line else line.split())]
        if rows and len(columns) != len(rows[0]):
            raise DataError(f"{path}, line {number}: {len(columns)} columns; the first line has {len(rows[0])}")
        numbers.append(number)
        rows.append(columns)
    if not rows:
        raise DataError(f"{path}: no rows; if there are no metadata, state no metadata file")
    columns = list(zip(*rows, strict=True))
    id_column = _find_ids(path, columns, met)
    sex_column = next((place for place, column in enumerate(columns) if _is_sex(column)), None)
    if region_column is None:
        candidates = (place for place in range(len(columns)) if place not in (id_column, sex_column))
        region_place = next((place for place in candidates if _has_text(columns[place])), None)
    elif region_column > len(columns):
        raise ConfigError(f"region_column {region_column}: {path} has {len(columns)} columns")
    else:
        region_place = region_column - 1
    metadata = _Metadata({}, {})
    for number, row in zip(numbers, rows, strict=True):
        if not _is_id(row[id_column]):
            raise DataError(f"{path}, line {number}: {row[id_column]!r} in column {id_column + 1} is not a person's id")
        pid = int(row[id_column])
        if pid in metadata.region:
            raise DataError(f"{path}, line {number}: person {pid} occurs more than once")
        is_known = region_place is not None and not _is_missing(row[region_place])
        metadata.region[pid] = row[region_place] if is_known else UNKNOWN_REGION
        metadata.sex[pid] = UNKNOWN_SEX if sex_column is None else _SEX[row[sex_column].upper()]
    return metadata


def _find_ids(path: Path, columns: Sequence[Sequence[str]], met: NDArray[np.int64]) -> int:
    """Finds the first column with the largest number of people who met."""
    people = set(met.tolist())
    found = [len(people & {int(value) for value in column if _is_id(value)}) for column in columns]
    if people and not max(found):
        raise DataError(f"{path}: no column has ids of people in the contact file; is the file from another study?")
    return found.index(max(found))


def _is_sex(column: Sequence[str]) -> bool:
    values = {value.upper() for value in column}
    return bool(values & {"M", "F"}) and values <= _SEX.keys()


def _has_text(column: Sequence[str]) -> bool:
    return not all(_is_missing(value) or _is_id(value) for value in column)


def _is_missing(value: str) -> bool:
    return value.upper() in _MISSING


def _is_id(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) < 19


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines that are not empty, with line numbers from 1."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.name.endswith(".gz")
            else open(path, encoding="utf-8") as file
        ):
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
