"""A figure of what preparing costs by the size of the input."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
