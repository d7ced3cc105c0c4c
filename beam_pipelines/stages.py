"""What a job is made of: stages of tasks, and the pieces of tables that go from one stage to a later one.

`beam_pipelines.engine` runs stages, in one Beam pipeline or one after the other. Their work is the same in both.
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a table for the task of one partition."""

    table: str
    partition: int
    batch: pyarrow.RecordBatch


@dataclasses.dataclass
class TaskContext:
    """What a task has besides what it is about.

    Attributes:
      number: of the task in its stage.
      folder: the job's staging folder, in which a task writes files in one move, under names of its own.
      tables: by name, the batches that earlier stages gave to this task's partition, sorted by stage, task and order of
        making: the same whatever the engine did in between.
      counts: what the task read, kept and dropped, for `beam_pipelines.accounting`.
    """

    number: int
    folder: Path
    tables: Mapping[str, list[pyarrow.RecordBatch]]
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def count(self, what: str | enum.StrEnum, number: int = 1) -> None:
        """Adds to a count."""
        if number:
            self.counts[str(what)] += int(number)


Work = Callable[[Any, TaskContext], Iterable[Piece]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Tasks that do not depend on each other.

    Attributes:
      name: unlike the other stages'; also a folder's name.
      tasks: what each task is about; small picklable values. Of a stage that takes tables: the numbers 0, 1, ... of the
        partitions.
      work: `(task, context) -> pieces`, picklable. May be run twice for the same task, even at once. Raises DataError
        for input that the job cannot do with; the message reaches the user.
      gives: names of the tables of its pieces.
      takes: names of tables of earlier stages.
      after: names of stages that must be finished before, because of the files they write.
    """

    name: str
    tasks: tuple[Any, ...]
    work: Work
    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def partition_stage(name: str, num_partitions: int, work: Work, takes: tuple[str, ...], **others: Any) -> Stage:
    """A stage with a task for each partition of the tables it takes; the other arguments are those of `Stage`."""
    return Stage(name, tuple(range(num_partitions)), work, takes=takes, **others)
