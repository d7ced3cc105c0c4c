"""Runs all unfinished jobs on all cores, and writes each outcome to disk as soon as there is one.

Outcomes are appended, one line each, so that a sweep that was stopped continues where it ended.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tff_pdp.files import atomic_file, naming, replace_text
from tff_pdp.lock import only_writer
from tff_pdp.privacy.facts import FIXED_SEED
from tff_pdp.reproduce.budget import Budget, from_entry, to_entry
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.workers import BuildRunner, run_jobs

PARTIAL_FILE = "partial.jsonl"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
      job: the job.
      row: result row of the job, from `result_row`; None if the job cannot be run.
      infeasible: reason why the job's budget allows no run; empty otherwise.
    """

    job: Job
    row: Mapping[str, Any] | None
    infeasible: str = ""


def result_row(
    job: Job,
    metric: str,
    value: float,
    *,
    with_secret_key: Mapping[str, Any],
    mean_over_clients: float,
    worst_decile: float,
    settings: Mapping[str, float | int | str],
    shared: float | None = None,
    pooled: Mapping[str, float] | None = None,
    traffic: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Builds a row of the results: plain data.

    Args:
      job: the job.
      metric: `mse`, `accuracy` or `average_precision`.
      value: mean over clients of the personal models' test metric, with the weights of `Setting.averages`.
      with_secret_key: `claim`, `claim_reason` and `epsilon` that the same training would have with a secret key;
        epsilon is the largest over clients, by this project's accountants, or None if that claim is `none`.
      mean_over_clients: unweighted mean over clients of the personal models' test metric.
      worst_decile: mean of the personal models' test metric over the worst tenth of the clients.
      settings: settings of the method and its noise, such as `learning_rate` and `prox_weight`.
      shared: mean over clients of the shared model's test metric, with the same weights; None for no entry `shared`.
      pooled: metrics of all clients' test examples together, by name: `pooled_average_precision`, and `prevalence`, the
        share of positive examples. With many examples, a random ranking's average precision is the prevalence; with
        few, it is somewhat higher.
      traffic: bytes that all clients of a real run would send and receive: `uplink_bytes`, `downlink_bytes`.

    Returns:
      `method`, `epsilon` or `budgets`, `seed`, `metric`, `value`, the claim of the run itself (`none`), the other
      arguments, and the entries of `pooled`, `traffic` and `settings`. Infinity is the text "inf".
    """
    return {
        "method": job.method,
        **to_entry(job.budget),
        "seed": job.seed,
        "metric": metric,
        "value": value,
        "claim": "none",
        "claim_reason": FIXED_SEED,
        "epsilon_spent": None,
        "with_secret_key": dict(with_secret_key),
        "mean_over_clients": mean_over_clients,
        "worst_decile": worst_decile,
        **({} if shared is None else {"shared": shared}),
        **(pooled or {}),
        **(traffic or {}),
        **settings,
    }


class ResultStore:
    """The outcomes of one reproduction's jobs, in memory and in `partial.jsonl`."""

    def __init__(self, reproduction: Reproduction):
        """Reads the outcomes of the reproduction's jobs from earlier sweeps with the same settings and data."""
        self._reproduction = reproduction
        self._path = reproduction.output / PARTIAL_FILE
        self._digests = {job: reproduction.digest(job) for job in reproduction.jobs()}
        self.outcomes: dict[Job, Outcome] = {}
        for line in _whole_lines(self._path):
            stored = json.loads(line)
            job = _job(stored["job"])
            if self._digests.get(job) == stored["digest"]:
                self.outcomes[job] = Outcome(job, stored["row"], stored["infeasible"])

    def add(self, outcome: Outcome) -> None:
        """Stores one more outcome, and rewrites the result files of its variant."""
        job = outcome.job
        stored = {
            "digest": self._digests[job],
            "job": _job_entry(job),
            "row": outcome.row,
            "infeasible": outcome.infeasible,
        }
        with naming(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(stored) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.outcomes[job] = outcome
        self.write(job.variant)

    def write(self, variant_name: str) -> None:
        """Writes a variant's result files: `results...json`, and `grid...json` if there is a grid."""
        variant = self._reproduction.variant(variant_name)
        for stem, is_grid in (("results", False), ("grid", True)):
            rows = self.rows(lambda job, is_grid=is_grid: job.variant == variant_name and is_a_grid_job(job) == is_grid)
            if rows or not is_grid:
                text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"
                replace_text(self._reproduction.output / variant.file_name(stem), text)

    def rows(self, is_wanted: Callable[[Job], bool]) -> list[Mapping[str, Any]]:
        """Returns the rows of some jobs, in the reproduction's order."""
        found = [self.outcomes[job] for job in self._digests if job in self.outcomes and is_wanted(job)]
        return [outcome.row for outcome in found if outcome.row is not None]


def keep_images(
    output: Path, job: Job, silos: Mapping[str, tuple[np.ndarray, np.ndarray]], value_range: tuple[float, float]
) -> None:
    """Writes the synthetic images of a job with seed 0, for a figure; does nothing for other seeds.

    All methods have the same synthetic images, so jobs of several methods write the same file.

    Args:
      output: folder of the reproduction's results.
      job: the job.
      silos: images, float32 `[images, height, width, channels]`, and labels, int64 `[images]`, by name of the silo.
      value_range: smallest and largest possible value of a pixel.
    """
    if job.seed != 0:
        return
    path = images_file(output, job.variant, job.budget)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        f"{key}_{place}": part
        for place, pair in enumerate(silos.values())
        for key, part in zip("xy", pair, strict=True)
    }
    with atomic_file(path, is_durable=False) as file:
        np.savez_compressed(file, names=np.array(list(silos)), value_range=np.array(value_range), **arrays)


def images_file(output: Path, variant: str, budget: Budget) -> Path:
    """Returns the path of the kept synthetic images of a variant and a budget.

    >>> images_file(Path("runs"), "default", 2.0).as_posix(), images_file(Path("runs"), "default", "mixed").as_posix()
    ('runs/figures/synthetic_default_2.npz', 'runs/figures/synthetic_default_mixed.npz')
    """
    return output / "figures" / f"synthetic_{variant}_{budget if isinstance(budget, str) else f'{budget:g}'}.npz"


def is_a_grid_job(job: Job) -> bool:
    """Checks if a job is a point of the grid over lambda."""
    return job.prox_weight is not None


def _whole_lines(path: Path) -> Iterable[str]:
    """Returns the lines of a file; removes a last line that was cut off from the file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        replace_text(path, "".join(whole))
    return whole


def _job_entry(job: Job) -> dict[str, Any]:
    content = dataclasses.asdict(job)
    return {**to_entry(content.pop("budget")), **content}


def _job(entry: Mapping[str, Any]) -> Job:
    others = {name: value for name, value in entry.items() if name not in ("epsilon", "budgets")}
    return Job(budget=from_entry(entry), **others)


LOG_FILE = "workers.log"
FAILURES_FILE = "failures.txt"


def sweep(
    reproduction: Reproduction, build_runner: BuildRunner, num_workers: int
) -> tuple[ResultStore, dict[Job, str]]:
    """Runs a reproduction's jobs, except those that earlier sweeps have finished with the same settings and data.

    If a sweep is stopped, only the work of unfinished jobs is lost.

    Args:
      reproduction: reproduction whose jobs are run.
      build_runner: function that is called in a worker process, and returns a function from a job to an `Outcome`.
      num_workers: number of processes.

    Returns:
      All outcomes, and the last line of each failed job's traceback; `failures.txt` has whole tracebacks. The next
      sweep runs failed jobs again.

    Raises:
      DataError: another sweep is under way in the same folder.
    """
    output = reproduction.output
    output.mkdir(parents=True, exist_ok=True)
    failures: dict[Job, str] = {}
    with only_writer(output):
        store = ResultStore(reproduction)
        for name in reproduction.variant_names:
            store.write(name)
        (output / FAILURES_FILE).write_text("")
        pending = [job for job in reproduction.jobs() if job not in store.outcomes]
        total = len(store.outcomes) + len(pending)
        bar = tqdm(total=total, initial=len(store.outcomes), desc="reproduce", unit="run")
        with bar, contextlib.closing(run_jobs(pending, build_runner, num_workers, output / LOG_FILE)) as finished_jobs:
            for job, outcome, error in finished_jobs:
                if error:
                    failures[job] = error.strip().splitlines()[-1]
                    with open(output / FAILURES_FILE, "a", encoding="utf-8") as file:
                        file.write(f"{job}\n{error}\n")
                    bar.write(f"failed: {job}: {failures[job]}", file=sys.stderr)
                else:
                    store.add(outcome)
                bar.set_postfix_str(str(job), refresh=False)
                bar.update()
    return store, failures
