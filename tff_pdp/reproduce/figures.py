"""Draws the figures of the MR-MTL thesis: utility against privacy, utility against lambda, and privacy overhead.

If budgets differ between silos, one figure shows each method's utility. If silos have made synthetic images, a figure
for each budget shows some of them.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tff_pdp.files import replacing
from tff_pdp.reports import plots as svg
from tff_pdp.reports.plots import COLOURS, LINES, MARKERS
from tff_pdp.reports.summary import metric_text
from tff_pdp.reproduce.budget import Budget, budget_text, epsilon_of, in_order
from tff_pdp.reproduce.means import Mean
from tff_pdp.reproduce.methods import METHODS, OVERHEAD_METHODS
from tff_pdp.reproduce.report import Reported, VariantReport
from tff_pdp.reproduce.sweep import images_file

_WIDTH, _HEIGHT = 7.6, 5.4
_BESIDE = 3.6
_DOTS_PER_INCH = 150
# Drawn as lines across the figure of lambda, on which they do not depend.
_WITHOUT_LAMBDA = ("local_only", "fed_avg", "mr_mtl_auto")


def write_figures(report: Reported, folder: Path) -> list[Path]:
    """Draws each variant's figures and writes them as SVG and PNG; figures without data are left out.

    Returns:
      The files, whose names are `<figure>.*` for the default variant and `<figure>_<variant>.*` for others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[VariantReport, Reported], Figure | None]] = {
        "privacy_utility": privacy_utility_figure,
        "privacy_overhead": privacy_overhead_figure,
        "lambda": lambda_figure,
        "budgets": budgets_figure,
    }
    written = []
    for variant in report.variants:
        for name, draw in drawings.items():
            stem = name if variant.variant.name == "default" else f"{name}_{variant.variant.name}"
            with svg.style(stem):
                figure = draw(variant, report)
                written += [_save(figure, folder / f"{stem}.{kind}") for kind in ("svg", "png") if figure]
    return written


def privacy_utility_figure(variant: VariantReport, report: Reported) -> Figure | None:
    """Draws the metric against epsilon, a line for each method, with published figures as stars (figure 1.3)."""
    return _against_epsilon(variant, report, tuple(METHODS), f"{report.title}\n{variant.variant.title}")


def privacy_overhead_figure(variant: VariantReport, report: Reported) -> Figure | None:
    """Draws the metric against epsilon for `OVERHEAD_METHODS` (figure 1.4); None if neither Ditto nor IFCA was run."""
    shown = {mean.method for mean in variant.means}
    if not shown & {"ditto", "ifca", "ifca_fed_avg"}:
        return None
    title = f"Privacy overhead\n{report.title}, {variant.variant.title}"
    return _against_epsilon(variant, report, OVERHEAD_METHODS, title)


