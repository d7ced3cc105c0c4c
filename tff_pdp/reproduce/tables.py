"""The results as Markdown: a table a variant, the best of the grid, what the thesis says, and what is unlike it."""

from collections.abc import Mapping, Sequence

from tff_pdp.models.metrics import Metric
from tff_pdp.reports.metric_texts import metric_text
from tff_pdp.reports.numbers import MISSING, plain
from tff_pdp.reproduce.means import Mean, best_of_grid, holds
from tff_pdp.reproduce.methods import METHODS
from tff_pdp.reproduce.report import Reported
from tff_pdp.reproduce.setting import Statement

_VERDICTS = {True: "holds", False: "does not hold", None: "not run"}


def report_text(report: Reported) -> str:
    """The whole report as Markdown."""
    metric = report.metric
    lines = [
        f"# {report.title}",
        "",
        f"Test {metric_text(metric).axis}: mean ± sample standard deviation over seeds. Each seed's is the mean over "
        "silos, weighted by their numbers of test examples. Seeds are test-only ones: these figures are not private.",
    ]
    for variant in report.variants:
        lines += ["", f"## {variant.title} (`{variant.name}`)", "", *_means_table(variant.means, metric, report.paper)]
        if variant.grid:
            best = best_of_grid(variant.grid, metric)
            lines += ["", "Best λ of the grid, chosen on the test examples as the thesis does it: too good."]
            lines += ["", *_means_table(best, metric, {})]
        verdicts = _verdicts(report.statements, variant.means, metric)
        if verdicts:
            lines += ["", "What the thesis says, of its scale and with its hyper-parameters:", "", *verdicts]
        lines += ["", "Unlike the thesis:", "", *[f"* {deviation}" for deviation in variant.deviations]]
    if report.infeasible:
        lines += ["", "## Not feasible", "", *[f"* {job}: {reason}" for job, reason in report.infeasible]]
    if report.failures:
        lines += ["", "## Failed", "", *[f"* {job}: {reason}" for job, reason in report.failures]]
    return "\n".join(lines) + "\n"


def value_text(value: float, metric: Metric) -> str:
    """A figure with as many digits as seeds can tell apart.

    >>> from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
    >>> value_text(0.0239412, MEAN_SQUARED_ERROR), value_text(0.8125, ACCURACY)
    ('0.02394', '81.25 %')
    """
    return f"{100 * value:.2f} %" if metric.higher_is_better else f"{value:.5f}"


def _means_table(means: Sequence[Mean], metric: Metric, paper: Mapping[tuple[str, float], float]) -> list[str]:
    """Rows by epsilon, then by method; the thesis's columns only where there is a figure to compare with."""
    with_lambda = any(mean.prox_weight is not None for mean in means)
    with_paper = any((mean.method, mean.epsilon) in paper for mean in means)
    headings = ["ε", "method", "λ", metric_text(metric).label, "seeds", "ε by our accountants", "paper", "difference"]
    shown = [True, True, with_lambda, True, True, True, with_paper, with_paper]
    rows = []
    for mean in sorted(means, key=lambda mean: mean.epsilon):
        deviation = "" if mean.deviation is None else f" ± {value_text(mean.deviation, metric)}"
        stated = paper.get((mean.method, mean.epsilon))
        rows.append(
            [
                plain(mean.epsilon),
                METHODS[mean.method].title,
                MISSING if mean.prox_weight is None else f"{mean.prox_weight:g}",
                f"{value_text(mean.mean, metric)}{deviation}",
                str(mean.seeds),
                plain(mean.epsilon_spent),
                MISSING if stated is None else value_text(stated, metric),
                MISSING if stated is None else f"{mean.mean - stated:+.5f}",
            ]
        )
    return _markdown([headings, *rows], shown)


def _markdown(rows: Sequence[Sequence[str]], shown: Sequence[bool]) -> list[str]:
    """A Markdown table, aligned so that it can be read as text."""
    kept = [[cell for cell, wanted in zip(row, shown, strict=True) if wanted] for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in kept
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]


def _verdicts(statements: Sequence[Statement], means: Sequence[Mean], metric: Metric) -> list[str]:
    found = [(statement, holds(statement, means, metric)) for statement in statements]
    return [f"* {_VERDICTS[verdict]}: {statement.text}" for statement, verdict in found if verdict is not None]
