"""Draws the report's figures: learning curves, each client's metric, the privacy that silos have spent, and synthetic
images.

Each figure is SVG text for use inside an HTML page, light or dark.
"""

import html
import io
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import SiloCosts
from tff_pdp.reports import content, summary
from tff_pdp.reports.summary import metric_text
from tff_pdp.reports.words import SILOS, ClientWords

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
    """Returns a context manager with the report's look; figures must be built and rendered inside it.

    `salt` makes the identifiers inside the SVG reproducible; figures on one page need different salts.
    """
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt})


def render(figure: Figure, description: str) -> str:
    """Renders a finished figure as one `<svg>` element without external references.

    `description` is a text for readers who cannot see the figure.
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


# Okabe and Ito's colours: told apart under every common colour blindness, and readable on white and on black.
# Each series also has its own marker or line, so that the figures survive a black-and-white print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":")

_WIDTH = 7.6
_MOST_NAMED = 40
_LONGEST_NAME = 24
# More than a figure is wide.
_MOST_POINTS = 1000


def history_figure(algorithms: Sequence[content.AlgorithmResult], metric: Metric, words: ClientWords = SILOS) -> str:
    """Draws the mean validation metric against rounds, a line per method; empty text if no method has a history."""
    curves = [(algorithm.facts.title, algorithm.history) for algorithm in algorithms]
    return curves_figure(curves, metric_text(metric).label, words.many)


def curves_figure(curves: Sequence[tuple[str, Sequence[tuple[int, float]]]], label: str, clients: str) -> str:
    """Draws the mean validation metric against rounds, a line per run; empty text if no run has a history.

    Args:
      curves: title of each run, and its pairs (round, mean over clients).
      label: words for the metric.
      clients: word for several clients.
    """
    drawn = [(title, history) for title, history in curves if history]
    if not drawn:
        return ""
    with style("history"):
        figure, axes = _figure(3.4)
        for index, (title, history) in enumerate(drawn):
            rounds, values = zip(*history, strict=True)
            axes.plot(
                rounds,
                values,
                color=COLOURS[index % len(COLOURS)],
                linestyle=LINES[index % len(LINES)],
                marker=MARKERS[index % len(MARKERS)],
                markevery=max(1, len(rounds) // 12),
                markersize=4,
                label=_short(title),
            )
        axes.set_xlabel("round")
        # Without the direction, for which the axis is too short.
        axes.set_ylabel(f"validation {label},\nmean over {clients}")
        _legend(axes)
        names = ", ".join(title for title, _ in drawn)
        return render(figure, f"Validation {label} per round, mean over {clients}, of {names}.")


def as_file(element: str) -> str:
    """Returns an `<svg>` element of `render` as the text of a file of its own, dark on a transparent background."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="#1c2430"'
    return element.replace("<svg", f"<svg {spaces}", 1)


def metric_figure(
    clients: Sequence[content.ClientScores],
    algorithm: content.AlgorithmResult,
    metric: Metric,
    baseline: str = "local_only",
    words: ClientWords = SILOS,
) -> str:
    """Draws each client's test metric for the personal model, the model learnt alone, and the shared model.

    Up to 40 clients are named, sorted by the personal model's metric, the worst at the bottom. If there are more
    clients, each model has a curve of at most a thousand points, with clients sorted by that model's metric.
    """
    series = [("personal model", summary.personal_values(clients, algorithm.facts.name))]
    if algorithm.facts.name != baseline:
        series.append(("learnt alone", summary.personal_values(clients, baseline)))
    series.append(("shared model", summary.shared_values(clients, algorithm.facts.name)))
    series = [(label, values) for label, values in series if not all(map(math.isnan, values))]
    if not series:
        return ""
    text = metric_text(metric)
    with style("metric"):
        is_named = len(clients) <= _MOST_NAMED
        figure = _by_name(clients, series, metric) if is_named else _curves(series, metric, words)
        what = ", ".join(f"{label} {text.value(summary.mean_over_silos(values))}" for label, values in series)
        # Those without a result are not in the means.
        count = sum(not math.isnan(value) for value in summary.personal_values(clients, algorithm.facts.name))
        over = f"{count} {words.many} under {algorithm.facts.title}"
        return render(figure, f"Test {text.label} over {over}; means: {what}.")


