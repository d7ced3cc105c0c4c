"""Writes Markdown tables, such as the table of a reproduction's traffic.

Traffic is the number of bytes that all clients of a real run would send and receive.
"""

from collections.abc import Sequence

from tff_pdp.reports.words import MISSING
from tff_pdp.reproduce.budget import budget_text
from tff_pdp.reproduce.means import Mean, by_budget
from tff_pdp.reproduce.methods import METHODS

_MEGABYTE = 1e6
_DIRECTIONS = ("uplink", "downlink", "both")


def markdown_table(rows: Sequence[Sequence[str]], shown: Sequence[bool] | None = None) -> list[str]:
    """Writes a table's lines, aligned so that it can be read as text.

    Args:
      rows: cells by row; the first row is the heading.
      shown: whether each column is shown; None for all.
    """
    wanted = [True] * len(rows[0]) if shown is None else shown
    kept = [[cell for cell, is_shown in zip(row, wanted, strict=True) if is_shown] for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in kept
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]


def traffic_lines(means: Sequence[Mean], baseline: str) -> list[str]:
    """Writes a run's traffic by method in both directions, and what each method saves relative to `baseline`.

    A saving is a share of the traffic of `baseline`, in percent: positive for less traffic, negative for more.

    Args:
      means: means over seeds; those without counted bytes are left out.
      baseline: a name in `METHODS`.

    Returns:
      Lines of Markdown; none if no traffic was counted.
    """
    counted = [mean for mean in means if mean.uplink_bytes is not None and mean.downlink_bytes is not None]
    if not counted:
        return []
    compared = {mean.budget: _bytes(mean) for mean in counted if mean.method == baseline}
    heading = ["budgets", "method", *(f"{one}, MB" for one in _DIRECTIONS)]
    rows = [[*heading, *(f"{one} saved" for one in _DIRECTIONS)]]
    for mean in by_budget(counted):
        own = _bytes(mean)
        saved = [_saved_text(*pair) for pair in zip(own, compared.get(mean.budget, [0.0] * 3), strict=True)]
        budget = mean.budget if isinstance(mean.budget, str) else budget_text(mean.budget)
        rows.append([budget, METHODS[mean.method].title, *(f"{one / _MEGABYTE:.2f}" for one in own), *saved])
    title = METHODS[baseline].title
    return [
        "",
        f"Traffic of all silos in a whole run, mean over seeds; savings are relative to {title}, negative for more:",
        "",
        *markdown_table(rows),
    ]


def _bytes(mean: Mean) -> list[float]:
    """Returns the bytes of uplink, downlink and both."""
    uplink, downlink = mean.uplink_bytes or 0.0, mean.downlink_bytes or 0.0
    return [uplink, downlink, uplink + downlink]


def _saved_text(own: float, base: float) -> str:
    return f"{100 * (1 - own / base):.1f} %" if base else MISSING
