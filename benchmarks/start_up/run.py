"""Measures how long commands take to start: `--help`, `account`, and the demo as far as the end of the first round.

  make bench-start-up                    five starts of each, two minutes on two cores
  python -m benchmarks.start_up.run --repetitions 3 --output FILE

Each start is a new process. Starts of the commands alternate, after one start of each that is not counted: it fills
the system's cache of files. Writes `benchmarks/results/start_up.json`: for each command the median, the fastest and
the slowest of the starts, in seconds, the median of the processor time, and the load of the machine.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, describe_machine, measure_command, python_module
from benchmarks.start_up.first_round import PARTS
from tff_pdp.files import replace_text

OUTPUT = RESULTS / "start_up.json"
# A command's largest acceptable seconds on an idle machine, by the name of the command.
BOUNDS = {"help": 0.3, "account": 1.5, "first round": 5.0}
_PLAN = ("--unit", "silo_example", "--sampling-rate", "0.032", "--steps", "1000", "--delta", "1e-5")

Times = Mapping[str, Mapping[str, float]]


def measure(repetitions: int) -> dict[str, Any]:
    """Starts each command `repetitions` times and returns the content of the results file."""
    starts: dict[str, Callable[[], Times]] = {
        "help": lambda: _command("help", "--help"),
        "account": lambda: _command("account", "account", *_PLAN, "--epsilon", "2"),
        "first round": _first_round,
    }
    found: dict[str, list[Mapping[str, float]]] = {}
    loads = []
    for repetition in range(-1, repetitions):
        for start in starts.values():
            load, times = os.getloadavg()[0], start()
            if repetition >= 0:
                loads.append(load)
                for name, one in times.items():
                    found.setdefault(name, []).append(one)
    return {
        "machine": describe_machine(),
        "load_before": {"least": min(loads), "most": max(loads)},
        "repetitions": repetitions,
        "rows": [_row(name, times) for name, times in found.items()],
    }


def _command(name: str, *arguments: str) -> Times:
    cost = measure_command(python_module("tff_pdp.cli", *arguments))
    return {name: {"s": cost.wall_s, "cpu_s": cost.cpu_s}}


def _first_round() -> Times:
    """Returns the times of all parts of the demo, and of the first round from the start of the training."""
    with tempfile.TemporaryDirectory() as folder:
        cost = measure_command(python_module("benchmarks.start_up.first_round", folder))
    parts = json.loads(cost.output.splitlines()[-1])
    return {
        **{f"demo: {part}": parts[part] for part in PARTS},
        "first round": _sum(parts, "build", "round"),
        "demo after imports": _sum(parts, "prepare", "build", "round"),
    }


def _sum(parts: Times, *names: str) -> Mapping[str, float]:
    return {key: sum(parts[name][key] for name in names) for key in ("s", "cpu_s")}


def _row(name: str, times: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    seconds = [one["s"] for one in times]
    return {
        "command": name,
        "bound_s": BOUNDS.get(name),
        "s": statistics.median(seconds),
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "cpu_s": statistics.median(one["cpu_s"] for one in times),
        "fastest_cpu_s": min(one["cpu_s"] for one in times),
    }


def main() -> None:
    """Measures all commands, writes the results, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="counted starts; default 5")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default {OUTPUT}")
    options = parser.parse_args()
    content = measure(options.repetitions)
    replace_text(options.output, json.dumps(content, indent=1) + "\n")
    for row in content["rows"]:
        bound = "" if row["bound_s"] is None else f"  at most {row['bound_s']} s"
        print(f"{row['command']:<20} {row['s']:6.2f} s  CPU {row['cpu_s']:6.2f} s{bound}")


if __name__ == "__main__":
    main()