def epsilon_figure(silos: Sequence[SiloCosts]) -> str:
    """Draws the privacy spent by each silo against the silo's target; silos without a finite epsilon are left out."""
    protected = sorted(
        (silo for silo in silos if math.isfinite(silo.epsilon_spent)),
        key=lambda silo: (silo.epsilon_target, silo.epsilon_spent),
    )
    if not protected:
        return ""
    spent = np.array([silo.epsilon_spent for silo in protected])
    targets = np.array([silo.epsilon_target for silo in protected])
    with style("epsilon"):
        if len(protected) <= _MOST_NAMED:
            figure, axes = _named_figure([silo.id for silo in protected])
            places = np.arange(len(protected))
            axes.barh(places, spent, height=0.55, color=COLOURS[0], label="spent")
            axes.plot(targets, places, "|", color=COLOURS[1], markersize=11, markeredgewidth=2.5, label="target")
            axes.set_xlabel("ε")
            axes.set_xlim(left=0)
        else:
            figure, axes = _figure(3.4)
            places = np.arange(1, len(protected) + 1)
            axes.step(places, targets, where="mid", color=COLOURS[1], linewidth=2, label="target")
            axes.plot(places, spent, ".", color=COLOURS[0], markersize=4, label="spent")
            axes.set_xlim(0, len(protected) + 1)
            axes.set_xlabel("silos, sorted by target")
            axes.set_ylabel("ε")
            if spent.min() > 0 and spent.max() / spent.min() > 20:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
        _legend(axes)
        return render(figure, f"ε spent and target of {len(protected)} silos; most spent {spent.max():.3g}.")


_IMAGES_PER_SILO = 12
_MOST_SILOS = 10
# Between images of a row, in pixels of the images.
_GAP = 1


def synthetic_figure(silos: Sequence[content.SyntheticImages]) -> str:
    """Draws synthetic images of the first silos, as `synthetic_images` does; empty text without silos."""
    if not silos:
        return ""
    with style("synthetic"):
        figure = synthetic_images(
            [silo.x for silo in silos], [silo.y for silo in silos], [silo.id for silo in silos], silos[0].value_range
        )
        shown = min(len(silos), _MOST_SILOS)
        return render(figure, f"Synthetic images of {shown} of {len(silos)} silos, a row for each, with their labels.")


