"""Turns measured rows into the tables of docs/performance.md, between its markers.

python -m benchmarks.rounds.table
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds.run import RESULTS, ROOT
from tff_pdp.files import replace_text

Row = dict[str, Any]

DOCUMENT = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

# Contenders whose times are the denominators of the last columns.
_REFERENCES = ("stock-tff", "floor-tf")
_COLUMNS = (
    "contender",
    "s/round",
    "fastest s/round",
    "CPU s/round",
    "peak MB",
    "first round s",
    "time / stock-tff",
    "time / floor-tf",
)
_STEP_COLUMNS = ("model", "plain ms", "DP-SGD ms", "DP-SGD / plain")
_SCALING_COLUMNS = ("workload", "contender", "clients a round", "population", "s/round", "CPU s/round", "peak MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the tables of latest.json, and of the other results where they exist, into the document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounds.table", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--rows", type=Path, default=RESULTS / "latest.json")
    parser.add_argument("--gpu-rows", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--scaling", type=Path, default=RESULTS / "scaling.json")
    parser.add_argument("--dp-sgd-step", type=Path, default=RESULTS / "dp_sgd_step.json")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    text = render(json.loads(options.rows.read_text(encoding="utf-8")))
    if options.scaling.is_file():
        text += "\n" + render_scaling(json.loads(options.scaling.read_text(encoding="utf-8")))
    if options.dp_sgd_step.is_file():
        text += "\n" + render_dp_sgd_step(json.loads(options.dp_sgd_step.read_text(encoding="utf-8")))
    if options.gpu_rows.is_file():
        text += "\n" + render(json.loads(options.gpu_rows.read_text(encoding="utf-8")))
    document = replace_between_markers(options.document.read_text(encoding="utf-8"), text)
    replace_text(options.document, document)


def render(rows: Sequence[Row]) -> str:
    """Returns one table per workload and size, fastest contender first, then machine and versions."""
    parts = []
    for title, group in _groups(rows).items():
        medians = {row["contender"]: row["s_per_round"] for row in group}
        lines = [_line(row, medians) for row in sorted(group, key=lambda row: row["s_per_round"])]
        parts.append(f"### {title}\n\n" + _table(_COLUMNS, lines))
    versions = "\n".join(f"- {contender}: {packages}" for contender, packages in _versions(rows).items())
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    loads = [row["load_before"] for row in rows]
    machine = f"Machine: {machines}. Load before a workload (1-minute average): {min(loads)} to {max(loads)}."
    dates = sorted({row["date"] for row in rows if "date" in row})
    machine += f" Measured on {', '.join(dates)}.\n" if dates else "\n"
    return "\n".join([machine, *parts, f"Versions:\n\n{versions}\n"])


def render_scaling(rows: Sequence[Row]) -> str:
    """Returns one table of all sizes."""
    keys = ("workload", "contender", "clients_per_round", "population")
    lines = [
        [
            *(str(row[key]) for key in keys),
            *(_seconds(row[key]) for key in ("s_per_round", "cpu_s_per_round")),
            _mb(row),
        ]
        for row in sorted(rows, key=lambda row: tuple(row[key] for key in keys))
    ]
    return "### More clients, larger populations\n\n" + _table(_SCALING_COLUMNS, lines)


def render_dp_sgd_step(rows: Sequence[Row]) -> str:
    """Returns one table of a local step's time, with and without DP-SGD."""
    lines = [
        [row["model"], f"{1e3 * row['plain_s']:.3g}", f"{1e3 * row['dp_s']:.3g}", f"{row['ratio']:.2f}"] for row in rows
    ]
    return "### A local step with and without DP-SGD, at an expected batch of 64\n\n" + _table(_STEP_COLUMNS, lines)


def replace_between_markers(document: str, text: str) -> str:
    """Returns the document with everything between its markers replaced.

    Raises:
        ValueError: The document does not have each marker once, in order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the document needs one {BEGIN!r} and one {END!r} after it")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def _groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        size = f"{row['clients_per_round']} of {row['population']} clients"
        where = " on a GPU" if row.get("device") == "gpu" else ""
        title = f"{row['workload']}{where}: {size}, {row['data']} data, median of {row['repetitions']} rounds"
        groups.setdefault(title, []).append(row)
    return groups


def _line(row: Row, medians: dict[str, float]) -> list[str]:
    ratios = [f"{row['s_per_round'] / medians[name]:.2f}" if name in medians else "" for name in _REFERENCES]
    times = [_seconds(row[key]) for key in ("s_per_round", "s_per_round_min", "cpu_s_per_round")]
    return [row["contender"], *times, _mb(row), _seconds(row["first_round_s"]), *ratios]


def _versions(rows: Iterable[Row]) -> dict[str, str]:
    return {
        row["contender"]: ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        for row in rows
    }


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _mb(row: Row) -> str:
    return f"{row['peak_rss_mb']:.0f}"


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---" if column in ("workload", "contender", "model") else "---:" for column in columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, rule, *lines))


if __name__ == "__main__":
    main()
