"""Makes `People` of the tables about people, in stages: read, join to households and places, describe, order."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from beam_pipelines.contact_graph.input_tables import Chunk, InputRows, read_chunk
from beam_pipelines.contact_graph.people import (
    NEVER,
    PERSON_FEATURES,
    SECONDS_PER_DAY,
    SILO_NAMES,
    People,
    person_features,
)
from beam_pipelines.contact_graph.row_steps import (
    Columns,
    as_ids,
    count_read_rows,
    drop_rows,
    find_places,
    gather,
    partition_of,
    scatter,
    unique_rows,
)
from beam_pipelines.contact_graph.rows import RowRules
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FEMALE, HOME, MALE, UNKNOWN_SEX
from beam_pipelines.dataset.accounting import count_dropped, count_kept, count_read, count_rows
from beam_pipelines.dataset.shards import DeadLetterFile
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.keyed_hash import keyed_uint64
from beam_pipelines.records import Reason
from tff_pdp.data.manifest import SPLITS

# In years: nobody has been older.
_OLDEST_SOUND = 150

ORDER = "order_people"


@dataclasses.dataclass(frozen=True)
class OrderPeople:
    """Everybody -> `People` in the staging folder, for all tasks to look into."""

    rules: RowRules

    def __call__(self, task: int, context: TaskContext) -> Iterable[Piece]:
        """Writes everybody, counted and checked."""
        rows = gather(
            context,
            "people",
            {"pid": np.int64, "silo": np.int64, "group": np.int64, "infected": np.int16, "recovered": np.int16}
            | {"target": np.int8}
            | dict.fromkeys(PERSON_FEATURES, np.uint8),
        )
        names = self._silo_names(context)
        ids, silo = np.unique(rows["silo"], return_inverse=True)
        # Sorted by name, as clients are everywhere.
        by_name = sorted(ids.tolist(), key=lambda number: names[number])
        rank = {number: place for place, number in enumerate(by_name)}
        silo = np.array([rank[number] for number in ids.tolist()], np.int64)[silo]
        sizes = np.bincount(silo, minlength=len(ids))
        is_large = sizes >= self.rules.min_people
        self._count(silo, is_large, rows["target"], context)
        keep = is_large[silo]
        silo = (np.cumsum(is_large) - 1)[silo[keep]].astype(np.int32)
        rows = {name: values[keep] for name, values in rows.items()}
        split = self._splits(rows["pid"])
        order = np.lexsort((rows["pid"], split, silo))
        _, group, group_sizes = np.unique(rows["group"], return_inverse=True, return_counts=True)
        self.rules.degree_bound.check_groups(group_sizes)
        People(
            silos=tuple(names[number] for number, large in zip(by_name, is_large.tolist(), strict=True) if large),
            pid=rows["pid"][order],
            silo=silo[order],
            split=split[order],
            group=group[order].astype(np.int32),
            features=np.stack([rows[name] for name in PERSON_FEATURES], axis=1)[order],
            infected=rows["infected"][order],
            recovered=rows["recovered"][order],
            target=rows["target"][order],
        ).save(context.folder)
        return ()

    def _silo_names(self, context: TaskContext) -> dict[int, str]:
        rows = gather(context, SILO_NAMES, {"id": np.int64, "name": object})
        return dict(zip(rows["id"].tolist(), rows["name"].tolist(), strict=True))

    def _count(self, silo: np.ndarray, is_large: np.ndarray, target: np.ndarray, context: TaskContext) -> None:
        """Counts silos, people, and the rows that they should have; those of large silos are kept when written."""
        is_lost = ~is_large[silo]
        num_lost = int(is_lost.sum())
        rows = len(silo) * self.rules.num_windows + int((target >= 0).sum())
        lost_rows = num_lost * self.rules.num_windows + int((target[is_lost] >= 0).sum())
        count_read(context, users=len(is_large), examples=rows)
        count_kept(context, users=int(is_large.sum()), examples=0)
        count_dropped(context, Reason.TOO_FEW_EXAMPLES, users=int((~is_large).sum()), examples=lost_rows)
        count_rows(context, "person", "kept", len(silo) - num_lost)
        count_rows(context, "person", Reason.TOO_FEW_EXAMPLES, num_lost)

    def _splits(self, pids: np.ndarray) -> np.ndarray:
        limit = np.uint64(self.rules.validation_fraction * 2.0**64)
        is_validation = keyed_uint64(self.rules.seed, "split", pids) < limit
        return np.where(is_validation, SPLITS.index("validation"), SPLITS.index("train")).astype(np.int8)


READ, JOIN, DESCRIBE = "read_people", "join_people", "describe_people"
_KEY = {"person": "hid", "household": "hid", "residence_locations": "rlid"}
_MEMBER = {"pid": np.int64, "age": np.int32, "sex": np.int8, "hh_size": np.int32, "silo": np.int64, "group": np.int64}


def people_stages(chunks: Iterable[Chunk], rules: RowRules) -> tuple[Stage, ...]:
    """Builds the stages; the last one writes `People` into the staging folder."""
    tables = ("person", "household", "residence_locations", "homes", "activities", "states", "target")
    return (
        Stage(READ, tuple(chunks), _ReadPeople(rules), gives=tables),
        partition_stage(
            JOIN,
            rules.num_shards,
            _JoinPeople(rules),
            takes=("person", "household", "residence_locations", "homes"),
            gives=("members", "cells", SILO_NAMES),
        ),
        partition_stage(
            DESCRIBE,
            rules.num_shards,
            _DescribePeople(rules),
            takes=("members", "cells", "activities", "states", "target"),
            gives=("people",),
        ),
        partition_stage(ORDER, 1, OrderPeople(rules), takes=("people", SILO_NAMES)),
    )


@dataclasses.dataclass(frozen=True)
class _ReadPeople:
    """A chunk of a table about people -> its rows, to the partition of the id they are joined by."""

    rules: RowRules

    def __call__(self, task: Chunk, context: TaskContext) -> Iterator[Piece]:
        with DeadLetterFile(context.folder, READ, context.number) as letters:
            for rows in read_chunk(task, self.rules.columns[task.table]):
                count_read_rows(context, task.table, rows, letters)
                yield from self._scatter(task.table, rows, context)

    def _scatter(self, table: str, rows: InputRows, context: TaskContext) -> Iterator[Piece]:
        columns, num_partitions = rows.columns, self.rules.num_shards
        if table in _KEY:
            yield from scatter(table, partition_of(columns[_KEY[table]], num_partitions), num_partitions, columns)
            return
        by_person = partition_of(columns["pid"], num_partitions)
        if table == "activity_location_assignment":
            chosen = {name: columns[name] for name in ("pid", "activity_type", "duration")}
            yield from scatter("activities", by_person, num_partitions, chosen)
            if self.rules.grid_degrees is not None:
                is_home = columns["activity_type"] == HOME
                homes = {name: columns[name][is_home] for name in ("pid", "lid")}
                count_rows(context, "homes", "read", len(homes["pid"]))
                yield from scatter("homes", partition_of(homes["lid"], num_partitions), num_partitions, homes)
        elif table == "disease_outcome_training":
            # Rows of state S add nothing to the first day in another state.
            is_telling = columns["state"] > 0
            count_rows(context, table, "kept", int(len(is_telling) - is_telling.sum()))
            telling = {name: values[is_telling] for name, values in columns.items()}
            yield from scatter("states", by_person[is_telling], num_partitions, telling)
        else:
            yield from scatter("target", by_person, num_partitions, columns)


@dataclasses.dataclass(frozen=True)
class _JoinPeople:
    """People with their households, and homes with their places -> the data of each person, by its id."""

    rules: RowRules

    def __call__(self, task: int, context: TaskContext) -> Iterator[Piece]:
        num_partitions = self.rules.num_shards
        person = gather(context, "person", dict.fromkeys(self.rules.columns["person"], np.int64))
        with DeadLetterFile(context.folder, JOIN, task) as letters:
            household = self._households(context, letters)
            members, names = self._members(person, household, context, letters)
            yield from scatter("members", partition_of(members["pid"], num_partitions), num_partitions, members)
            side = self.rules.grid_degrees
            if side is not None:
                cells, names = self._cells(side, context, letters)
                yield from scatter("cells", partition_of(cells["pid"], num_partitions), num_partitions, cells)
            yield from scatter(SILO_NAMES, np.zeros(len(names["id"]), np.int64), 1, names)

    def _households(self, context: TaskContext, letters: DeadLetterFile) -> dict[str, np.ndarray]:
        columns = self.rules.columns.get("household", ("hid",))
        rows = gather(context, "household", dict.fromkeys(columns, np.int64))
        household = unique_rows("household", "hid", rows, context, letters)
        count_rows(context, "household", "kept", len(household["hid"]))
        return household

    def _members(
        self, person: Columns, household: Columns, context: TaskContext, letters: DeadLetterFile
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        is_sound = (person["age"] >= 0) & (person["age"] <= _OLDEST_SOUND)
        is_sound &= np.isin(person["sex"], (UNKNOWN_SEX, MALE, FEMALE))
        if not is_sound.all():
            drop_rows("person", Reason.AGE_OR_SEX_RANGE, person["pid"][~is_sound], context, letters)
            person = {name: values[is_sound] for name, values in person.items()}
        places, is_known = find_places(household["hid"], person["hid"])
        if self.rules.has_households and not is_known.all():
            drop_rows("person", Reason.UNKNOWN_PLACE, person["pid"][~is_known], context, letters)
            person = {name: values[is_known] for name, values in person.items()}
            places = places[is_known]
        size = len(person["pid"])
        sizes = household["hh_size"][places] if self.rules.has_households else np.zeros(size, np.int32)
        silo, names = as_ids(self._column(self.rules.silo_by, person, household, places))
        group, _ = as_ids(self._column(self.rules.degree_bound.group_column, person, household, places))
        known = {name: person[name] for name in ("pid", "age", "sex")}
        return {**known, "hh_size": sizes.astype(np.int32), "silo": silo, "group": group}, names

    def _column(self, name: str | None, person: Columns, household: Columns, places: np.ndarray) -> np.ndarray:
        table, _, column = (name or "").partition(".")
        if table == "person":
            return person[column]
        return household[column][places] if table == "household" else np.zeros(len(places), np.int64)

    def _cells(
        self, side: float, context: TaskContext, letters: DeadLetterFile
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the cell of the grid that each home lies in, and the names of cells."""
        homes = gather(context, "homes", {"pid": np.int64, "lid": np.int64})
        names = ("rlid", "longitude", "latitude")
        rows = gather(context, "residence_locations", dict.fromkeys(names, np.float64))
        residence = unique_rows("residence_locations", "rlid", rows, context, letters)
        count_rows(context, "residence_locations", "kept", len(residence["rlid"]))
        places, is_known = find_places(residence["rlid"].astype(np.int64), homes["lid"])
        # People without another home are left out later; homes in known places are counted where they arrive.
        count_rows(context, "homes", "kept", int(len(is_known) - is_known.sum()))
        south, west = (np.floor(residence[axis] / side).astype(np.int64) for axis in ("latitude", "longitude"))
        texts = [f"cell_{row}_{column}" for row, column in zip(south.tolist(), west.tolist(), strict=True)]
        cell, names = as_ids(np.array(texts, object))
        return {"pid": homes["pid"][is_known], "cell": cell[places[is_known]]}, names