def synthetic_images(
    x: Sequence[np.ndarray], y: Sequence[np.ndarray], names: Sequence[str], value_range: tuple[float, float] = (0, 1)
) -> Figure:
    """Draws synthetic images of up to ten silos: a row of up to twelve images for each silo, with the images' labels.

    Images are sorted by label, and images in equal distances in this order are drawn: no image is chosen by its look,
    and a label takes about as much of a row as of the silo's synthetic images.

    Args:
      x: images of each silo, float `[images, height, width, channels]` with one channel (grey, drawn dark on white) or
        three (red, green, blue); height, width and channels are the same in all silos.
      y: labels of each silo's images, whole numbers `[images]`.
      names: name of each silo.
      value_range: smallest and largest possible value of a pixel.

    Raises:
      ValueError: a silo has no images, or images do not have one or three channels.
    """
    rows = list(zip(x, y, names, strict=True))[:_MOST_SILOS]
    height, width, channels = x[0].shape[1:]
    if channels not in (1, 3):
        raise ValueError(f"images of {channels} channels cannot be drawn: 1 (grey) or 3 (red, green, blue)")
    row_height = (_WIDTH - 1) / _IMAGES_PER_SILO * height / width + 0.3
    figure = Figure(figsize=(_WIDTH, 0.2 + row_height * len(rows)), layout="constrained")
    figure.patch.set_alpha(0)
    low, high = value_range
    for axes, (images, labels, name) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        if not len(images):
            raise ValueError(f"{name} has no synthetic images")
        shown = np.argsort(labels, kind="stable")[_evenly_spaced(len(labels), _IMAGES_PER_SILO)]
        step = width + _GAP
        canvas = np.full((height, step * _IMAGES_PER_SILO - _GAP, channels), np.nan)
        for place, image in enumerate(shown):
            canvas[:, step * place : step * place + width] = (images[image] - low) / (high - low)
        # NaN, between images and where a silo has fewer, is not drawn.
        if channels == 1:
            axes.imshow(canvas[..., 0], cmap="gray_r", vmin=0, vmax=1, interpolation="none")
        else:
            is_drawn = ~np.isnan(canvas[..., :1])
            colours = np.clip(np.nan_to_num(canvas), 0, 1)
            axes.imshow(np.concatenate([colours, is_drawn], axis=-1), interpolation="none")
        axes.set_xticks(
            [step * place + (width - 1) / 2 for place in range(len(shown))], [f"{y}" for y in labels[shown]]
        )
        axes.set_yticks([(height - 1) / 2], [_short(name)])
        axes.tick_params(length=0, labelsize=9)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


def _evenly_spaced(count: int, most: int) -> np.ndarray:
    """Returns up to `most` different positions in `[0, count)`, in equal distances, int64 `[min(count, most)]`."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def _by_name(clients: Sequence[content.ClientScores], series: list[tuple[str, list[float]]], metric: Metric) -> Figure:
    personal = np.array(series[0][1]) if metric.higher_is_better else -np.array(series[0][1])
    order = np.argsort(np.nan_to_num(personal, nan=-math.inf), kind="stable")
    figure, axes = _named_figure([clients[index].id for index in order])
    places = np.arange(len(clients))
    table = np.array([values for _, values in series])[:, order]
    filled = ~np.all(np.isnan(table), axis=0)
    axes.hlines(
        places[filled],
        np.nanmin(table[:, filled], axis=0),
        np.nanmax(table[:, filled], axis=0),
        color=INK,
        alpha=0.25,
    )
    # The personal model is drawn last, on top: it is what the reader looks for.
    for index in reversed(range(len(series))):
        axes.plot(
            table[index], places, MARKERS[index], color=COLOURS[index], label=series[index][0], markersize=7 - index
        )
    axes.set_xlabel(f"test {metric_text(metric).axis}")
    _legend(axes, reverse=True)
    return figure


def _curves(series: list[tuple[str, list[float]]], metric: Metric, words: ClientWords) -> Figure:
    figure, axes = _figure(3.8)
    axes.axvspan(0, 10, color=INK, alpha=0.08, linewidth=0)
    axes.text(1, 0.97, "worst tenth", transform=axes.get_xaxis_transform(), va="top", fontsize=9)
    for index, (label, values) in enumerate(series):
        ordered = summary.worst_first(values, metric)
        shares = 100 * (np.arange(len(ordered)) + 0.5) / len(ordered)
        drawn = _evenly_spaced(len(ordered), _MOST_POINTS)
        axes.plot(
            shares[drawn],
            np.array(ordered)[drawn],
            color=COLOURS[index],
            linestyle=LINES[index],
            linewidth=2,
            label=label,
        )
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"{words.many}, worst to best, in per cent (each model sorted by itself)")
    axes.set_ylabel(f"test {metric_text(metric).axis}")
    _legend(axes)
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    return figure, axes


def _named_figure(names: Sequence[str]) -> tuple[Figure, Axes]:
    figure, axes = _figure(1.3 + 0.24 * len(names))
    axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=9)
    axes.set_ylim(-0.7, len(names) - 0.3)
    return figure, axes


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _legend(axes: Axes, reverse: bool = False) -> None:
    axes.legend(reverse=reverse, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)
