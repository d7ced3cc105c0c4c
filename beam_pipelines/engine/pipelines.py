"""Adds stages to Beam pipelines: all to one, or each to a pipeline of its own.

In one pipeline, Beam's engine groups pieces by partition between the stages. Between pipelines, pieces lie in files. A
task then holds the pieces of its own partition in memory and nothing else, so memory is bounded by the largest
partition whatever the size of the input; and a job that was killed goes on with the tasks that are left.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter, PCollection, TaggedOutput

from beam_pipelines.engine.stages import Origin, Stage, decode_pieces, encode_piece, read_pieces, write_pieces
from beam_pipelines.engine.tasks import TaskRun, end_with, is_done

_DONE = "done"


def add_stages(pipeline: beam.Pipeline, stages: Sequence[Stage], folder: Path) -> None:
    """Adds stages to a pipeline, in an order in which each takes tables of, and comes after, earlier ones."""
    given: dict[str, list[PCollection]] = {}
    done: dict[str, PCollection] = {}
    for place, stage in enumerate(stages):
        run = _RunTask(place, stage, folder)
        if stage.takes:
            # A partition without pieces has a task, too.
            every = pipeline | f"{stage.name}/every_partition" >> beam.Create(
                [(number, b"") for number in stage.tasks], reshuffle=False
            ).with_output_types(tuple[int, bytes])
            pieces = [table for name in stage.takes for table in given[name]]
            tasks = (
                (every, *pieces)
                | f"{stage.name}/all_pieces" >> beam.Flatten()
                | f"{stage.name}/by_partition" >> beam.GroupByKey()
            )
        else:
            tasks = (
                pipeline
                | f"{stage.name}/tasks" >> beam.Create(list(range(len(stage.tasks))), reshuffle=False)
                # Without it, a runner may fuse all tasks into one worker.
                | f"{stage.name}/spread" >> beam.Reshuffle()
                | f"{stage.name}/no_pieces" >> beam.Map(lambda number: (number, [b""]))
            )
        waits = [AsIter(done[name]) for name in stage.after]
        outputs = tasks | stage.name >> beam.ParDo(run, *waits).with_outputs(*stage.gives, main=_DONE)
        done[stage.name] = outputs[_DONE]
        for table in stage.gives:
            typed = outputs[table] | f"{stage.name}/{table}" >> beam.Map(_same).with_output_types(tuple[int, bytes])
            given.setdefault(table, []).append(typed)


class _OfJob(beam.DoFn):
    """Ends its worker with the job."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._job = os.getpid()

    def setup(self) -> None:
        """Binds a worker to its job."""
        end_with(self._job)


class _RunTask(_OfJob):
    """`(task, encoded pieces)` -> the task's number, and `(partition, encoded piece)` under the table's tag."""

    def __init__(self, place: int, stage: Stage, folder: Path):
        super().__init__(folder)
        self._place = place
        self._stage = stage

    def process(self, element: tuple[int, Iterable[bytes]], *after: Any) -> Iterator[Any]:
        """Runs one task, once the stages in `after` are done."""
        del after
        number, encoded = element
        run = TaskRun(self._stage, number, decode_pieces(encoded), self._folder)
        for order, piece in enumerate(run.pieces()):
            content = encode_piece(piece, Origin(self._place, number, order)).to_pybytes()
            yield TaggedOutput(piece.table, (piece.partition, content))
        run.report()
        yield number


def _same(keyed: tuple[int, bytes]) -> tuple[int, bytes]:
    return keyed


PIECE_FOLDER = ".pieces"


def add_stage(pipeline: beam.Pipeline, stages: Sequence[Stage], place: int, folder: Path) -> bool:
    """Adds the unfinished tasks of the stage at a place to a pipeline; returns whether there are any."""
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
    """Removes the pieces that no stage after the one at a place takes."""
    still_taken = {table for stage in stages[place + 1 :] for table in stage.takes}
    for stage in stages[: place + 1]:
        if not still_taken.intersection(stage.gives):
            shutil.rmtree(piece_folder(folder, stage), ignore_errors=True)


def piece_folder(folder: Path, stage: Stage) -> Path:
    """Returns the folder of a stage's pieces."""
    return folder / PIECE_FOLDER / stage.name


class _RunStagedTask(_OfJob):
    """Number of a task -> the same; reads the task's pieces, runs it, and writes the pieces it gives."""

    def __init__(self, stages: tuple[Stage, ...], folder: Path):
        super().__init__(folder)
        self._stages = stages

    def process(self, element: int) -> Iterator[int]:
        """Runs one task."""
        *_, stage = self._stages
        run = TaskRun(stage, element, decode_pieces(self._taken(stage, element)), self._folder)
        path = piece_folder(self._folder, stage) / f"{element:08d}"
        write_pieces(path, run.pieces(), len(self._stages) - 1, element, stage.gives)
        # Last: a reported task is not done again.
        run.report()
        yield element

    def _taken(self, stage: Stage, partition: int) -> Iterator[bytes]:
        for giver in self._stages[:-1]:
            tables = [place for place, table in enumerate(giver.gives) if table in stage.takes]
            if tables:
                for number in range(len(giver.tasks)):
                    path = piece_folder(self._folder, giver) / f"{number:08d}"
                    yield from read_pieces(path, tables, partition)
