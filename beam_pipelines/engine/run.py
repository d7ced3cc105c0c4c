"""Runs stages on a Beam runner, each stage in a pipeline of its own or all stages in one, and shows progress.

Stages send pieces of tables to later stages; each piece is for one partition. If all stages are one pipeline, Beam
groups the pieces by partition. If each stage is a pipeline of its own, the pieces are in files between the pipelines. A
task then has only the pieces of its own partition in memory, so the largest partition bounds the memory, whatever the
size of the input. A killed job then resumes with the unfinished tasks.
"""

import contextlib
import logging
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsIter, PCollection, TaggedOutput
from tqdm.auto import tqdm

from beam_pipelines.engine.stages import Stage, decode_pieces, encode_piece, read_pieces, write_pieces
from beam_pipelines.engine.tasks import TaskRun, count_done, end_with, is_done, read_reports
from tff_pdp.errors import DataError, sentence_for_user


def run_stages(stages: Sequence[Stage], folder: Path, *, is_staged: bool, flags: list[str]) -> Counter[str]:
    """Runs stages; returns the counts of records, summed over all tasks.

    Args:
      stages: stages in order; the `takes` and `after` of a stage refer to earlier stages only.
      folder: staging folder; every worker must see the folder under this name. With `is_staged`, tasks that have a
        report there are not run again.
      is_staged: whether each stage is a pipeline of its own, with files between pipelines; otherwise all stages are one
        pipeline, and the runner carries the pieces.
      flags: Beam's flags, including `--runner=...`.

    Raises:
      DataError: a task found input that the job cannot use.
    """
    if is_staged:
        for place, stage in enumerate(stages):
            pipeline = beam.Pipeline(options=PipelineOptions(flags))
            if _add_stage(pipeline, stages, place, folder):
                _run(pipeline, [stage], folder)
            _check_errors([stage], folder)
            _remove_used_pieces(stages, place, folder)
    else:
        pipeline = beam.Pipeline(options=PipelineOptions(flags))
        _add_stages(pipeline, stages, folder)
        _run(pipeline, stages, folder)
        _check_errors(stages, folder)
    total: Counter[str] = Counter()
    for stage in stages:
        for report in read_reports(folder, stage.name):
            total.update(report.counts)
    return total


def _run(pipeline: beam.Pipeline, stages: Sequence[Stage], folder: Path) -> None:
    try:
        with _progress_bar(stages, folder):
            pipeline.run().wait_until_finish()
    except Exception as error:
        # In one pipeline, later stages fail because an error of the input has ended an earlier stage.
        _check_errors(stages, folder)
        refused = _refused_by_disk(str(error), folder)
        if refused is None:
            raise
        raise refused from error
    for stage in stages:
        left = len(stage.tasks) - count_done(folder, stage.name)
        if left:
            raise RuntimeError(f"the Beam runner has ended, but {left} tasks of stage {stage.name} have not been run")


def _refused_by_disk(text: str, folder: Path) -> OSError | None:
    """Finds a worker's error of a full disk in a runner's text; returns None for all other errors."""
    found = re.findall(r"\[Errno (\d+)\] [^\n:\[]*(?:: '([^'\n]+)')?", text)
    if not found:
        return None
    number, path = int(found[-1][0]), found[-1][1]
    refused = OSError(number, os.strerror(number), path or str(folder))
    return refused if sentence_for_user(refused) else None


# A full disk needs one line, so its tracebacks are kept out of the log of Beam's worker.
logging.getLogger("apache_beam.runners.common").addFilter(
    lambda record: _refused_by_disk(record.getMessage(), Path()) is None
)


def _check_errors(stages: Sequence[Stage], folder: Path) -> None:
    errors = [report.error for stage in stages for report in read_reports(folder, stage.name) if report.error]
    if errors:
        more = f" (and {len(errors) - 1} more errors in other tasks)" if len(errors) > 1 else ""
        raise DataError(errors[0] + more)


@contextlib.contextmanager
def _progress_bar(stages: Sequence[Stage], folder: Path) -> Iterator[None]:
    """Shows how many tasks have ended, from the reports in the staging folder: a runner blocks until the job ends."""
    finished = threading.Event()
    total = sum(len(stage.tasks) for stage in stages)
    with tqdm(total=total, desc=" and ".join(stage.name.replace("_", " ") for stage in stages), unit="task") as bar:

        def refresh() -> None:
            bar.n = sum(count_done(folder, stage.name) for stage in stages)
            bar.refresh()

        def watch() -> None:
            while not finished.wait(0.5):
                refresh()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()
            refresh()


