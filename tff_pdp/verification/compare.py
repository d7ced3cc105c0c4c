"""Compares the results of runs, from their files: in a table, and in a page with learning curves."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp.errors import ConfigError
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.words import plain, upper
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.run_folder import METRICS_FILE, read_metrics, validation_means
from tff_pdp.verification.epsilons import SUMMARY_FILE, read_json
from tff_pdp.verification.experiment import runs_of
from tff_pdp.verification.run_folder import is_run
from tff_pdp.verification.status import status_of

# Figures of `summary.json` in the table, with their headings.
_TESTED = {"mean": "test mean", "worst_decile": "worst tenth", "spread": "spread", "shared_mean": "shared model"}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>Comparison of runs</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid; text-align: right; }}
th:first-child {{ text-align: left; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>Comparison of runs</h1>
<table>
{table}
</table>
{figure}
<p>Test and validation figures are not private: they were computed without noise.
An epsilon is that of one run alone.</p>
</body>
</html>
"""


class Row(NamedTuple):
    """The results of one run.

    Attributes:
      name: folder of the run, with as many folders above as are needed to tell the runs apart.
      folder: folder of the run.
      metric: name of the metric; empty if nothing was measured.
      rounds: number of rounds on record.
      epsilon_spent: the largest epsilon of a silo, or that of all users; None if no epsilon holds.
      tested: figures of `summary.json` by name; empty if the run was not tested.
      history: pairs (round, mean of the validation metric over clients).
    """

    name: str
    folder: Path
    metric: str
    rounds: int
    epsilon_spent: float | None
    tested: dict[str, float | None]
    history: Sequence[tuple[int, float]]

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as plain data for JSON."""
        return json_safe(self._asdict() | {"folder": str(self.folder)})


def compared(places: Sequence[Path]) -> list[Row]:
    """Reads the results of runs, in the order of their folders.

    Args:
      places: output folders of experiments, or folders of methods in them.

    Raises:
      ConfigError: a folder has no run.
      DataError: a file of a run is damaged.
    """
    folders: list[Path] = []
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"{place} is not a folder")
        place = place.absolute()
        folders += [place] if is_run(place) else runs_of(place)
    folders = list(dict.fromkeys(folders))
    return [_row(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]


def _row(name: str, folder: Path) -> Row:
    status = status_of(folder)
    rows = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
    path = folder.parent / SUMMARY_FILE
    summary = read_json(path) if path.exists() else {}
    own = summary.get("algorithms", {}).get(folder.name, {})
    # Results of a run that has been replaced since are results of another run.
    own = own if own.get("run") == run_id_of(folder) else {}
    known = summary.get("metric") if own else rows[-1].get("metric") if rows else None
    spent = [one.epsilon_spent for one in status.spent]
    return Row(
        name=name,
        folder=folder,
        metric=str(known or ""),
        rounds=status.round_number,
        epsilon_spent=max(spent) if spent and math.isfinite(max(spent)) else None,
        tested={key: None if own[key] is None else float(own[key]) for key in _TESTED if key in own},
        history=validation_means(rows),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns short names that differ: `mr_mtl`, or `demo/mr_mtl`, and so on."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        depth += 1


def table(rows: Sequence[Row]) -> str:
    """Formats results as a text table, with notes."""
    width = max([4, *(len(row.name) for row in rows)])
    first, *others = [f"{cells[0]:<{width}}" + "".join(f" {cell:>13}" for cell in cells[1:]) for cells in _cells(rows)]
    metrics = ", ".join(sorted({row.metric.replace("_", " ") for row in rows if row.metric})) or "no metric"
    lines = [f"{metrics}; not private", first, *others]
    missing = [row.name for row in rows if not row.tested]
    if missing:
        lines.append(f"note: not tested, so only validated: {', '.join(missing)}; run `tff-pdp evaluate` for them")
    lines.append("note: an epsilon is that of one run alone; `tff-pdp verify` adds up the runs of a folder")
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the headings, then the cells of each run."""
    found = [["run", *_TESTED.values(), "validation", "rounds", "epsilon"]]
    for row in rows:
        tested = [plain(row.tested.get(key)) for key in _TESTED]
        validated = plain(row.history[-1][1] if row.history else None)
        epsilon = "none" if row.epsilon_spent is None else upper(row.epsilon_spent)
        found.append([row.name, *tested, validated, str(row.rounds), epsilon])
    return found


def curves_figure(rows: Sequence[Row]) -> str:
    """Draws the runs' learning curves as the text of an SVG file.

    Raises:
      ConfigError: the runs have different metrics, or no run has a learning curve.
    """
    from tff_pdp.reports.plots import as_file

    return as_file(_figure(rows))


def curves_page(rows: Sequence[Row]) -> str:
    """Returns an HTML page with the table and the learning curves; errors are as in `curves_figure`."""
    head, *body = _cells(rows)
    lines = ["<tr>" + "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head) + "</tr>"]
    for name, *cells in body:
        inner = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{html.escape(name)}</th>{inner}</tr>')
    return _PAGE.format(table="\n".join(lines), figure=_figure(rows))


def _figure(rows: Sequence[Row]) -> str:
    # It takes a second to import.
    from tff_pdp.reports import plots

    metrics = sorted({row.metric for row in rows if row.history})
    if len(metrics) > 1:
        raise ConfigError(
            f"--plot: the runs have different metrics ({', '.join(metrics)}): compare those of one metric"
        )
    curves = [(row.name, row.history) for row in rows]
    element = plots.curves_figure(curves, (metrics or [""])[0].replace("_", " "), "clients")
    if not element:
        raise ConfigError("--plot: no run has a learning curve (training.nonprivate_metrics is false, or no round yet)")
    return element
