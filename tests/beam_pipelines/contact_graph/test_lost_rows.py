"""Rows lost or given twice on their way from one stage to another end the job; a task itself may be run twice."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from beam_pipelines.contact_graph.people import PEOPLE_FOLDER, People
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, Work
from tests.beam_pipelines.contact_graph.graph_support import (
    contents,
    job_of,
    options_of,
    run_in_memory,
    small_town,
)

REGION, GRID = "person.region", "residence_grid.0.5"
BY_ANYTHING = {"person", "household", "activities", "states", "target", "members", "people", "contacts"}
BY_GRID = {"residence_locations", "homes", "cells"}
# Not counted: a silo without a name is a KeyError.
NAMES = "silo_names"
CASES = [*((REGION, table) for table in sorted(BY_ANYTHING)), *((GRID, table) for table in sorted(BY_GRID))]


@pytest.fixture(scope="module")
def stages_by(tmp_path_factory):
    """The stages of the job on a small town in which everybody has a home, by what makes silos."""
    folder = tmp_path_factory.mktemp("town")
    source = small_town().write(folder / "input")
    (source / "residence_locations.csv").write_text("rlid,longitude,latitude\n7,0.1,0.2\n8,2.0,2.0\n")
    with open(source / "activity_location_assignment.csv", "a") as file:
        file.writelines(f"{pid},{7 + pid % 2},1,0,100\n" for pid in small_town().people)
    return {silo_by: job_of(options_of(source, folder, silo_by=silo_by)).stages for silo_by in (REGION, GRID)}


@pytest.mark.parametrize(("silo_by", "table"), CASES)
def test_a_row_is_lost(tmp_path, stages_by, silo_by, table):
    changed = change_first_piece(
        stages_by[silo_by], table, lambda piece: [dataclasses.replace(piece, batch=piece.batch.slice(1))]
    )
    with pytest.raises(RuntimeError, match="were lost"):
        run_in_memory(changed, tmp_path / "staging")


@pytest.mark.parametrize(("silo_by", "table"), CASES)
def test_a_piece_comes_twice(tmp_path, stages_by, silo_by, table):
    changed = change_first_piece(stages_by[silo_by], table, lambda piece: [piece, piece])
    with pytest.raises(RuntimeError, match="counted twice"):
        run_in_memory(changed, tmp_path / "staging")


def test_every_table_is_tried_and_nothing_is_lost_otherwise(tmp_path, stages_by):
    given = {table for stages in stages_by.values() for stage in stages for table in stage.gives}
    assert given == BY_ANYTHING | BY_GRID | {NAMES}
    for stages in stages_by.values():
        counts = run_in_memory(change_first_piece(stages, "people", lambda piece: [piece]), tmp_path / "staging")
        assert counts.kept.examples == 2 * counts.rows["person"].kept == 2 * len(small_town().people)


def test_people_saved_twice_stay_as_they_were(tmp_path):
    people_of(3, 5).save(tmp_path)
    before = contents(tmp_path)
    people_of(4, 6).save(tmp_path)
    assert contents(tmp_path) == before
    assert People.load(tmp_path).pid.tolist() == [3, 5]


def test_people_cannot_be_saved_where_something_else_is(tmp_path):
    (tmp_path / PEOPLE_FOLDER).write_text("")
    with pytest.raises(OSError, match=PEOPLE_FOLDER):
        people_of(3).save(tmp_path)


def change_first_piece(stages: Iterable[Stage], table: str, change: Callable[[Piece], list[Piece]]) -> list[Stage]:
    """Stages of which the first piece of a table is given in another way."""
    return [
        dataclasses.replace(stage, work=FirstPieceChanged(stage.work, table, change)) if table in stage.gives else stage
        for stage in stages
    ]


@dataclasses.dataclass
class FirstPieceChanged:
    work: Work
    table: str
    change: Callable[[Piece], list[Piece]]
    is_done: bool = False

    def __call__(self, task: Any, context: TaskContext) -> Iterator[Piece]:
        for piece in self.work(task, context):
            if piece.table == self.table and not self.is_done:
                self.is_done = True
                yield from self.change(piece)
            else:
                yield piece


def people_of(*pids: int) -> People:
    size = len(pids)
    days = np.zeros(size, np.int16)
    numbers, small = np.zeros(size, np.int32), np.zeros(size, np.int8)
    features = np.zeros((size, 18), np.uint8)
    return People(("a",), np.array(pids), numbers, small, numbers, features, days, days, small)
