"""Stores all people of a population as arrays, which all tasks read from files, and computes people's features.

A person's features are bytes; each byte represents a number between 0 and 1. Values are clipped to fixed ranges. The
ranges are public constants, the same for all data, and do not depend on the population.
"""

import dataclasses
import json
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy as np

from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FEMALE, MALE
from beam_pipelines.dataset.staging import remove

PEOPLE_FOLDER = ".people"
# The day of an illness or a recovery that does not happen.
NEVER = np.int16(np.iinfo(np.int16).max)
_NAMES_FILE = "silos.json"
# Ids that are nearly consecutive are looked up in an array with at most this number of entries for each id.
_SPARSEST = 8


@dataclasses.dataclass(frozen=True)
class People:
    """People as arrays `[n]`, sorted by silo, split and id. A person's "place" is the position in this order.

    Attributes:
      silos: names of the silos, sorted.
      pid: id of each person, int64.
      silo: position of each person's silo in `silos`, int32.
      split: position of the split of each person's rows in `SPLITS`, int8.
      group: number of each person's group, int32; contacts between people of different groups are left out.
      features: features of each person, uint8 `[n, features]`.
      infected: first day in state I, or `NEVER`; int16.
      recovered: first day in state R, or `NEVER`; int16.
      target: 1 if the person falls ill in the days after the observed days, 0 if not, -1 if this is not known; int8.
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
        """Writes the arrays into a job's staging folder, atomically; does nothing if the arrays are there already."""
        folder = staging / f"{PEOPLE_FOLDER}.{uuid.uuid4().hex}"
        folder.mkdir()
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        for name, array in PlaceLookup.of(self.pid)._asdict().items():
            np.save(folder / f"{name}.npy", array)
        (folder / _NAMES_FILE).write_text(json.dumps(self.silos))
        try:
            folder.rename(staging / PEOPLE_FOLDER)
        except OSError:
            if not (staging / PEOPLE_FOLDER).is_dir():
                raise
            # The task ran twice; other tasks may be reading the first result, which is the same.
            remove(folder)

    @classmethod
    def load(cls, staging: Path) -> "People":
        """Opens the arrays as memory maps: values are read from the files when used."""
        folder = staging / PEOPLE_FOLDER
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        return cls(silos=tuple(json.loads((folder / _NAMES_FILE).read_text())), **arrays)


_ARRAYS = tuple(field.name for field in dataclasses.fields(People) if field.name != "silos")


class PlaceLookup(NamedTuple):
    """Arrays that map people's ids to the people's places; see `People`.

    Attributes:
      sorted_pid: sorted ids, int64 `[n]`.
      place_of_sorted_pid: place of each sorted id, int32 `[n]`.
      place_of_pid: place of each number from the smallest id to the largest, int32, -1 for numbers that are no id;
        empty if ids are far apart.
    """

    sorted_pid: np.ndarray
    place_of_sorted_pid: np.ndarray
    place_of_pid: np.ndarray

    @classmethod
    def of(cls, pids: np.ndarray) -> "PlaceLookup":
        """Builds the arrays; `pids` are the ids in the order of the places, int64 `[n]`."""
        order = np.argsort(pids, kind="stable").astype(np.int32)
        ids, places = pids[order], np.empty(0, np.int32)
        # Python's integers do not overflow.
        if len(ids) and int(ids[-1]) - int(ids[0]) < _SPARSEST * len(ids):
            places = np.full(int(ids[-1] - ids[0]) + 1, -1, np.int32)
            places[ids - ids[0]] = order
        return cls(ids, order, places)

    @classmethod
    def load(cls, staging: Path) -> "PlaceLookup":
        """Opens the arrays of the people in a job's staging folder."""
        return cls(*(np.load(staging / PEOPLE_FOLDER / f"{name}.npy", mmap_mode="r") for name in cls._fields))

    def places(self, pids: np.ndarray) -> np.ndarray:
        """Returns the places of ids, int32 `[n]`, -1 for people who are not in the population."""
        if not len(self.sorted_pid):
            return np.full(len(pids), -1, np.int32)
        if len(self.place_of_pid):
            offset = pids - self.sorted_pid[0]
            is_inside = (offset >= 0) & (offset < len(self.place_of_pid))
            return np.where(is_inside, self.place_of_pid[np.where(is_inside, offset, 0)], np.int32(-1))
        found = np.minimum(np.searchsorted(self.sorted_pid, pids), len(self.sorted_pid) - 1)
        return np.where(self.sorted_pid[found] == pids, self.place_of_sorted_pid[found], np.int32(-1))


# The table of silos' names; all other tables have numbers of silos.
SILO_NAMES = "silo_names"

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
    """Returns the features of people, uint8 `[n, features]`, in the order of `PERSON_FEATURES`.

    Args:
      age: ages in years, `[n]`.
      sex: 1 for male, 2 for female, 0 for unknown, `[n]`.
      household_size: number of people in each person's household, `[n]`; 0 for an unknown size.
      seconds_by_activity: seconds of a day that each person spends on each activity, `[n, 7]`.
    """
    columns = (
        to_bytes(age / OLDEST),
        to_bytes(sex == MALE),
        to_bytes(sex == FEMALE),
        to_bytes(household_size / LARGEST_HOUSEHOLD),
    )
    return np.concatenate(
        [np.stack(columns, axis=1), to_bytes(seconds_by_activity > 0), to_bytes(seconds_by_activity / SECONDS_PER_DAY)],
        axis=1,
    )


def to_bytes(values: np.ndarray) -> np.ndarray:
    """Converts numbers to bytes: 255 times the number clipped to [0, 1], rounded; uint8 of equal shape."""
    return np.rint(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
