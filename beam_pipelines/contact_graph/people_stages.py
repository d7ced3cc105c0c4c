"""Makes `People` from the tables about people in stages, which read, join, describe and sort the people's rows."""

import functools
from collections.abc import Iterable, Iterator

import numpy as np

from beam_pipelines.contact_graph.input_tables import Chunk, read_chunk
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
    chosen_rows,
    count_read_rows,
    drop_rows,
    find_places,
    gather,
    rows_of_people,
    scatter_by_id,
    unique_rows,
)
from beam_pipelines.contact_graph.rows import RowRules
from beam_pipelines.contact_graph.tables import ACTIVITY_NAMES, FEMALE, HOME, MALE, UNKNOWN_SEX
from beam_pipelines.dataset.accounting import KEPT, READ, count_users
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.keyed_hash import keyed_uint64
from beam_pipelines.records import Reason
from tff_pdp.data.manifest import SPLITS

# The largest valid age in years: nobody has been older.
_OLDEST_SOUND = 150
ORDER = "order_people"
# Tables whose rows are not joined by the id of a person.
_KEYS = {"person": "hid", "household": "hid", "residence_locations": "rlid"}
_MEMBER = {"pid": np.int64, "age": np.int32, "sex": np.int8, "hh_size": np.int32, "silo": np.int64, "group": np.int64}
_PERSON = {"pid": np.int64, "silo": np.int64, "group": np.int64, "infected": np.int16, "recovered": np.int16}
_PERSON |= {"target": np.int8} | dict.fromkeys(PERSON_FEATURES, np.uint8)


def people_stages(chunks: Iterable[Chunk], rules: RowRules) -> tuple[Stage, ...]:
    """Builds the stages; the last stage writes `People` into the staging folder."""
    tables = ("person", "household", "residence_locations", "homes", "activities", "states", "target")
    read, join, describe, order = (
        functools.partial(work, rules) for work in (_read_people, _join_people, _describe_people, _order_people)
    )
    return (
        Stage("read_people", tuple(chunks), read, gives=tables),
        partition_stage(
            "join_people", rules.num_shards, join, takes=tables[:4], gives=("members", "cells", SILO_NAMES)
        ),
        partition_stage(
            "describe_people", rules.num_shards, describe, takes=("members", "cells", *tables[4:]), gives=("people",)
        ),
        partition_stage(ORDER, 1, order, takes=("people", SILO_NAMES)),
    )


def _read_people(rules: RowRules, task: Chunk, context: TaskContext) -> Iterator[Piece]:
    """Sends each row in a chunk of a table about people to the partition of the id that the row is joined by."""
    for rows in read_chunk(task, rules.columns[task.table]):
        count_read_rows(context, task.table, rows)
        yield from _scatter(task.table, rows.columns, rules, context)


def _scatter(table: str, columns: Columns, rules: RowRules, context: TaskContext) -> Iterator[Piece]:
    if table == "activity_location_assignment":
        chosen = {name: columns[name] for name in ("pid", "activity_type", "duration")}
        yield from scatter_by_id("activities", "pid", rules.num_shards, chosen)
        if rules.grid_degrees is not None:
            homes = chosen_rows({name: columns[name] for name in ("pid", "lid")}, columns["activity_type"] == HOME)
            context.count("homes", READ, len(homes["pid"]))
            yield from scatter_by_id("homes", "lid", rules.num_shards, homes)
    elif table == "disease_outcome_training":
        # Rows of state S add nothing to the first day in another state.
        is_telling = columns["state"] > 0
        context.count(table, KEPT, len(is_telling) - is_telling.sum())
        yield from scatter_by_id("states", "pid", rules.num_shards, chosen_rows(columns, is_telling))
    else:
        yield from scatter_by_id(table, _KEYS.get(table, "pid"), rules.num_shards, columns)


def _join_people(rules: RowRules, task: int, context: TaskContext) -> Iterator[Piece]:
    """Joins people to households and homes to places; sends the data to the partition of the person's id."""
    rows = gather(context, "household", dict.fromkeys(rules.columns["household"], np.int64))
    household = unique_rows("household", "hid", rows, context)
    context.count("household", KEPT, len(household["hid"]))
    members, names = _members(household, rules, context)
    yield from scatter_by_id("members", "pid", rules.num_shards, members)
    if rules.grid_degrees is not None:
        cells, names = _cells(rules.grid_degrees, context)
        yield from scatter_by_id("cells", "pid", rules.num_shards, cells)
    yield from scatter_by_id(SILO_NAMES, "id", 1, names)


