"""Measures seconds per round with workers on Ray: `python -m benchmarks.workers.run`.

Two figures are ratios on W1: two workers with one core each, beside one worker with one core, and beside a process that
uses both cores. The third is the difference between W2 with one worker and W2 in one process on one core, in
milliseconds. The fourth is the growth of this process's largest memory from rounds of 20 clients to rounds of 400
clients, in MB, with one worker. A round's time includes stacking the clients' examples, which all forms have in memory,
client by client. Rounds alternate between the forms, so that all forms see the same machine.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from benchmarks.machine import describe_machine
from benchmarks.rounds.contenders.ours import FedAvgRounds
from benchmarks.rounds.workloads import build_workload
from benchmarks.workers.rounds import DrawnWorkload, FarFedAvgRounds
from tff_pdp.engines.ray_workers.pool import SYSTEM_CONFIG
from tff_pdp.engines.running import build_engine

RESULTS = Path(__file__).parents[1] / "results" / "workers.json"
_WARM_UP = 3


def main() -> None:
    """Measures all forms, prints the table, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=15, help="recorded rounds of each form")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("the measurement needs two cores")
    # First, because the largest memory of a process only grows.
    growth = _growth("W2", (20, 400))
    rows = {
        "W1": _measure("W1", "loop", cores[:2], options.passes),
        "W2": _measure("W2", "vectorized", cores[:2], options.passes),
    }
    figures = {
        "two workers / one worker, W1": rows["W1"]["two workers"]["median"] / rows["W1"]["one worker"]["median"],
        "two workers / one process on both cores, W1": rows["W1"]["two workers"]["median"]
        / rows["W1"]["one process, two cores"]["median"],
        "one worker - one process on one core, W2, ms": 1000
        * (rows["W2"]["one worker"]["median"] - rows["W2"]["one process, one core"]["median"]),
        "growth of this process's memory from 20 to 400 clients at one worker, W2, MB": growth,
    }
    options.output.write_text(
        json.dumps({"machine": describe_machine(), "rows": rows, "figures": figures}, indent=2) + "\n"
    )
    print(json.dumps({"rows": rows, "figures": figures}, indent=2))


def _measure(name: str, parallelism: str, cores: list[int], passes: int) -> dict[str, Any]:
    workload = build_workload(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cluster(3))
        here = FedAvgRounds(
            DrawnWorkload.of(workload), build_engine("inprocess", "cpu", client_parallelism=parallelism)
        )
        far = {}
        for number in (1, 2):
            far[number] = FarFedAvgRounds(workload, number, parallelism)
            stack.callback(far[number].engine.close)
            for member, core in zip(far[number].engine.pool.pids(), cores, strict=False):
                _hold(member, [core])
        forms: dict[str, tuple[Any, list[int]]] = {
            "one process, one core": (here, cores[:1]),
            "one process, two cores": (here, cores),
            "one worker": (far[1], cores),
            "two workers": (far[2], cores),
        }
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        for number in range(1, _WARM_UP + passes + 1):
            for form, (rounds, held) in forms.items() if number % 2 else reversed(forms.items()):
                with _held(held), rounds.engine.install():
                    seconds[form].append(_seconds(rounds, number))
    return {
        form: {"median": statistics.median(found[_WARM_UP:]), "fastest": min(found[_WARM_UP:])}
        for form, found in seconds.items()
    }


def _growth(name: str, sizes: tuple[int, int]) -> float:
    """Returns how many MB the largest resident memory of this process grows with the number of clients in a round."""
    largest = []
    with _cluster(1):
        for size in sizes:
            rounds = FarFedAvgRounds(build_workload(name, size, max(sizes)), 1, "vectorized")
            with contextlib.closing(rounds.engine), rounds.engine.install():
                for number in range(1, _WARM_UP + 2):
                    rounds.run(rounds.prepare(number))
            largest.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return largest[1] - largest[0]


@contextlib.contextmanager
def _cluster(num_cores: int) -> Iterator[None]:
    """Starts Ray on this machine, for the workers of several engines."""
    ray.init(num_cpus=num_cores, include_dashboard=False, log_to_driver=False, _system_config=SYSTEM_CONFIG)
    try:
        yield
    finally:
        ray.shutdown()


def _seconds(rounds: Any, number: int) -> float:
    started = time.perf_counter()
    rounds.run(rounds.prepare(number))
    return time.perf_counter() - started


def _hold(pid: int, cores: list[int]) -> None:
    """Holds all threads of a process to some cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def _held(cores: list[int]) -> Iterator[None]:
    before = sorted(os.sched_getaffinity(0))
    _hold(os.getpid(), cores)
    try:
        yield
    finally:
        _hold(os.getpid(), before)


if __name__ == "__main__":
    main()
