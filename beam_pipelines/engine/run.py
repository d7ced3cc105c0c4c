"""Runs stages on a Beam runner and watches them."""

import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from tqdm import tqdm

from beam_pipelines.engine.pipelines import add_stage, add_stages, remove_used_pieces
from beam_pipelines.engine.stages import Stage
from beam_pipelines.engine.tasks import count_done, read_reports
from tff_pdp.errors import DataError, sentence_for_user


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where stages are run.

    Attributes:
      runner: the Beam runner. Not DirectRunner, which may download Prism, another runner, and use that.
      pipeline_args: further Beam flags, e.g. `("--direct_num_workers=2", ...)`.
      is_staged: whether stages are pipelines of their own with files between them; otherwise all are one pipeline, and
        the runner carries pieces between them.
    """

    runner: str = "FnApiRunner"
    pipeline_args: tuple[str, ...] = ()
    is_staged: bool = True


def run_stages(stages: Sequence[Stage], engine: Engine, folder: Path) -> Counter[str]:
    """Runs stages and returns the sums of their tasks' counts.

    Args:
      stages: each takes tables of, and comes after, earlier ones.
      engine: where they are run.
      folder: the staging folder, which every worker sees under this name. Staged tasks that have ended there are not
        run again.

    Raises:
      DataError: a task found input that the job cannot use.
    """
    names = [f"--runner={engine.runner}", *engine.pipeline_args]
    if engine.is_staged:
        for place, stage in enumerate(stages):
            pipeline = beam.Pipeline(options=PipelineOptions(names))
            if add_stage(pipeline, stages, place, folder):
                _run(pipeline, [stage], folder)
            _check_errors([stage], folder)
            remove_used_pieces(stages, place, folder)
    else:
        pipeline = beam.Pipeline(options=PipelineOptions(names))
        add_stages(pipeline, stages, folder)
        _run(pipeline, stages, folder)
        _check_errors(stages, folder)
    total: Counter[str] = Counter()
    for stage in stages:
        for report in read_reports(folder, stage.name):
            total.update(report.counts)
    return total


def _run(pipeline: beam.Pipeline, stages: Sequence[Stage], folder: Path) -> None:
    try:
        with _progress_bar(stages, folder), _quiet_about_disks():
            pipeline.run().wait_until_finish()
    except Exception as error:
        # In one pipeline, later stages trip over the missing work of a stage that an error of the input has ended.
        _check_errors(stages, folder)
        refused = _refused_by_disk(str(error), folder)
        if refused is None:
            raise
        raise refused from error
    for stage in stages:
        left = len(stage.tasks) - count_done(folder, stage.name)
        if left:
            raise RuntimeError(f"the runner says it is done, but {left} tasks of stage {stage.name} have not been run")


@contextlib.contextmanager
def _quiet_about_disks() -> Iterator[None]:
    """Keeps the tracebacks of a full disk, of which one line says all, out of the log of Beam's worker."""
    logger = logging.getLogger("apache_beam.runners.common")

    def says_more(record: logging.LogRecord) -> bool:
        return _refused_by_disk(record.getMessage(), Path()) is None

    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _refused_by_disk(text: str, folder: Path) -> OSError | None:
    """Reads the error of a worker that found no room out of a runner's text; None for all others."""
    found = re.findall(r"\[Errno (\d+)\] [^\n:\[]*(?:: '([^'\n]+)')?", text)
    if not found:
        return None
    number, path = int(found[-1][0]), found[-1][1]
    refused = OSError(number, os.strerror(number), path or str(folder))
    return refused if sentence_for_user(refused) else None


def _check_errors(stages: Sequence[Stage], folder: Path) -> None:
    errors = [report.error for stage in stages for report in read_reports(folder, stage.name) if report.error]
    if errors:
        more = f" (and {len(errors) - 1} more errors of this kind)" if len(errors) > 1 else ""
        raise DataError(errors[0] + more)


@contextlib.contextmanager
def _progress_bar(stages: Sequence[Stage], folder: Path) -> Iterator[None]:
    """Shows how many tasks have ended, by the reports in the staging folder: a runner blocks until the job is over."""
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
