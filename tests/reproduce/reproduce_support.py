"""A reproduction without data or training: what tests of sweep, tables and figures run in its place."""

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io

from tff_pdp.errors import BudgetError
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.sweep import Outcome, result_row

# Made-up means: lower is better.
_MEANS = {"local_only": 0.03, "fed_avg": 0.028, "mr_mtl": 0.026, "ditto": 0.029}


# Examples of the made-up schools.
SIZES = (40, 25, 30)


def write_school(path: Path) -> Path:
    """Writes three made-up schools in the form of the published data."""
    rng = np.random.default_rng(0)
    cells = {"X": np.empty((1, len(SIZES)), object), "Y": np.empty((1, len(SIZES)), object)}
    for silo, size in enumerate(SIZES):
        x = rng.integers(0, 2, (size, 28))
        cells["X"][0, silo] = x.astype(np.uint8)
        cells["Y"][0, silo] = (20 + 20 * x[:, :1] + 10 * x[:, 1:2] * silo).astype(np.uint8)
    scipy.io.savemat(path, cells)
    return path


def build_reproduction(output: Path, **changes) -> Reproduction:
    """Six jobs of School: three methods, two seeds."""
    given: dict[str, Any] = {
        "setting_name": "school",
        "scale_name": "full",
        "variant_names": ("default",),
        "methods": ("local_only", "fed_avg", "mr_mtl"),
        "epsilons": (6.0,),
        "seeds": 2,
        "lambdas": (),
        "data_input": Path("school.mat"),
        "data_digest": "the data",
        "output": output,
        **changes,
    }
    return Reproduction(**given)


@dataclasses.dataclass(frozen=True)
class BuildFakeRunner:
    """Builds, in a worker process, a runner that makes up values.

    Attributes:
      folder: where every run job leaves a file of its name.
      fails: methods whose jobs raise.
      kills: methods whose jobs end the process.
      infeasible: methods whose budget allows no run.
      slow: methods whose jobs take long.
      seconds: how long.
    """

    folder: Path
    fails: tuple[str, ...] = ()
    kills: tuple[str, ...] = ()
    infeasible: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    seconds: float = 600.0

    def __call__(self, *_):
        return self.run

    def run(self, job: Job) -> Outcome:
        (self.folder / f"{job.method}-{job.seed}-{job.prox_weight}-{os.getpid()}-{time.monotonic_ns()}").touch()
        if job.method in self.fails:
            raise ValueError(f"no luck with {job.method}")
        if job.method in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.method in self.slow:
            time.sleep(self.seconds)
        if job.method in self.infeasible:
            return Outcome(job, row=None, infeasible=str(BudgetError("selection alone costs more")))
        return Outcome(job, fake_row(job))

    def runs(self) -> list[str]:
        """Methods and seeds that were run, as often as they were."""
        return sorted("-".join(path.name.split("-")[:2]) for path in self.folder.iterdir())

    def processes(self) -> dict[str, set[str]]:
        """By method, the processes that have run it."""
        found: dict[str, set[str]] = {}
        for path in self.folder.iterdir():
            method, _, _, process, _ = path.name.split("-")
            found.setdefault(method, set()).add(process)
        return found


def fake_row(job: Job, **changes) -> dict:
    """A row whose value follows the method, the seed and lambda."""
    shift = 0.0 if job.prox_weight is None else 0.001 * abs(job.prox_weight - 1)
    # Named budgets stand for epsilon 10.
    epsilon = 10.0 if isinstance(job.budget, str) else job.budget
    value = _MEANS.get(job.method, 0.027) + 0.0001 * job.seed + 0.001 / epsilon + shift
    settings = (
        {"prox_weight": 1.0 if job.prox_weight is None else job.prox_weight}
        if job.method in ("mr_mtl", "ditto")
        else {}
    )
    row = result_row(
        job,
        "mse",
        value,
        with_secret_key={"claim": "formal-conditional", "claim_reason": "made up", "epsilon": epsilon},
        mean_over_clients=value + 0.001,
        worst_decile=2 * value,
        settings={"learning_rate": 0.01, **settings},
    )
    return {**row, **changes}
