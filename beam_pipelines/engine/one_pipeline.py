"""All stages as one Beam pipeline: between them, the engine groups pieces by partition."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter, PCollection, TaggedOutput

from beam_pipelines.engine.stages import Origin, decode_pieces, encode_piece
from beam_pipelines.engine.tasks import TaskRun
from beam_pipelines.stages import Stage

_DONE = "done"


def add_stages(pipeline: beam.Pipeline, stages: Sequence[Stage], folder: Path) -> None:
    """Adds stages, in their order, to a pipeline.

    Args:
      pipeline: still to be run.
      stages: each takes tables of, and comes after, earlier ones.
      folder: the staging folder, which every worker sees under this name.
    """
    given: dict[str, list[PCollection]] = {}
    done: dict[str, PCollection] = {}
    for place, stage in enumerate(stages):
        run = _RunTask(place, stage, folder)
        if stage.takes:
            # A partition that nothing was given to has a task, too.
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


class _RunTask(beam.DoFn):
    """`(task, encoded pieces)` -> the task's number, and `(partition, encoded piece)` under the table's tag."""

    def __init__(self, place: int, stage: Stage, folder: Path):
        self._place = place
        self._stage = stage
        self._folder = folder

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