@dataclasses.dataclass(frozen=True)
class _DescribePeople:
    """All data of the people of one partition -> rows of `People`, in no order yet."""

    rules: RowRules

    def __call__(self, task: int, context: TaskContext) -> Iterator[Piece]:
        with DeadLetterFile(context.folder, DESCRIBE, task) as letters:
            members = unique_rows("person", "pid", gather(context, "members", _MEMBER), context, letters)
            if self.rules.grid_degrees is not None:
                members = self._with_cells(members, context, letters)
            infected, recovered, is_sound = self._states(members["pid"], context, letters)
            target = self._target(members["pid"], context, letters)
            features = self._features(members, context, letters)
        columns = {
            "pid": members["pid"],
            "silo": members["silo"],
            "group": members["group"],
            "infected": infected,
            "recovered": recovered,
            "target": target,
            **{name: features[:, place] for place, name in enumerate(PERSON_FEATURES)},
        }
        chosen = {name: np.ascontiguousarray(values[is_sound]) for name, values in columns.items()}
        yield from scatter("people", np.zeros(int(is_sound.sum()), np.int64), 1, chosen)

    def _with_cells(
        self, members: dict[str, np.ndarray], context: TaskContext, letters: DeadLetterFile
    ) -> dict[str, np.ndarray]:
        cells = gather(context, "cells", {"pid": np.int64, "cell": np.int64})
        count_rows(context, "homes", "kept", len(cells["pid"]))
        # Someone with two homes is counted where the first of them, by number, is.
        order = np.lexsort((cells["cell"], cells["pid"]))
        ids, first = np.unique(cells["pid"][order], return_index=True)
        places, is_known = find_places(ids, members["pid"])
        drop_rows("person", Reason.UNKNOWN_PLACE, members["pid"][~is_known], context, letters)
        silo = cells["cell"][order][first][places[is_known]]
        return {**{name: values[is_known] for name, values in members.items()}, "silo": silo}

    def _states(
        self, pids: np.ndarray, context: TaskContext, letters: DeadLetterFile
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the first days in states I and R, and whether a person's days go from one to the other."""
        table = "disease_outcome_training"
        rows = gather(context, "states", {"pid": np.int64, "day": np.int32, "state": np.int8})
        places, is_known = find_places(pids, rows["pid"])
        is_sound_day = (rows["day"] >= 0) & (rows["day"] < self.rules.num_days)
        drop_rows(table, Reason.UNKNOWN_PERSON, rows["pid"][~is_known], context, letters)
        drop_rows(table, Reason.TIME_RANGE, rows["pid"][is_known & ~is_sound_day], context, letters)
        used = is_known & is_sound_day
        infected, recovered = (np.full(len(pids), NEVER, np.int32) for _ in range(2))
        last_infected = np.full(len(pids), -1, np.int32)
        for state, first in ((1, infected), (2, recovered)):
            chosen = used & (rows["state"] == state)
            np.minimum.at(first, places[chosen], rows["day"][chosen])
        is_ill = used & (rows["state"] == 1)
        np.maximum.at(last_infected, places[is_ill], rows["day"][is_ill])
        is_sound = last_infected < recovered
        drop_rows("person", Reason.CONTRADICTORY_STATES, pids[~is_sound], context, letters)
        count_rows(context, table, "kept", int(used.sum()))
        return infected.astype(np.int16), recovered.astype(np.int16), is_sound

    def _target(self, pids: np.ndarray, context: TaskContext, letters: DeadLetterFile) -> np.ndarray:
        rows = unique_rows(
            "target", "pid", gather(context, "target", {"pid": np.int64, "infected": np.int8}), context, letters
        )
        places, is_known = find_places(pids, rows["pid"])
        is_label = (rows["infected"] == 0) | (rows["infected"] == 1)
        drop_rows("target", Reason.UNKNOWN_PERSON, rows["pid"][~is_known], context, letters)
        drop_rows("target", Reason.LABEL_RANGE, rows["pid"][is_known & ~is_label], context, letters)
        used = is_known & is_label
        count_rows(context, "target", "kept", int(used.sum()))
        target = np.full(len(pids), -1, np.int8)
        target[places[used]] = rows["infected"][used]
        return target

    def _features(self, members: Mapping[str, np.ndarray], context: TaskContext, letters: DeadLetterFile) -> np.ndarray:
        table = "activity_location_assignment"
        rows = gather(context, "activities", {"pid": np.int64, "activity_type": np.int8, "duration": np.int32})
        places, is_known = find_places(members["pid"], rows["pid"])
        is_sound = (
            (rows["activity_type"] >= 1)
            & (rows["activity_type"] <= len(ACTIVITY_NAMES))
            & (rows["duration"] >= 0)
            & (rows["duration"] <= SECONDS_PER_DAY)
        )
        drop_rows(table, Reason.UNKNOWN_PERSON, rows["pid"][~is_known], context, letters)
        drop_rows(table, Reason.TIME_RANGE, rows["pid"][is_known & ~is_sound], context, letters)
        used = is_known & is_sound
        count_rows(context, table, "kept", int(used.sum()))
        cells = places[used] * len(ACTIVITY_NAMES) + rows["activity_type"][used] - 1
        size = len(members["pid"]) * len(ACTIVITY_NAMES)
        seconds = np.bincount(cells, weights=rows["duration"][used], minlength=size)
        return person_features(
            members["age"], members["sex"], members["hh_size"], seconds.reshape(-1, len(ACTIVITY_NAMES))
        )