def _members(household: Columns, rules: RowRules, context: TaskContext) -> tuple[Columns, Columns]:
    person = gather(context, "person", dict.fromkeys(rules.columns["person"], np.int64))
    is_sound = (person["age"] >= 0) & (person["age"] <= _OLDEST_SOUND)
    is_sound &= np.isin(person["sex"], (UNKNOWN_SEX, MALE, FEMALE))
    drop_rows("person", Reason.AGE_OR_SEX_RANGE, person["pid"][~is_sound], context)
    person = chosen_rows(person, is_sound)
    places, is_known = find_places(household["hid"], person["hid"])
    sizes = np.zeros(len(places), np.int32)
    if rules.has_households:
        drop_rows("person", Reason.UNKNOWN_PLACE, person["pid"][~is_known], context)
        person, places = chosen_rows(person, is_known), places[is_known]
        sizes = household["hh_size"][places].astype(np.int32)
    silo, names = as_ids(_column(rules.options.rows.silo_by, person, household, places))
    group, _ = as_ids(_column(rules.options.rows.degree_bound.group_column, person, household, places))
    known = {name: person[name] for name in ("pid", "age", "sex")}
    return {**known, "hh_size": sizes, "silo": silo, "group": group}, names


def _column(name: str | None, person: Columns, household: Columns, places: np.ndarray) -> np.ndarray:
    table, _, column = (name or "").partition(".")
    if table == "person":
        return person[column]
    return household[column][places] if table == "household" else np.zeros(len(places), np.int64)


def _cells(side: float, context: TaskContext) -> tuple[Columns, Columns]:
    """Returns the cell of the grid that each home lies in, and the names of the cells."""
    homes = gather(context, "homes", {"pid": np.int64, "lid": np.int64})
    names = ("rlid", "longitude", "latitude")
    rows = gather(context, "residence_locations", dict.fromkeys(names, np.float64))
    residence = unique_rows("residence_locations", "rlid", rows, context)
    context.count("residence_locations", KEPT, len(residence["rlid"]))
    places, is_known = find_places(residence["rlid"].astype(np.int64), homes["lid"])
    # People without another home are left out later; homes with known places are counted where they arrive.
    context.count("homes", KEPT, len(is_known) - is_known.sum())
    south, west = (np.floor(residence[axis] / side).astype(np.int64) for axis in ("latitude", "longitude"))
    texts = [f"cell_{row}_{column}" for row, column in zip(south.tolist(), west.tolist(), strict=True)]
    cell, names = as_ids(np.array(texts, object))
    return {"pid": homes["pid"][is_known], "cell": cell[places[is_known]]}, names


def _describe_people(rules: RowRules, task: int, context: TaskContext) -> Iterator[Piece]:
    """Joins all data of the people of one partition to unsorted rows of `People`."""
    members = unique_rows("person", "pid", gather(context, "members", _MEMBER), context)
    if rules.grid_degrees is not None:
        members = _with_cells(members, context)
    infected, recovered, is_sound = _states(members["pid"], rules, context)
    features = _features(members, context)
    columns = {
        "pid": members["pid"],
        "silo": members["silo"],
        "group": members["group"],
        "infected": infected,
        "recovered": recovered,
        "target": _target(members["pid"], context),
        **{name: features[:, place] for place, name in enumerate(PERSON_FEATURES)},
    }
    yield from scatter_by_id("people", "pid", 1, chosen_rows(columns, is_sound))


def _with_cells(members: Columns, context: TaskContext) -> Columns:
    cells = gather(context, "cells", {"pid": np.int64, "cell": np.int64})
    context.count("homes", KEPT, len(cells["pid"]))
    # A person with two homes belongs to the cell with the smallest number.
    order = np.lexsort((cells["cell"], cells["pid"]))
    ids, first = np.unique(cells["pid"][order], return_index=True)
    places, is_known = find_places(ids, members["pid"])
    drop_rows("person", Reason.UNKNOWN_PLACE, members["pid"][~is_known], context)
    silo = cells["cell"][order][first][places[is_known]]
    return {**chosen_rows(members, is_known), "silo": silo}


def _states(pids: np.ndarray, rules: RowRules, context: TaskContext) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each person's first days in states I and R, and whether the states are in the order S, I, R."""
    rows = gather(context, "states", {"pid": np.int64, "day": np.int32, "state": np.int8})
    is_sound_day = (rows["day"] >= 0) & (rows["day"] < rules.options.rows.num_days)
    table = "disease_outcome_training"
    rows, places = rows_of_people(table, rows, pids, is_sound_day, Reason.TIME_RANGE, context)
    infected, recovered = (np.full(len(pids), NEVER, np.int32) for _ in range(2))
    last_infected = np.full(len(pids), -1, np.int32)
    is_ill, is_well = rows["state"] == 1, rows["state"] == 2
    np.minimum.at(infected, places[is_ill], rows["day"][is_ill])
    np.maximum.at(last_infected, places[is_ill], rows["day"][is_ill])
    np.minimum.at(recovered, places[is_well], rows["day"][is_well])
    is_sound = last_infected < recovered
    drop_rows("person", Reason.CONTRADICTORY_STATES, pids[~is_sound], context)
    return infected.astype(np.int16), recovered.astype(np.int16), is_sound


