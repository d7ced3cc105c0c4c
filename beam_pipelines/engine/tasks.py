"""Runs one task, in a worker."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow

from beam_pipelines.io.reports import TaskReport
from beam_pipelines.stages import Piece, Stage, TaskContext
from tff_pdp.errors import UserError


class TaskRun:
    """One task: take all of its pieces, put them where they belong, and then report.

    An error that the user can mend ends the pieces and is left in the report, where the job finds it and fails; raised
    here, it would reach the user buried under the runner's stack traces.
    """

    def __init__(self, stage: Stage, number: int, tables: Mapping[str, list[pyarrow.RecordBatch]], folder: Path):
        """Prepares task `number` of a stage; `tables` are what it takes, `folder` is the job's staging folder."""
        self._stage = stage
        self._context = TaskContext(number, folder, tables)
        self._error = ""

    def pieces(self) -> Iterator[Piece]:
        """Runs the task. Pieces without rows are left out."""
        stage, number = self._stage, self._context.number
        try:
            for piece in stage.work(stage.tasks[number], self._context):
                if piece.table not in stage.gives:
                    raise ValueError(f"stage {stage.name} gave a piece of {piece.table!r}, but declares {stage.gives}")
                if len(piece.batch):
                    yield piece
        except UserError as error:
            self._error = str(error)

    def report(self) -> None:
        """Says that the task has ended, and how."""
        report = TaskReport(self._context.counts, self._error)
        report.write(self._context.folder, self._stage.name, self._context.number)
