"""Stages one after the other, each a Beam pipeline of its own; between them, pieces lie in files.

A task holds what is for its own partition in memory and nothing else, so memory is bounded by the largest partition
whatever the size of the input. What is done stays done: a job that was killed goes on with the tasks that are left.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import apache_beam as beam

from beam_pipelines.engine.stages import decode_pieces, read_pieces, write_pieces
from beam_pipelines.engine.tasks import TaskRun
from beam_pipelines.io.reports import is_done
from beam_pipelines.stages import Stage

PIECE_FOLDER = ".pieces"


def add_stage(pipeline: beam.Pipeline, stages: Sequence[Stage], place: int, folder: Path) -> bool:
    """Adds those tasks of one stage to a pipeline that are not done yet.

    Args:
      pipeline: still to be run.
      stages: of the job.
      place: of this one among them.
      folder: the staging folder, which every worker sees under this name.

    Returns:
      Whether there are any.
    """
    stage = stages[place]
    left = [number for number in range(len(stage.tasks)) if not is_done(folder, stage.name, number)]
    piece_folder(folder, stage).mkdir(parents=True, exist_ok=True)
    if left:
        _ = (
            pipeline
            | f"{stage.name}/tasks" >> beam.Create(left, reshuffle=False)
            | f"{stage.name}/spread" >> beam.Reshuffle()
            | stage.name >> beam.ParDo(_RunStagedTask(tuple(stages[: place + 1]), folder))
        )
    return bool(left)


def remove_used_pieces(stages: Sequence[Stage], place: int, folder: Path) -> None:
    """Removes the pieces of stages that no stage after this one takes anything of."""
    still_taken = {table for stage in stages[place + 1 :] for table in stage.takes}
    for stage in stages[: place + 1]:
        if not still_taken.intersection(stage.gives):
            shutil.rmtree(piece_folder(folder, stage), ignore_errors=True)


def piece_folder(folder: Path, stage: Stage) -> Path:
    """Where a stage's pieces lie."""
    return folder / PIECE_FOLDER / stage.name


class _RunStagedTask(beam.DoFn):
    """Number of a task -> the same; reads the task's pieces, runs it, and writes what it gives."""

    def __init__(self, stages: tuple[Stage, ...], folder: Path):
        self._stages = stages
        self._folder = folder

    def process(self, element: int) -> Iterator[int]:
        """Runs one task."""
        *_, stage = self._stages
        run = TaskRun(stage, element, decode_pieces(self._taken(stage, element)), self._folder)
        path = piece_folder(self._folder, stage) / f"{element:08d}"
        write_pieces(path, run.pieces(), len(self._stages) - 1, element, stage.gives)
        # Last: what is reported is not done again.
        run.report()
        yield element

    def _taken(self, stage: Stage, partition: int) -> Iterator[bytes]:
        for giver in self._stages[:-1]:
            tables = [place for place, table in enumerate(giver.gives) if table in stage.takes]
            if tables:
                for number in range(len(giver.tasks)):
                    path = piece_folder(self._folder, giver) / f"{number:08d}"
                    yield from read_pieces(path, tables, partition)
