"""Holds everybody in a population, in the order of the rows they become: arrays in files that all tasks look into.

`PeopleRules` decides what people are like, and where they belong. `person_features` describes a person in bytes, each
of which stands for a number between 0 and 1. Its ranges are public constants, beyond which values are cut off. They are
no statistics of the population, but the same whoever is in the data.
"""

import dataclasses
import json
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from beam_pipelines.contact_graph.degree import DegreeBound
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FEMALE, MALE
from beam_pipelines.dataset.staging import remove

PEOPLE_FOLDER = ".people"
# Days that never come, for those who do not fall ill or recover.
NEVER = np.int16(np.iinfo(np.int16).max)
_NAMES_FILE = "silos.json"
# Up to here, the place of an id is looked up in an array as long as ids are far apart.
_SPARSEST = 8


@dataclasses.dataclass(frozen=True)
class People:
    """Arrays `[n]`, sorted by silo, split and id. A person's place is its number in this order.

    Attributes:
      silos: their names, sorted.
      pid: int64.
      silo: int32, a place in `silos`.
      split: int8, a place in `SPLITS`.
      group: int32; contacts between people of different groups are left out.
      features: uint8 `[n, features]`.
      infected: int16, the first day in state I, or `NEVER`.
      recovered: int16, the first day in state R, or `NEVER`.
      target: int8, whether the person falls ill in the days after the observed ones; -1 where that is not known.
    """

    silos: tuple[str, ...]
    pid: np.ndarray
    silo: np.ndarray
    split: np.ndarray
    group: np.ndarray
    features: np.ndarray
    infected: np.ndarray
    recovered: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.pid)

    def save(self, staging: Path) -> None:
        """Writes the arrays into a job's staging folder, in one move; does nothing if they are there already."""
        folder = staging / f"{PEOPLE_FOLDER}.{uuid.uuid4().hex}"
        folder.mkdir()
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        order = np.argsort(self.pid, kind="stable")
        ids = self.pid[order]
        np.save(folder / "sorted_pid.npy", ids)
        np.save(folder / "place_of_sorted_pid.npy", order.astype(np.int32))
        # As Python's integers, which do not overflow.
        if len(ids) and int(ids[-1]) - int(ids[0]) < _SPARSEST * len(ids):
            places = np.full(int(ids[-1] - ids[0]) + 1, -1, np.int32)
            places[ids - ids[0]] = order
            np.save(folder / "place_of_pid.npy", places)
        (folder / _NAMES_FILE).write_text(json.dumps(self.silos))
        try:
            folder.rename(staging / PEOPLE_FOLDER)
        except OSError:
            if not (staging / PEOPLE_FOLDER).is_dir():
                raise
            # The same task was run twice. Its first result is the same, and others may be reading it.
            remove(folder)

    @classmethod
    def load(cls, staging: Path) -> "People":
        """Opens the arrays; what is looked at is read from the file."""
        folder = staging / PEOPLE_FOLDER
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        return cls(silos=tuple(json.loads((folder / _NAMES_FILE).read_text())), **arrays)


_ARRAYS = tuple(field.name for field in dataclasses.fields(People) if field.name != "silos")


class PlaceLookup:
    """From ids to places."""

    def __init__(self, staging: Path):
        """Opens the people of a job's staging folder."""
        folder = staging / PEOPLE_FOLDER
        self._ids = np.load(folder / "sorted_pid.npy", mmap_mode="r")
        dense = folder / "place_of_pid.npy"
        self._dense = np.load(dense, mmap_mode="r") if dense.exists() else None
        self._order = np.load(folder / "place_of_sorted_pid.npy", mmap_mode="r")

    def places(self, pids: np.ndarray) -> np.ndarray:
        """Places of ids, int64 `[n]`, -1 for people that are not in the population."""
        if not len(self._ids):
            return np.full(len(pids), -1, np.int64)
        if self._dense is not None:
            offset = pids - self._ids[0]
            is_inside = (offset >= 0) & (offset < len(self._dense))
            return np.where(is_inside, self._dense[np.where(is_inside, offset, 0)], -1).astype(np.int64)
        found = np.minimum(np.searchsorted(self._ids, pids), len(self._ids) - 1)
        return np.where(self._ids[found] == pids, self._order[found], -1).astype(np.int64)


# What silos are called; elsewhere they are numbers.
SILO_NAMES = "silo_names"


@dataclasses.dataclass(frozen=True)
class PeopleRules:
    """What decides what people are like and where they belong.

    Attributes:
      columns: by table, the columns that are read.
      silo_by: `person.<column>`, `household.<column>`, or `residence_grid.<degrees>`.
      degree_bound: may name groups.
      validation_fraction: expected share of people whose rows are for validation.
      min_people: silos with fewer people are dropped.
      num_days: how many days were observed, from day 0.
      num_windows: how many rows each person has for training or validation.
      has_households: whether there is a table of them.
      seed: keys the split.
      num_partitions: of people.
    """

    columns: Mapping[str, tuple[str, ...]]
    silo_by: str
    degree_bound: DegreeBound
    validation_fraction: float
    min_people: int
    num_days: int
    num_windows: int
    has_households: bool
    seed: int
    num_partitions: int

    @property
    def grid_degrees(self) -> float | None:
        """The side of a cell of the grid that silos are made by, if they are."""
        kind, _, size = self.silo_by.partition(".")
        return float(size) if kind == "residence_grid" else None


SECONDS_PER_DAY = 86_400
OLDEST = 100
LARGEST_HOUSEHOLD = 10
PERSON_FEATURES = (
    "age",
    "is_male",
    "is_female",
    "household_size",
    *(f"does_{name}" for name in ACTIVITY_NAMES),
    *(f"share_of_day_{name}" for name in ACTIVITY_NAMES),
)


def person_features(
    age: np.ndarray, sex: np.ndarray, household_size: np.ndarray, seconds_by_activity: np.ndarray
) -> np.ndarray:
    """Features of people: uint8 `[n, features]`, in the order of `PERSON_FEATURES`.

    Args:
      age: in years, `[n]`.
      sex: 1 male, 2 female, `[n]`.
      household_size: people, `[n]`; 0 where it is not known.
      seconds_by_activity: of a day, `[n, 7]`.
    """
    columns = (
        to_bytes(age / OLDEST),
        to_bytes(sex == MALE),
        to_bytes(sex == FEMALE),
        to_bytes(household_size / LARGEST_HOUSEHOLD),
    )
    return np.concatenate(
        [
            np.stack(columns, axis=1),
            to_bytes(seconds_by_activity > 0),
            to_bytes(seconds_by_activity / SECONDS_PER_DAY),
        ],
        axis=1,
    )


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Numbers, cut off at 0 and 1, as bytes: uint8 of the same shape, rounded to multiples of 1/255."""
    return np.rint(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
