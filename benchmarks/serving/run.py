"""Exports, loads and calls personal models in every layout and several sizes, and the embedded server over the network.

  make bench-serving            about 15 minutes on two cores
  python -m benchmarks.serving.run --small --output FILE

Writes `benchmarks/results/serving.json`: rows of `layout, clients, export_s, load_s, rss_mb, p50_ms, p99_ms, disk_mb`
(`load_s` and `rss_mb` beyond what a process with TensorFlow takes anyway; latencies of one example, those of 64 beside
them), and what the server reaches. `per_client` is one SavedModel for each client.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, describe_machine
from benchmarks.measured import python_module
from benchmarks.serving.layouts import LAYOUTS, NUM_FEATURES, build_models, measure_latencies
from benchmarks.serving.protocols import measure_protocols, measure_throughput
from serving.export.exporter import export_models
from serving.export.per_client import export_per_client
from serving.models import STACKED
from serving.saved_model.servable import load_servable

OUTPUT = RESULTS / "serving.json"
CLIENTS, SMALL_CLIENTS = (10, 1_000, 10_000), (10, 100)
SEPARATE_CLIENTS, SMALL_SEPARATE_CLIENTS = (10, 50), (3,)
LOADS = 3
MODEL_NAME = "bench"
PER_CLIENT = "per_client"

Row = dict[str, Any]


def measure(folder: pathlib.Path, clients: tuple[int, ...], separate_clients: tuple[int, ...]) -> dict[str, Any]:
    """All rows, and the server's figures on the largest stacked export."""
    exports: dict[tuple[str, int], list[pathlib.Path]] = {}
    rows: list[Row] = []
    for layout, num_clients, separate in [
        *((layout, number, False) for layout in LAYOUTS for number in clients),
        *((PER_CLIENT, number, True) for number in separate_clients),
    ]:
        row, versions = _export(folder / f"{layout}_{num_clients}", layout, num_clients, separate=separate)
        row |= _load_cost(versions)
        exports[layout, num_clients] = versions
        rows.append(row)
        print(json.dumps(row), flush=True)
    _add_latencies(rows, exports)
    base_path = exports[STACKED, clients[-1]][0].parent
    return {
        "machine": describe_machine(),
        "load_before": round(os.getloadavg()[0], 2),
        "rows": rows,
        "throughput": measure_throughput(base_path, MODEL_NAME),
        "protocols": measure_protocols(base_path, MODEL_NAME),
    }


def _export(folder: pathlib.Path, layout: str, num_clients: int, *, separate: bool) -> tuple[Row, list[pathlib.Path]]:
    models = build_models(STACKED if separate else layout, num_clients)
    arguments = {
        "model_name": MODEL_NAME,
        "example_inputs": np.random.default_rng(1).standard_normal((8, NUM_FEATURES), np.float32),
        "privacy_report": {"claim": "none"},
        "model_card": {"purpose": "benchmark"},
    }
    started = time.perf_counter()
    if separate:
        versions = list(export_per_client(folder, models, **arguments).values())
    else:
        versions = [export_models(folder, models, **arguments)]
    export_s = time.perf_counter() - started
    disk = sum(path.stat().st_size for version in versions for path in version.rglob("*") if path.is_file())
    return {"layout": layout, "clients": num_clients, "export_s": export_s, "disk_mb": disk / 1e6}, versions


def _load_cost(versions: list[pathlib.Path]) -> Row:
    """Medians over fresh processes; of many versions, which take long, from one."""
    command = python_module("benchmarks.serving.load_probe", *map(str, versions))
    costs = [
        json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
        for _ in range(LOADS if len(versions) == 1 else 1)
    ]
    return {key: statistics.median(cost[key] for cost in costs) for key in costs[0]}


def _add_latencies(rows: list[Row], exports: dict[tuple[str, int], list[pathlib.Path]]) -> None:
    """Of all exports in one process and in turn; of separate models, the first."""
    loaded = {key: load_servable(versions[0]) for key, versions in exports.items()}
    callable_ = {str(key): (servable, 1 if key[0] == PER_CLIENT else key[1]) for key, servable in loaded.items()}
    one, many = measure_latencies(callable_, 1), measure_latencies(callable_, 64)
    for row in rows:
        name = str((row["layout"], row["clients"]))
        batch = {f"batch_64_{key}": value for key, value in many[name].items()}
        # A batch of separate models cannot mix clients: 64 examples of one.
        row |= {**one[name], **batch, "mixes_clients": row["layout"] != PER_CLIENT}


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few clients, to try it out")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", default=OUTPUT, help=f"default {OUTPUT}")
    options = parser.parse_args()
    sizes = (SMALL_CLIENTS, SMALL_SEPARATE_CLIENTS) if options.small else (CLIENTS, SEPARATE_CLIENTS)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        content = measure(pathlib.Path(folder), *sizes)
    options.output.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps({key: content[key] for key in ("throughput", "protocols")}, indent=2))
    print(f"figures: {options.output}")


if __name__ == "__main__":
    main()
