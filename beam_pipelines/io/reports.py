"""What tasks say of themselves: a small file each, in the staging folder, that tells also how far a job has come."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from beam_pipelines.io.atomic import write_atomically

REPORT_FOLDER = ".reports"


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """How a task ended.

    Attributes:
      counts: what it read, kept and dropped.
      error: why the job cannot go on; empty where it can.
    """

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""

    def write(self, folder: Path, stage: str, task: int) -> None:
        """Writes the report into a job's staging folder."""
        path = _path(folder, stage, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A worker's copy of the same task says the same.
        write_atomically(path, [json.dumps({"counts": dict(self.counts), "error": self.error}).encode()])


def is_done(folder: Path, stage: str, task: int) -> bool:
    """Whether a task has ended."""
    return _path(folder, stage, task).exists()


def count_done(folder: Path, stage: str) -> int:
    """How many of a stage's tasks have ended."""
    return sum(1 for _ in (folder / REPORT_FOLDER / stage).glob("*.json"))


def stage_errors(folder: Path, stage: str) -> list[str]:
    """The errors of a stage's tasks, in their order."""
    return [report.error for report in _reports(folder, stage) if report.error]


def stage_counts(folder: Path, stage: str) -> Counter[str]:
    """The sums of what a stage's tasks counted."""
    total: Counter[str] = Counter()
    for report in _reports(folder, stage):
        total.update(report.counts)
    return total


def _reports(folder: Path, stage: str) -> list[TaskReport]:
    paths = sorted((folder / REPORT_FOLDER / stage).glob("*.json"))
    return [TaskReport(**json.loads(path.read_bytes())) for path in paths]


def _path(folder: Path, stage: str, task: int) -> Path:
    return folder / REPORT_FOLDER / stage / f"{task:08d}.json"
