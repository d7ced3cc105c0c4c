"""Runs a contender as a process that answers requests, one JSON object per line.

    request               answer                   what happens
                          {"versions": {...}}      at start, once everything is imported
    {"build": true}       {"seconds": s}           the workload is built from its initial weights
    {"prepare": n}        {}                       round n's clients are converted to the contender's own form
    {"go": n}             {"seconds": s}           the round runs, until the new weights are NumPy arrays
    {"inspect": true}     {"finite": true, ...}    statistics of the last round's weights are returned
    {"check": "file"}     {}                       a round of the check workload runs; its weights are written as .npz

A contender is a module that calls `main(build, packages)`. `build(workload)` returns an object with the two methods of
`Rounds`. An exception ends the process: its traceback goes to stderr, where the orchestrator finds it.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from benchmarks.rounds.workloads import build_workload

# `cpu` or `gpu`: where contenders compute.
DEVICE_VARIABLE = "TFF_PDP_BENCHMARK_DEVICE"


def needs_gpu() -> bool:
    """Returns whether this process has to compute on a GPU: a contender that has none must not run on the CPU."""
    return os.environ.get(DEVICE_VARIABLE, "cpu") == "gpu"


class Rounds(Protocol):
    """Rounds of one workload, the interface that a contender implements; keeps its state between rounds."""

    def prepare(self, round_number: int) -> Any:
        """Brings the data of a round's clients into memory in the contender's own form: not timed."""
        ...

    def run(self, prepared: Any) -> Mapping[str, np.ndarray]:
        """Runs one round and returns the new weights, with the workload's names and layout: timed.

        W3 returns the weights of all silos, `kernel` `[silos, features]` and `bias` `[silos]`.
        """
        ...


def main(build: Callable[[Any], Rounds], packages: Iterable[str]) -> None:
    """Serves the workload named on the command line until stdin ends.

    Args:
        build: Builds the rounds of a workload, from its initial weights.
        packages: Names of the distributions whose versions are reported.
    """
    # All prints of libraries go to stderr; only answers go to the real stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = _Server(build, build_workload(**json.loads(sys.argv[1])))
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        ((request, argument),) = json.loads(line).items()
        print(json.dumps(getattr(server, f"answer_{request}")(argument)), file=answers)


class _Server:
    def __init__(self, build: Callable[[Any], Rounds], workload: Any):
        self._build = build
        self._workload = workload
        self._rounds: Any = None
        self._prepared: Any = None
        self._before: Mapping[str, np.ndarray] = {}
        self._weights: Mapping[str, np.ndarray] = {}

    def answer_build(self, _: Any) -> dict[str, Any]:
        started = time.perf_counter()
        self._rounds = self._build(self._workload)
        return {"seconds": time.perf_counter() - started}

    def answer_prepare(self, round_number: int) -> dict[str, Any]:
        self._prepared = self._rounds.prepare(round_number)
        return {}

    def answer_go(self, _: int) -> dict[str, Any]:
        self._before = self._weights
        started = time.perf_counter()
        self._weights = self._rounds.run(self._prepared)
        return {"seconds": time.perf_counter() - started}

    def answer_inspect(self, _: Any) -> dict[str, Any]:
        update = np.concatenate([np.ravel(self._weights[name] - self._before[name]) for name in self._before])
        return {"finite": bool(np.isfinite(update).all()), "update_std": float(update.std())}

    def answer_check(self, file: str) -> dict[str, Any]:
        rounds = self._build(self._workload.for_check())
        weights = rounds.run(rounds.prepare(0))
        np.savez(file, **{name: np.asarray(value) for name, value in weights.items()})
        return {}
