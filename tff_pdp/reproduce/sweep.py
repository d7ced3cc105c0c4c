"""The sweep: every job that is not finished, on all cores, each outcome on disk as soon as there is one."""

import contextlib
import dataclasses
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tff_pdp.errors import ConfigError
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.results import ResultStore
from tff_pdp.reproduce.workers import BuildRunner, run_jobs

LOG_FILE = "workers.log"
FAILURES_FILE = "failures.txt"
_LOCK_FILE = ".lock"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A job that failed; it is run again by the next sweep.

    Attributes:
      job: which.
      reason: the last line of its traceback.
    """

    job: Job
    reason: str


def sweep(
    reproduction: Reproduction, build_runner: BuildRunner, num_workers: int, *, progress: bool = True
) -> tuple[ResultStore, list[Failure]]:
    """Runs a reproduction's jobs but for those that earlier sweeps have finished under the same settings.

    Stopping it at any moment loses the jobs under way, and no others.

    Args:
      reproduction: what to run.
      build_runner: builds, in a worker process, what turns a job into an `Outcome`.
      num_workers: how many processes.
      progress: show a progress bar.

    Returns:
      All outcomes, and the jobs that failed; their tracebacks are in `failures.txt`.

    Raises:
      ConfigError: another sweep is under way in the same folder.
    """
    output = reproduction.output
    output.mkdir(parents=True, exist_ok=True)
    failures: list[Failure] = []
    with _only_sweep_in(output):
        store = ResultStore(reproduction)
        for name in reproduction.variant_names:
            store.write(name)
        (output / FAILURES_FILE).write_text("")
        pending = store.pending
        total = len(store.outcomes) + len(pending)
        bar = tqdm(total=total, initial=len(store.outcomes), desc="reproduce", unit="run", disable=not progress)
        with bar, contextlib.closing(run_jobs(pending, build_runner, num_workers, output / LOG_FILE)) as finished_jobs:
            for job, outcome, error in finished_jobs:
                if error:
                    failures.append(Failure(job, error.strip().splitlines()[-1]))
                    with open(output / FAILURES_FILE, "a", encoding="utf-8") as file:
                        file.write(f"{job}\n{error}\n")
                    bar.write(f"failed: {job}: {failures[-1].reason}", file=sys.stderr)
                else:
                    store.add(outcome)
                bar.set_postfix_str(str(job), refresh=False)
                bar.update()
    return store, failures


@contextlib.contextmanager
def _only_sweep_in(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with the process however it ends."""
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another `tff-pdp reproduce` is writing here: name another --output") from None
        yield
    finally:
        os.close(descriptor)
