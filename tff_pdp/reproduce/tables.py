"""Writes Markdown tables."""

from collections.abc import Sequence


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
