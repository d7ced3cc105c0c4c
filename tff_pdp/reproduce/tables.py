"""The results as Markdown: a table a variant, the best of the grid, what was published, and what is unlike it."""

from collections.abc import Sequence

from tff_pdp.models.metrics import Metric
from tff_pdp.reports.client_words import USERS
from tff_pdp.reports.metric_texts import metric_text
from tff_pdp.reports.words import MISSING, plain
from tff_pdp.reproduce.means import Mean, best_of_grid, holds
from tff_pdp.reproduce.methods import METHODS
from tff_pdp.reproduce.report import Reported
from tff_pdp.reproduce.setting import Published, Statement

_OF_USERS = (
    "Worst decile: mean over the tenth of the users that are served worst. Noise to signal: expected length of the "
    "noise on a round's mean over the longest mean there can be."
)
_VERDICTS = {True: "holds", False: "does not hold", None: "not run"}


def report_text(report: Reported) -> str:
    """The whole report as Markdown."""
    metric = report.metric
    lines = [
        f"# {report.title}",
        "",
        f"Test {metric_text(metric).axis}: mean ± sample standard deviation over seeds. Each seed's is the mean over "
        f"{report.clients.many}, weighted by their numbers of test examples. Seeds are test-only ones: these figures "
        "are not private.",
    ]
    if report.clients == USERS:
        lines += ["", _OF_USERS]
    for variant in report.variants:
        lines += ["", f"## {variant.title} (`{variant.name}`)", ""]
        lines += _means_table(variant.means, report, variant.published)
        lines += _at_every_epsilon(variant.means)
        if variant.grid:
            best = best_of_grid(variant.grid, metric)
            precedent = f" as {report.paper} does it" if report.paper else ""
            lines += ["", f"Best λ of the grid, chosen on the test examples{precedent}: too good."]
            lines += ["", *_means_table(best, report, {})]
        verdicts = _verdicts(report.statements, variant.means, metric)
        if verdicts:
            lines += ["", f"What {report.paper} says, of its scale and with its hyper-parameters:", "", *verdicts]
        heading = f"Unlike {report.paper}:" if report.paper else "To know when reading this:"
        lines += ["", heading, "", *[f"* {deviation}" for deviation in variant.deviations]]
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


def _means_table(means: Sequence[Mean], report: Reported, paper: Published) -> list[str]:
    """Rows by epsilon, then by method; published figures only where there is one, and compared only at their scale."""
    metric = report.metric
    with_lambda = any(mean.prox_weight is not None for mean in means)
    with_paper = any((mean.method, mean.epsilon) in paper for mean in means)
    of_users = report.clients == USERS
    of_rankings = any(mean.prevalence is not None for mean in means)
    columns = {
        "ε": True,
        "method": True,
        "λ": with_lambda,
        metric_text(metric).label: True,
        "of all together": of_rankings,
        "prevalence": of_rankings,
        "worst decile": of_users,
        "seeds": True,
        "ε by our accountants": True,
        "noise to signal": of_users,
        "paper" if report.is_paper_scale else "paper, at its scale": with_paper,
        "difference": with_paper and report.is_paper_scale,
    }
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
                MISSING if mean.pooled is None else value_text(mean.pooled, metric),
                MISSING if mean.prevalence is None else value_text(mean.prevalence, metric),
                value_text(mean.worst_decile, metric),
                str(mean.seeds),
                plain(mean.epsilon_spent),
                plain(mean.noise_to_signal),
                MISSING if stated is None else value_text(stated, metric),
                MISSING if stated is None else f"{mean.mean - stated:+.5f}",
            ]
        )
    return _markdown([list(columns), *rows], list(columns.values()))


def _at_every_epsilon(means: Sequence[Mean]) -> list[str]:
    methods = dict.fromkeys(METHODS[mean.method].title for mean in means if mean.is_at_every_epsilon)
    return [
        line for method in methods for line in ("", f"{method}: nothing leaves a user; the row is that of every ε.")
    ]


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
