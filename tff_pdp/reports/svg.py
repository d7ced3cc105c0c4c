"""Turns a matplotlib figure into SVG text that can stand inside an HTML page, in light and dark."""

import html
import io
import re
import warnings
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Drawn in this colour, replaced by `currentColor`: text and axes then follow the page, light or dark.
INK = "#010203"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # Text stays text: searchable, small, in the reader's own font.
    "text.parse_math": False,  # A silo called "$x$" is a name, not a formula.
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def style(salt: str) -> AbstractContextManager[None]:
    """Context manager with the report's look; figures must be built and rendered inside it.

    Args:
      salt: makes the identifiers inside the SVG repeatable, and different from those of the page's other figures.
    """
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt})


def render(figure: Figure, description: str) -> str:
    """The figure as one `<svg>` element, without anything that refers to the outside.

    Args:
      figure: the finished figure.
      description: what a reader who cannot see the figure is told.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Text stays text, so a letter that matplotlib's own font lacks is still drawn by the browser.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _inline(buffer.getvalue(), description)


def _inline(document: str, description: str) -> str:
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"<!--.*?-->", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element)
    # Group identifiers ("axes_1") recur in every figure, and nothing refers to them.
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    element = element.replace(INK, "currentColor")
    label = html.escape(description, quote=True)
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
