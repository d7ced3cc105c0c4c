"""Stages do the same on every engine, in their order, and a staged job goes on where it was."""

import os

import pytest

from beam_pipelines.engine import run as staged
from beam_pipelines.engine.run import PIECE_FOLDER
from beam_pipelines.engine.stages import Piece, decode_pieces, encode_piece, read_pieces, write_pieces
from beam_pipelines.engine.tasks import REPORT_FOLDER
from tests.beam_pipelines.engine.engine_support import (
    NUM_PARTITIONS,
    NUM_READERS,
    batch_of,
    failing_read_task,
    notes_in,
    read_task,
    slow_read_task,
    stages_of,
    tasks_done,
)
from tff_pdp.errors import DataError

PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
ENGINES = {
    "files": (True, ()),
    "runner": (False, ()),
    "runner, threads": (False, ("--direct_num_workers=2", "--direct_running_mode=multi_threading")),
    "runner, processes": (False, PROCESSES),
}
# Of what reaches a partition: by stage, task and order, whoever was first.
EXPECTED = {
    "add-0": {"squares": [[0], [0, 0], [9], [-3, 0]], "cubes": [[0], [27]]},
    "add-1": {"squares": [[1], [-1, 0], [16], [-4, 0]], "cubes": [[1], [64]]},
    "add-2": {"squares": [[4], [-2, 0], [25], [-5, 0]], "cubes": [[8], [125]]},
    "add-3": {},
    "collect-0": [["add-0", "add-1", "add-2", "add-3"], [[33], [77], [155], [0]], NUM_READERS],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / REPORT_FOLDER).mkdir()
    return tmp_path


def run_stages(stages, folder, is_staged=True, flags=()):
    """As `staged.run_stages`, on the runner that jobs use."""
    return staged.run_stages(stages, folder, is_staged=is_staged, flags=["--runner=FnApiRunner", *flags])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_same_on_every_engine(folder, engine):
    counts = run_stages(stages_of(slow_read_task), folder, *engine)
    assert notes_in(folder) == EXPECTED
    assert counts == {"numbers/read": 2 * NUM_READERS, "numbers/kept": 2 * NUM_READERS}
    assert len(tasks_done(folder)) == NUM_READERS + NUM_PARTITIONS + 1
    # Tasks were really done by other processes, and by two of them.
    processes = {int(path.name.removeprefix("process-")) for path in folder.glob("process-*")}
    if PROCESSES in engine:
        assert len(processes) == 2 and os.getpid() not in processes
    else:
        assert processes == {os.getpid()}
    # What no stage takes any more takes no space.
    assert not [path for path in (folder / PIECE_FOLDER).rglob("*") if path.is_file()]


@pytest.mark.parametrize("is_staged", [True, False])
def test_first_error_of_input_is_told(folder, is_staged):
    with pytest.raises(DataError) as caught:
        run_stages(stages_of(failing_read_task), folder, is_staged)
    assert str(caught.value) == "file 2: no good (and 1 more errors in other tasks)"


@pytest.mark.parametrize("is_staged", [True, False])
def test_only_declared_tables_are_given(folder, is_staged):
    def read(task, context):
        yield from read_task(task, context)
        yield Piece("roots", 0, batch_of([1]))

    with pytest.raises(ValueError, match="yielded a piece of 'roots', not of"):
        run_stages(stages_of(read), folder, is_staged)


@pytest.mark.parametrize("stage", ["read", "add"])
def test_staged_job_goes_on_where_it_was(folder, monkeypatch, stage):
    done = watch_tasks(monkeypatch, stop_at=(stage, 2))
    with pytest.raises(RuntimeError, match="stopped here"):
        run_stages(stages_of(), folder)
    before = tasks_done(folder)
    assert before == set(done) and (stage, 2) not in before
    # Tasks come in any order, so that how many are done may differ, but not all and not none are.
    assert 0 < len(before) < NUM_READERS + NUM_PARTITIONS
    done = watch_tasks(monkeypatch)
    run_stages(stages_of(), folder)
    assert not before & set(done) and len(done) == len(set(done))
    assert before | set(done) == tasks_done(folder)
    assert notes_in(folder) == EXPECTED
    # And a third time there is nothing left to do.
    done = watch_tasks(monkeypatch)
    assert run_stages(stages_of(), folder)["numbers/read"] == 2 * NUM_READERS
    assert not done


def test_pieces_come_back_by_partition_and_in_order(tmp_path):
    pieces = [Piece("ab"[number % 2], number % 3, batch_of([number])) for number in range(12)]
    write_pieces(tmp_path / "one", pieces[:6], 0, 0, ("a", "b"))
    write_pieces(tmp_path / "two", pieces[6:], 0, 1, ("a", "b"))
    write_pieces(tmp_path / "none", [], 0, 2, ("a", "b"))
    found = [content for name in ("two", "none", "one") for content in read_pieces(tmp_path / name, [1], 1)]
    assert {table: values_of(batches) for table, batches in decode_pieces([*found, b""]).items()} == {"b": [1, 7]}
    assert list(read_pieces(tmp_path / "one", [0, 1], 3)) == []


def test_order_is_that_of_numbers():
    # As text, 10 would come before 9.
    origins = [(0, 9, 10), (0, 9, 9), (0, 10, 0), (10, 0, 0), (9, 11, 0)]
    encoded = [
        encode_piece(Piece("a", 0, batch_of([place])), *origin).to_pybytes() for place, origin in enumerate(origins)
    ]
    assert values_of(decode_pieces(encoded)["a"]) == [1, 0, 2, 4, 3]


def watch_tasks(monkeypatch, stop_at=None):
    """The tasks that are done from now on, up to one that ends the job."""
    monkeypatch.undo()
    done = []

    class Watched(staged.TaskRun):
        def __init__(self, stage, number, tables, folder):
            self.name = (stage.name, number)
            super().__init__(stage, number, tables, folder)

        def pieces(self):
            yield from super().pieces()
            if self.name == stop_at:
                raise RuntimeError("stopped here")

        def report(self):
            super().report()
            done.append(self.name)

    monkeypatch.setattr(staged, "TaskRun", Watched)
    return done


def values_of(batches):
    return [value for batch in batches for value in batch["value"].to_pylist()]
