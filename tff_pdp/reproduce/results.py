"""Finished jobs on disk: appended one line each, so that a sweep which is stopped goes on where it was."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tff_pdp.files import replace_text
from tff_pdp.reproduce.jobs import Job, Reproduction

PARTIAL_FILE = "partial.jsonl"
INFINITE = "inf"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
      job: which.
      row: its result row, see `result_row`; None where it cannot be run.
      infeasible: why its budget allows no run at all; empty otherwise.
    """

    job: Job
    row: Mapping[str, Any] | None
    infeasible: str = ""


def result_row(
    job: Job,
    metric: str,
    value: float,
    epsilon_spent: float,
    *,
    mean_over_clients: float,
    worst_decile: float,
    settings: Mapping[str, float | int | str],
    pooled: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A row of the results, every value a number or a word.

    Args:
      job: what was run.
      metric: `mse`, `accuracy` or `average_precision`.
      value: mean over clients of the personal models' test metric, weighted by numbers of test examples.
      epsilon_spent: the largest over clients, by this project's accountants; infinite without privacy.
      mean_over_clients: the same mean with every client counting the same.
      worst_decile: mean over the tenth of the clients that are served worst.
      settings: of the method and its noise, such as `learning_rate` and `prox_weight`.
      pooled: figures of all clients' test examples together, by name: `pooled_average_precision`, and `prevalence`, the
        share of positive ones: of many examples, a random ranking's average precision; of few, that is somewhat more.

    Returns:
      `method`, `epsilon`, `seed`, `metric`, `value`, then the others, pooled figures and the settings. Infinity is the
      word "inf".
    """
    return {
        "method": job.method,
        "epsilon": _finite_or_word(job.epsilon),
        "seed": job.seed,
        "metric": metric,
        "value": value,
        "epsilon_spent": _finite_or_word(epsilon_spent),
        "mean_over_clients": mean_over_clients,
        "worst_decile": worst_decile,
        **(pooled or {}),
        **settings,
    }


class ResultStore:
    """The outcomes of one reproduction's jobs, in memory and in `partial.jsonl`."""

    def __init__(self, reproduction: Reproduction):
        """Reads what earlier sweeps have finished of the reproduction's jobs, under the same settings and data."""
        self._reproduction = reproduction
        self._path = reproduction.output / PARTIAL_FILE
        self._digests = {job: reproduction.digest(job) for job in reproduction.jobs()}
        self.outcomes: dict[Job, Outcome] = {}
        for line in _whole_lines(self._path):
            stored = json.loads(line)
            job = Job(**{**stored["job"], "epsilon": float(stored["job"]["epsilon"])})
            if self._digests.get(job) == stored["digest"]:
                self.outcomes[job] = Outcome(job, stored["row"], stored["infeasible"])

    @property
    def pending(self) -> list[Job]:
        """Jobs without an outcome, in the reproduction's order."""
        return [job for job in self._digests if job not in self.outcomes]

    def add(self, outcome: Outcome) -> None:
        """Keeps one more outcome and writes the results of its variant again."""
        job = outcome.job
        stored = {
            "digest": self._digests[job],
            "job": {**dataclasses.asdict(job), "epsilon": _finite_or_word(job.epsilon)},
            "row": outcome.row,
            "infeasible": outcome.infeasible,
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(stored) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.outcomes[job] = outcome
        self.write(job.variant)

    def write(self, variant_name: str) -> None:
        """Writes a variant's result files: `results...json`, and `grid...json` where there is a grid."""
        variant = self._reproduction.variant(variant_name)
        for stem, is_grid in (("results", False), ("grid", True)):
            rows = self.rows(lambda job, is_grid=is_grid: job.variant == variant_name and is_a_grid_job(job) == is_grid)
            if rows or not is_grid:
                replace_text(self._reproduction.output / variant.file_name(stem), _one_row_a_line(rows))

    def rows(self, is_wanted: Callable[[Job], bool]) -> list[Mapping[str, Any]]:
        """The rows of some jobs, in the reproduction's order."""
        found = [self.outcomes[job] for job in self._digests if job in self.outcomes and is_wanted(job)]
        return [outcome.row for outcome in found if outcome.row is not None]


def is_a_grid_job(job: Job) -> bool:
    """Whether a job is a point of the grid over lambda."""
    return job.prox_weight is not None


def _whole_lines(path: Path) -> Iterable[str]:
    """The lines of a file; a last one that was cut off is removed from it."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        replace_text(path, "".join(whole))
    return whole


def _one_row_a_line(rows: list[Mapping[str, Any]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"


def _finite_or_word(value: float) -> float | str:
    return value if math.isfinite(value) else INFINITE
