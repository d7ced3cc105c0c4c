"""Measures the whole way of a large population: prepare, train, evaluate, export and serve, a process for each stage.

There are 100,000 users with 1 to 300 examples of 16 numbers each. A training has 20 rounds of CENTAUR, with 1,000 users
in a round and user-level DP. The benchmark also prepares 10,000 users from one file and from 10,000 files. It writes
seconds of wall time and of processor, and the largest memory of all of a stage's processes together.

  python -m benchmarks.population.run                 about 20 minutes on two cores, 4 GB of disk
  python -m benchmarks.population.run --users 2000    to try the benchmark out; prints the figures only
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.machine import RESULTS, Cost, describe_machine, measure_command, python_module
from benchmarks.population.users import CLASSES, SHAPE, num_examples, write_users

OUTPUT = RESULTS / "population.json"
USERS, ROUNDS, COHORT, USERS_PER_FILE, REQUESTS = 100_000, 20, 1_000, 1_000, 500
# Preparation of the same content from few files and from many.
FILES, FILE_EXAMPLES = 10_000, 12
METHOD, MODEL = "centaur", "population"
STAGES = ("prepare", "train", "evaluate", "export")


def settings(folder: Path, raw: Path, users: int) -> dict[str, Any]:
    """Returns the experiment's settings; the smallest populations have smaller cohorts."""
    return {
        "title": f"{users:,} users",
        "output": str(folder),
        # A user with a single example is kept unless it is the one held out.
        "data": {
            "kind": "leaf",
            "input": str(raw),
            "input_shape": list(SHAPE),
            "num_classes": CLASSES,
            "min_examples_per_client": 1,
        },
        "model": {"kind": "mlp", "hidden_units": [32]},
        "privacy": {
            "kind": "user",
            "users_per_round": min(COHORT, users // 4),
            "clip_norm": 0.5,
            "batch_size": 16,
            "budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1.0e-7},
            "registry": str(folder / "registry"),
        },
        "training": {"rounds": ROUNDS, "evaluate_every": ROUNDS, "checkpoint_every": 10},
        "algorithms": {METHOD: {"learning_rate": 0.1, "local_steps": "1 epochs", "head_steps": "1 epochs"}},
        "export": {"algorithm": METHOD, "model_name": MODEL},
    }


def measure(folder: Path, users: int, stages: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the stages one after another on `users` users; returns a row for each."""
    raw, output = folder / "raw", folder / "run"
    if not raw.exists():
        write_users(raw, num_examples(users), USERS_PER_FILE)
    config = folder / "population.yaml"
    config.write_text(yaml.safe_dump(settings(output, raw, users), sort_keys=False))
    rows = []
    for stage in stages:
        if stage in STAGES:
            arguments = ["--algorithm", METHOD] if stage == "train" else []
            row = _row(stage, measure_command(python_module("tff_pdp.cli", stage, "--config", str(config), *arguments)))
        else:
            export, key = output / "export" / MODEL, output / "client_id.key"
            arguments = (str(export.resolve()), MODEL, str(key), str(users), str(REQUESTS))
            cost = measure_command(python_module("benchmarks.population.requests", *arguments))
            row = _row(stage, cost) | json.loads(cost.output.splitlines()[-1])
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def measure_files(folder: Path, num_files: int) -> list[dict[str, Any]]:
    """Prepares the same users from one file, and from a file for each user; returns a row for each."""
    rows = []
    for number in (1, num_files):
        raw, output = folder / f"raw_{number}", folder / f"run_{number}"
        write_users(raw, np.full(num_files, FILE_EXAMPLES), num_files // number)
        config = folder / f"files_{number}.yaml"
        config.write_text(yaml.safe_dump(settings(output, raw, num_files), sort_keys=False))
        cost = measure_command(python_module("tff_pdp.cli", "prepare", "--config", str(config)))
        rows.append({"files": number, **_row("prepare", cost)})
        print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(raw)
        shutil.rmtree(output)
    return rows


def _row(stage: str, cost: Cost) -> dict[str, Any]:
    return {
        "stage": stage,
        "wall_s": round(cost.wall_s, 1),
        "cpu_s": round(cost.cpu_s, 1),
        "peak_rss_mb": round(cost.peak_rss_mb),
    }


def _size_mb(folder: Path) -> int:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6)


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=USERS, metavar="N", help=f"default {USERS:,}")
    parser.add_argument(
        "--files", type=int, default=FILES, metavar="N", help=f"files of one user each; default {FILES:,}"
    )
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="folder to write and keep; default temporary")
    parser.add_argument("--stages", default=",".join((*STAGES, "serve", "files")), help="default: all")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"default {OUTPUT}; none for other numbers of users"
    )
    options = parser.parse_args()
    chosen = options.stages.split(",")
    load_average = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="bench-population-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(folder, options.users, [stage for stage in chosen if stage != "files"])
        content = {
            "machine": describe_machine(),
            "load_before": load_average,
            "users": options.users,
            "raw_mb": _size_mb(folder / "raw"),
            "dataset_mb": _size_mb(folder / "run" / "clients"),
            "stages": rows,
            "files": measure_files(folder, options.files) if "files" in chosen else [],
        }
    text = json.dumps(content, indent=2)
    print(text)
    output = options.output or (OUTPUT if options.users == USERS else None)
    if output:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