_DONE = "done"


def _add_stages(pipeline: beam.Pipeline, stages: Sequence[Stage], folder: Path) -> None:
    """Adds stages to a pipeline, in their order."""
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
                # Without the reshuffle, a runner may fuse all tasks into one worker.
                | f"{stage.name}/spread" >> beam.Reshuffle()
                | f"{stage.name}/no_pieces" >> beam.Map(lambda number: (number, [b""]))
            )
        waits = [AsIter(done[name]) for name in stage.after]
        outputs = tasks | stage.name >> beam.ParDo(run, *waits).with_outputs(*stage.gives, main=_DONE)
        done[stage.name] = outputs[_DONE]
        for table in stage.gives:
            keyed = beam.Map(lambda keyed: keyed).with_output_types(tuple[int, bytes])
            given.setdefault(table, []).append(outputs[table] | f"{stage.name}/{table}" >> keyed)


class _OfJob(beam.DoFn):
    """Step whose worker ends with the job."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._job = os.getpid()

    def setup(self) -> None:
        """Makes the worker end when its job ends."""
        end_with(self._job)


class _RunTask(_OfJob):
    """`(task, encoded pieces)` -> the task's number, and `(partition, encoded piece)` under the table's tag."""

    def __init__(self, place: int, stage: Stage, folder: Path):
        super().__init__(folder)
        self._place = place
        self._stage = stage

    def process(self, element: tuple[int, Iterable[bytes]], *after: Any) -> Iterator[Any]:
        """Runs one task, once the stages in `after` are done."""
        number, encoded = element
        run = TaskRun(self._stage, number, decode_pieces(encoded), self._folder)
        for order, piece in enumerate(run.pieces()):
            content = encode_piece(piece, self._place, number, order).to_pybytes()
            yield TaggedOutput(piece.table, (piece.partition, content))
        run.report()
        yield number


PIECE_FOLDER = ".pieces"


def _add_stage(pipeline: beam.Pipeline, stages: Sequence[Stage], place: int, folder: Path) -> bool:
    """Adds the unfinished tasks of stage `stages[place]` to a pipeline; returns whether there are any."""
    stage = stages[place]
    left = [number for number in range(len(stage.tasks)) if not is_done(folder, stage.name, number)]
    _piece_folder(folder, stage).mkdir(parents=True, exist_ok=True)
    if left:
        _ = (
            pipeline
            | f"{stage.name}/tasks" >> beam.Create(left, reshuffle=False)
            | f"{stage.name}/spread" >> beam.Reshuffle()
            | stage.name >> beam.ParDo(_RunStagedTask(tuple(stages[: place + 1]), folder))
        )
    return bool(left)


def _remove_used_pieces(stages: Sequence[Stage], place: int, folder: Path) -> None:
    """Removes the pieces that no stage after `stages[place]` takes."""
    still_taken = {table for stage in stages[place + 1 :] for table in stage.takes}
    for stage in stages[: place + 1]:
        if not still_taken.intersection(stage.gives):
            shutil.rmtree(_piece_folder(folder, stage), ignore_errors=True)


def _piece_folder(folder: Path, stage: Stage) -> Path:
    """Returns the folder of a stage's pieces."""
    return folder / PIECE_FOLDER / stage.name


class _RunStagedTask(_OfJob):
    """Number of a task -> the same number; reads the task's pieces, runs the task, and writes its new pieces."""

    def __init__(self, stages: tuple[Stage, ...], folder: Path):
        super().__init__(folder)
        self._stages = stages

    def process(self, element: int) -> Iterator[int]:
        """Runs one task."""
        *_, stage = self._stages
        run = TaskRun(stage, element, decode_pieces(self._taken(stage, element)), self._folder)
        path = _piece_folder(self._folder, stage) / f"{element:08d}"
        write_pieces(path, run.pieces(), len(self._stages) - 1, element, stage.gives)
        # Reported last: a reported task is not run again.
        run.report()
        yield element

    def _taken(self, stage: Stage, partition: int) -> Iterator[bytes]:
        for giver in self._stages[:-1]:
            tables = [place for place, table in enumerate(giver.gives) if table in stage.takes]
            if tables:
                for number in range(len(giver.tasks)):
                    path = _piece_folder(self._folder, giver) / f"{number:08d}"
                    yield from read_pieces(path, tables, partition)
