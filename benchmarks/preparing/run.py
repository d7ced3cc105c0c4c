"""Measures the cost of preparing data, by size and engine, and of a script in one process; `make bench-beam`.

Inputs are generated once and kept. Writes `benchmarks/results/beam.json`, a row for each run, and a figure of cost by
size, `docs/images/beam.png`.

  python -m benchmarks.preparing.run          1 and 10 million contacts: 15 minutes, 4 GB of disk
  python -m benchmarks.preparing.run --full   also 186 million, and 800,000 images: half an hour more, 45 GB of disk
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pyarrow.parquet

from beam_pipelines.dataset.staging import remove
from beam_pipelines.epidemic.outbreak import OutbreakOptions, simulate_outbreak
from beam_pipelines.epidemic.population import PopulationOptions, generate_population
from benchmarks.machine import RESULTS, ROOT, Cost, describe_machine, measure_command, python_module
from benchmarks.preparing.contact_graph_run import ENGINES
from benchmarks.preparing.femnist import write_leaf_files

matplotlib.use("Agg")


_FIGURES = (("cpu_s", "processor seconds"), ("wall_s", "seconds"), ("peak_rss_mb", "peak memory, MB"))


def plot_costs(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws processor time, wall time and memory against contacts, a line for each engine, and writes a PNG."""
    rows = [row for row in rows if row["edges"]]
    figure, axes = plt.subplots(1, len(_FIGURES), figsize=(12, 3.6), layout="constrained")
    for axis, (name, label) in zip(axes, _FIGURES, strict=True):
        for engine in sorted({row["engine"] for row in rows}):
            points = sorted((row["edges"], row[name]) for row in rows if row["engine"] == engine)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=engine)
        axis.set(xscale="log", yscale="log", xlabel="contacts", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


OUTPUT = RESULTS / "beam.json"
FIGURE = ROOT / "docs" / "images" / "beam.png"
POLARS = "polars, one process"
STAGED = "files"
# Number of people by name of the size; there are 24.5 contacts for each person.
SIZES = {"1M": 40_816, "10M": 408_163, "186M": 7_600_000}
# One pipeline keeps all pieces between stages in memory: more than some ten million contacts do not fit.
_CONTENDERS = {"1M": (POLARS, *ENGINES), "10M": (POLARS, *ENGINES), "186M": (STAGED,)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_beam"), help="folder of populations")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of the small sizes; the median is recorded")
    parser.add_argument("--full", action="store_true", help="also 7.6 million people with 186 million contacts")
    options = parser.parse_args(arguments)
    sizes = ["1M", "10M", *(["186M"] if options.full else [])]
    rows = []
    for size in sizes:
        folder = _population(options.folder, size)
        for engine in _CONTENDERS[size]:
            repetitions = 1 if size == "186M" else options.repetitions
            runs = [_measure(folder, options.folder / "output", engine) for _ in range(repetitions)]
            rows.append(sorted(runs, key=lambda row: row["cpu_s"])[len(runs) // 2])
            print(json.dumps(rows[-1]))
    _check_same_work(rows)
    if options.full:
        rows.append(_measure_femnist(options.folder / "leaf", options.folder / "output"))
        print(json.dumps(rows[-1]))
    kept = _kept_rows(rows)
    content = {"machine": describe_machine(), "rows": kept, "ratios": _ratios(kept)}
    OUTPUT.write_text(json.dumps(content, indent=1) + "\n")
    plot_costs(kept, FIGURE)
    print(json.dumps(content["ratios"]))


def _population(folder: Path, size: str) -> Path:
    """Returns the folder of a population of this size; generates the tables unless they exist."""
    tables = folder / size
    if not (tables / "target.parquet").exists():
        generate_population(tables, PopulationOptions(num_people=SIZES[size]), overwrite=True)
        simulate_outbreak(tables, OutbreakOptions(), overwrite=True)
    return tables


def _measure(tables: Path, output: Path, engine: str) -> dict[str, Any]:
    remove(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if engine == POLARS:
        cost = measure_command(python_module("benchmarks.preparing.polars_rows", str(tables), str(output)))
        written = pyarrow.parquet.read_metadata(output).num_rows
    else:
        command = python_module("benchmarks.preparing.contact_graph_run", str(tables), str(output), engine)
        cost = measure_command(command)
        written = json.loads(cost.output.splitlines()[-1])["output_rows"]
    edges = pyarrow.parquet.read_metadata(tables / "population_network.parquet").num_rows
    return _row("contact_graph", engine, edges, cost, written, output)


def _measure_femnist(leaf: Path, output: Path) -> dict[str, Any]:
    write_leaf_files(leaf)
    remove(output)
    cost = measure_command(python_module("benchmarks.preparing.femnist", str(leaf), str(output)))
    return _row("femnist", STAGED, 0, cost, json.loads(cost.output.splitlines()[-1])["output_rows"], output)


def _row(job: str, engine: str, edges: int, cost: Cost, written: int, output: Path) -> dict[str, Any]:
    """Returns a row of the results; removes the written output."""
    files = [path for path in output.rglob("*") if path.is_file()] if output.is_dir() else [output]
    nbytes = sum(path.stat().st_size for path in files)
    remove(output)
    return {
        "job": job,
        "engine": engine,
        "edges": edges,
        "cpu_s": round(cost.cpu_s, 2),
        "wall_s": round(cost.wall_s, 2),
        "peak_rss_mb": round(cost.peak_rss_mb),
        "output_rows": written,
        "output_mb": round(nbytes / 1e6),
    }


def _check_same_work(rows: Sequence[dict[str, Any]]) -> None:
    for edges in {row["edges"] for row in rows}:
        written = {row["output_rows"] for row in rows if row["edges"] == edges}
        if len(written) > 1:
            raise RuntimeError(f"{edges} contacts: the engines wrote different numbers of rows: {sorted(written)}")


def _kept_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns these rows, and the rows of earlier runs at sizes that were not run now."""
    measured = {row["edges"] for row in rows}
    earlier = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else []
    return sorted(
        [*rows, *(row for row in earlier if row["edges"] not in measured)],
        key=lambda row: (row["edges"], row["engine"]),
    )


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the processor time divided by the script's processor time, by size and engine."""
    script = {row["edges"]: row["cpu_s"] for row in rows if row["engine"] == POLARS}
    return [
        {"edges": row["edges"], "engine": row["engine"], "cpu_ratio": round(row["cpu_s"] / script[row["edges"]], 2)}
        for row in rows
        if row["edges"] in script and row["engine"] != POLARS
    ]


if __name__ == "__main__":
    main()
