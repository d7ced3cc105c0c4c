"""Runs one task in a worker, writes and reads the reports of tasks, and ends workers when their job ends.

A report is a small file in the staging folder, with the outcome of a task. The number of reports shows the progress of
a job.
"""

import dataclasses
import functools
import json
import os
import select
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow

from beam_pipelines.engine.stages import Piece, Stage, TaskContext
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER
from tff_pdp.errors import UserError
from tff_pdp.files import write_atomically

REPORT_FOLDER = ".reports"
# Largest number of ancestors to look at: Beam starts a worker through a shell, whose parent is the job.
_GENERATIONS = 3


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Outcome of a task: counts of records, and the message of an error that ends the job (empty without an error)."""

    counts: Mapping[str, int]
    error: str


def is_done(folder: Path, stage: str, task: int) -> bool:
    """Tells whether a task has ended and written its report."""
    return _path(folder, stage, task).exists()


def count_done(folder: Path, stage: str) -> int:
    """Counts the tasks of a stage that have ended."""
    return sum(1 for _ in (folder / REPORT_FOLDER / stage).glob("*.json"))


def read_reports(folder: Path, stage: str) -> list[TaskReport]:
    """Reads the reports of a stage's tasks, in the order of the tasks."""
    paths = sorted((folder / REPORT_FOLDER / stage).glob("*.json"))
    return [TaskReport(**json.loads(path.read_bytes())) for path in paths]


def _path(folder: Path, stage: str, task: int) -> Path:
    return folder / REPORT_FOLDER / stage / f"{task:08d}.json"


class TaskRun:
    """One run of a task; the caller stores everything that `pieces` yields, and then calls `report`.

    A `UserError` ends `pieces` but is not raised: the report contains the error's message, with which the job fails. If
    the error were raised in the worker, the runner's stack traces would bury the message.
    """

    def __init__(self, stage: Stage, number: int, tables: Mapping[str, list[pyarrow.RecordBatch]], folder: Path):
        """Prepares task `number` of a stage; `tables` are the task's input, `folder` is the job's staging folder."""
        self._stage = stage
        self._context = TaskContext(number, folder, tables)
        self._error = ""

    def pieces(self) -> Iterator[Piece]:
        """Runs the task and yields its pieces, except pieces without rows."""
        stage, number = self._stage, self._context.number
        try:
            for piece in stage.work(stage.tasks[number], self._context):
                if piece.table not in stage.gives:
                    raise ValueError(f"stage {stage.name} yielded a piece of {piece.table!r}, not of {stage.gives}")
                if len(piece.batch):
                    yield piece
        except UserError as error:
            self._error = str(error)

    def report(self) -> None:
        """Writes the task's dead letters, except after an error, and then the task's report."""
        context, stage = self._context, self._stage.name
        lines = sorted(json.dumps(dataclasses.asdict(letter)) for letter in context.letters)
        # A second run of the same task writes the same bytes.
        if lines and not self._error:
            path = context.folder / DEAD_LETTER_FOLDER / f"{stage}-{context.number:05d}.jsonl"
            write_atomically(path, (f"{line}\n".encode() for line in lines))
        path = _path(context.folder, stage, context.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(dataclasses.asdict(TaskReport(dict(context.counts), self._error))).encode()])


def end_with(job: int) -> None:
    """Makes this worker process end when its job ends; `job` is the id of the job's process."""
    if os.getpid() != job and hasattr(os, "pidfd_open"):
        _watch(job)


@functools.cache
def _watch(job: int) -> None:
    try:
        watched = os.pidfd_open(job)
    except OSError:
        return
    # Checked after opening: the number may have passed to another process before, which is not an ancestor.
    if job not in _ancestors():
        os.close(watched)
        return
    threading.Thread(target=_wait, args=(watched,), name="end with the job", daemon=True).start()


def _wait(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    # Other threads may be in any state, and the job that would see an error is gone.
    os._exit(1)


def _ancestors() -> list[int]:
    found = [os.getpid()]
    while len(found) <= _GENERATIONS and found[-1] > 1:
        lines = Path(f"/proc/{found[-1]}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        found += [int(line.split()[1]) for line in lines if line.startswith("PPid:")][:1] or [0]
    return found[1:]