def lambda_figure(variant: VariantReport, report: Reported) -> Figure | None:
    """Draws the metric against lambda, a panel for each budget (figure 1.5); None without a grid of lambda.

    Local training, FedAvg and MR-MTL with the automatic lambda are level lines.
    """
    budgets = _budgets(variant.grid)
    if not budgets:
        return None
    figure, panels = _panels(len(budgets))
    for axes, budget in zip(panels, budgets, strict=True):
        for name in METHODS:
            points = [mean for mean in variant.grid if (mean.method, mean.budget) == (name, budget)]
            points.sort(key=lambda mean: mean.prox_weight or 0.0)
            if points:
                _plot(axes, name, [mean.prox_weight or 0.0 for mean in points], points)
        for mean in variant.means:
            if mean.budget == budget and mean.method in _WITHOUT_LAMBDA:
                _draw_across(axes, mean)
        _scale_lambda(axes, sorted({mean.prox_weight or 0.0 for mean in variant.grid}))
        axes.set_title(budget_text(budget), fontsize=10)
        axes.set_xlabel("λ")
    panels[0].set_ylabel(f"test {metric_text(report.setting.measured).axis}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=5, title=f"{report.title}, {variant.variant.title}")
    return figure


def budgets_figure(variant: VariantReport, report: Reported) -> Figure | None:
    """Draws each method's metric under each of the named budgets, with published figures as stars.

    Returns None if budgets do not differ between silos.
    """
    means = [mean for mean in variant.means if isinstance(mean.budget, str)]
    budgets = _budgets(means)
    if not budgets:
        return None
    figure, panels = _panels(len(budgets))
    names = [name for name in METHODS if any(mean.method == name for mean in means)]
    for axes, budget in zip(panels, budgets, strict=True):
        for mean in means:
            if mean.budget == budget:
                colour, place = style_of(mean.method)["color"], names.index(mean.method)
                axes.errorbar(mean.mean, place, xerr=mean.deviation, fmt="o", color=colour, capsize=3)
                stated = variant.published.get((mean.method, budget))
                if stated is not None and report.is_paper_scale:
                    axes.plot(stated, place, "*", color=colour, markersize=13, zorder=5)
        axes.set_title(budget_text(budget), fontsize=10)
        axes.set_xlabel(f"test {metric_text(report.setting.measured).axis}")
    panels[0].set_yticks(range(len(names)), [METHODS[name].title for name in names])
    # The first method is at the top, as in the table.
    panels[0].invert_yaxis()
    figure.suptitle(f"{report.title}\n{variant.variant.title}", fontsize=10)
    return figure


def write_image_figures(report: Reported, output: Path) -> dict[str, list[Path]]:
    """Draws the synthetic images that runs have kept, a figure for each variant and budget, as SVG and PNG.

    Args:
      report: report whose variants and budgets are drawn.
      output: folder of the reproduction's results.

    Returns:
      The files by name of the variant.
    """
    written: dict[str, list[Path]] = {}
    for variant in report.variants:
        for budget in _budgets(variant.means):
            kept = images_file(output, variant.variant.name, budget)
            if not kept.exists():
                continue
            with svg.style(kept.stem), np.load(kept) as arrays:
                names = arrays["names"].tolist()
                x, y = ([arrays[f"{key}_{place}"] for place in range(len(names))] for key in "xy")
                low, high = arrays["value_range"].tolist()
                figure = svg.synthetic_images(x, y, names, (low, high))
                files = [_save(figure, kept.with_suffix(f".{kind}")) for kind in ("svg", "png")]
            written.setdefault(variant.variant.name, []).extend(files)
    return written


def _budgets(means: Sequence[Mean]) -> list[Budget]:
    return in_order(mean.budget for mean in means)


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(max(_WIDTH, _BESIDE * count), _HEIGHT), layout="constrained")
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def _against_epsilon(variant: VariantReport, report: Reported, methods: Sequence[str], title: str) -> Figure | None:
    drawn = [
        (epsilon, mean)
        for mean in variant.means
        if math.isfinite(epsilon := epsilon_of(mean.budget)) and mean.method in methods
    ]
    if not drawn:
        return None
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    for name in methods:
        points = sorted(((epsilon, mean) for epsilon, mean in drawn if mean.method == name), key=lambda point: point[0])
        if points:
            _plot(axes, name, *map(list, zip(*points, strict=True)))
    for mean in variant.means:
        if mean.is_at_every_epsilon and mean.method in methods:
            _draw_across(axes, mean)
    shown = {(mean.method, mean.budget) for _, mean in drawn}
    published = variant.published if report.is_paper_scale else {}
    stated = [(budget, value, name) for (name, budget), value in published.items() if (name, budget) in shown]
    for index, (epsilon, value, name) in enumerate(stated):
        label = None if index else "published"
        axes.plot(epsilon, value, "*", color=style_of(name)["color"], markersize=13, label=label, zorder=5)
    axes.set_xscale("log")
    ticks = sorted({epsilon for epsilon, _ in drawn})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"ε of every {report.setting.words.one}")
    axes.set_ylabel(f"test {metric_text(report.setting.measured).axis}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, title=title)
    return figure


def _scale_lambda(axes: Axes, lambdas: Sequence[float]) -> None:
    """Makes equal ratios equal distances; zero, for which there is no ratio, lies as far below the smallest."""
    smallest = next((value for value in lambdas if value > 0), 1.0)
    axes.set_xscale("symlog", linthresh=smallest, linscale=0.5)
    axes.set_xticks(lambdas, [f"{value:g}" for value in lambdas], rotation=60, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.0 if lambdas[0] == 0 else 0.7 * smallest, 1.4 * max(*lambdas, smallest))


def _plot(axes: Axes, name: str, places: Sequence[float], means: Sequence[Mean]) -> None:
    style = style_of(name)
    axes.plot(places, [mean.mean for mean in means], markersize=5, **style)
    if any(mean.deviation for mean in means):
        low, high = ([mean.mean + sign * (mean.deviation or 0.0) for mean in means] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _draw_across(axes: Axes, mean: Mean) -> None:
    """Draws a level line, for a figure that does not depend on the horizontal axis."""
    style = style_of(mean.method)
    axes.axhline(mean.mean, color=style["color"], linestyle=style["linestyle"], label=style["label"])
    if mean.deviation:
        low, high = mean.mean - mean.deviation, mean.mean + mean.deviation
        axes.axhspan(low, high, color=style["color"], alpha=0.12, linewidth=0)


def style_of(name: str) -> dict[str, Any]:
    """Returns a method's style, the same in every figure, whatever other methods are in it."""
    place = list(METHODS).index(name)
    # Where colours with lines begin again, markers differ.
    styles = len(COLOURS) * len(LINES)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[(place + place // styles) % len(MARKERS)],
        "linestyle": LINES[place % styles // len(COLOURS)],
        "label": METHODS[name].title,
    }


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as staging:
        # Without a date, the same results give the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(staging, format=path.suffix[1:], dpi=_DOTS_PER_INCH, metadata=metadata, facecolor="white")
    return path