def _target(pids: np.ndarray, context: TaskContext) -> np.ndarray:
    rows = gather(context, "target", {"pid": np.int64, "infected": np.int8})
    rows = unique_rows("target", "pid", rows, context)
    is_label = (rows["infected"] == 0) | (rows["infected"] == 1)
    rows, places = rows_of_people("target", rows, pids, is_label, Reason.LABEL_RANGE, context)
    target = np.full(len(pids), -1, np.int8)
    target[places] = rows["infected"]
    return target


def _features(members: Columns, context: TaskContext) -> np.ndarray:
    rows = gather(context, "activities", {"pid": np.int64, "activity_type": np.int8, "duration": np.int32})
    is_sound = (rows["activity_type"] >= 1) & (rows["activity_type"] <= len(ACTIVITY_NAMES))
    is_sound &= (rows["duration"] >= 0) & (rows["duration"] <= SECONDS_PER_DAY)
    table = "activity_location_assignment"
    rows, places = rows_of_people(table, rows, members["pid"], is_sound, Reason.TIME_RANGE, context)
    cells = places * len(ACTIVITY_NAMES) + rows["activity_type"] - 1
    size = len(members["pid"]) * len(ACTIVITY_NAMES)
    seconds = np.bincount(cells, weights=rows["duration"], minlength=size).reshape(-1, len(ACTIVITY_NAMES))
    return person_features(members["age"], members["sex"], members["hh_size"], seconds)


def _order_people(rules: RowRules, task: int, context: TaskContext) -> Iterable[Piece]:
    """Sorts, counts and checks all people, and writes them as `People` into the staging folder for all tasks."""
    options = rules.options
    rows, named = gather(context, "people", _PERSON), gather(context, SILO_NAMES, {"id": np.int64, "name": object})
    names = dict(zip(named["id"].tolist(), named["name"].tolist(), strict=True))
    ids, silo = np.unique(rows["silo"], return_inverse=True)
    # Sorted by name, as clients are everywhere.
    by_name = sorted(ids.tolist(), key=lambda number: names[number])
    rank = {number: place for place, number in enumerate(by_name)}
    silo = np.array([rank[number] for number in ids.tolist()], np.int64)[silo]
    is_large = np.bincount(silo, minlength=len(ids)) >= options.min_people_per_silo
    _count(silo, is_large, rows["target"], options.rows.num_windows, context)
    keep = is_large[silo]
    silo, rows = (np.cumsum(is_large) - 1)[silo[keep]].astype(np.int32), chosen_rows(rows, keep)
    is_validation = keyed_uint64(options.seed, "split", rows["pid"]) < np.uint64(options.validation_fraction * 2.0**64)
    split = np.where(is_validation, SPLITS.index("validation"), SPLITS.index("train")).astype(np.int8)
    order = np.lexsort((rows["pid"], split, silo))
    _, group, group_sizes = np.unique(rows["group"], return_inverse=True, return_counts=True)
    options.rows.degree_bound.check_groups(group_sizes)
    People(
        silos=tuple(names[number] for number, large in zip(by_name, is_large.tolist(), strict=True) if large),
        silo=silo[order],
        split=split[order],
        group=group[order].astype(np.int32),
        features=np.stack([rows[name] for name in PERSON_FEATURES], axis=1)[order],
        **{name: rows[name][order] for name in ("pid", "infected", "recovered", "target")},
    ).save(context.folder)
    return ()


def _count(silo: np.ndarray, is_large: np.ndarray, target: np.ndarray, num_windows: int, context: TaskContext) -> None:
    """Counts silos, people and their rows as read; small silos are dropped, other rows count as kept when written."""
    is_lost = ~is_large[silo]
    num_lost = int(is_lost.sum())
    rows = len(silo) * num_windows + int((target >= 0).sum())
    lost_rows = num_lost * num_windows + int((target[is_lost] >= 0).sum())
    count_users(context, READ, users=len(is_large), examples=rows)
    count_users(context, KEPT, users=int(is_large.sum()), examples=0)
    count_users(context, Reason.TOO_FEW_EXAMPLES, users=int((~is_large).sum()), examples=lost_rows)
    context.count("person", KEPT, len(silo) - num_lost)
    context.count("person", Reason.TOO_FEW_EXAMPLES, num_lost)
