"""Averages the results of a reproduction over seeds, and compares them with published figures.

A report is plain data, from which tables, figures and the command's JSON are made. Its Markdown has, for each variant,
a table, the best of the grid, the publication's statements, and the differences from the publication.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import FIXED_SEED
from tff_pdp.reports.summary import metric_text
from tff_pdp.reports.words import MISSING, USERS, plain, spent
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.setting import METHODS, Published, Setting, Statement, Variant
from tff_pdp.reproduce.sweep import ResultStore, is_a_grid_job


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean over seeds of one method's test metric at one epsilon.

    Attributes:
      method: a name in `METHODS`.
      epsilon: epsilon of every silo, or of all users.
      prox_weight: lambda, for a point of the grid; None otherwise.
      mean: mean of the test metric over seeds.
      deviation: sample standard deviation over seeds; None for one seed.
      seeds: number of seeds.
      with_secret_key: claim and epsilon that the training would have with a secret key, as in `result_row`; taken from
        the seed with the largest epsilon.
      worst_decile: mean over seeds of the mean test metric of the worst tenth of the clients.
      pooled: mean over seeds of the metric of all clients' test examples together; None without a ranking metric.
      prevalence: mean over seeds of the share of positive test examples; None without a ranking metric.
      noise_to_signal: result of `UserPlan.noise_to_signal` on users' noised means; None for silos.
      is_at_every_epsilon: whether the result is the same at every epsilon, so that one run was made for all.
    """

    method: str
    epsilon: float
    prox_weight: float | None
    mean: float
    deviation: float | None
    seeds: int
    with_secret_key: Mapping[str, Any]
    worst_decile: float
    pooled: float | None = None
    prevalence: float | None = None
    noise_to_signal: float | None = None
    is_at_every_epsilon: bool = False


def means_over_seeds(
    rows: Iterable[Mapping[str, Any]],
    *,
    is_grid: bool = False,
    is_at_every_epsilon: Callable[[str], bool] = lambda method: False,
) -> list[Mean]:
    """Computes a `Mean` for each method and epsilon (in a grid, also each lambda), in the order of their first rows."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["method"], float(row["epsilon"]), row["prox_weight"] if is_grid else None)
        groups.setdefault(key, []).append(row)
    return [
        Mean(
            *key,
            mean=statistics.fmean(row["value"] for row in group),
            deviation=statistics.stdev(row["value"] for row in group) if len(group) > 1 else None,
            seeds=len(group),
            with_secret_key=max((row["with_secret_key"] for row in group), key=_cost),
            worst_decile=statistics.fmean(row["worst_decile"] for row in group),
            pooled=_mean_of("pooled_average_precision", group),
            prevalence=_mean_of("prevalence", group),
            noise_to_signal=group[0].get("noise_to_signal"),
            is_at_every_epsilon=is_at_every_epsilon(key[0]),
        )
        for key, group in groups.items()
    ]


def _cost(claimed: Mapping[str, Any]) -> float:
    return math.inf if claimed["epsilon"] is None else claimed["epsilon"]


def _mean_of(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean of a field over rows; None if rows lack the field, which only rankings may have."""
    return statistics.fmean(row[name] for row in rows) if name in rows[0] else None


def best_of_grid(means: Sequence[Mean], metric: Metric) -> list[Mean]:
    """Finds the best lambda for each method and epsilon of a grid, by the test metric, as the publication does."""
    best: dict[tuple[str, float], Mean] = {}
    for mean in means:
        key = (mean.method, mean.epsilon)
        if key not in best or is_better(mean.mean, best[key].mean, metric):
            best[key] = mean
    return list(best.values())


def is_better(one: float, other: float, metric: Metric) -> bool:
    """Checks if one value of a metric is better than another."""
    return one > other if metric.higher_is_better else one < other


def holds(statement: Statement, means: Sequence[Mean], metric: Metric) -> bool | None:
    """Checks if a statement on two methods holds for these means; None if there are no two means to compare."""
    values: dict[Any, float] = {(mean.method, mean.epsilon): mean.mean for mean in means}
    values |= {mean.method: mean.mean for mean in means if mean.is_at_every_epsilon}
    epsilons = {mean.epsilon for mean in means} if statement.epsilon is None else {statement.epsilon}
    pairs = [
        [values.get((method, epsilon), values.get(method)) for method in (statement.better, statement.worse)]
        for epsilon in epsilons
    ]
    compared = [is_better(one, other, metric) for one, other in pairs if one is not None and other is not None]
    return all(compared) if compared else None


@dataclasses.dataclass(frozen=True)
class VariantReport:
    """The results of one variant.

    Attributes:
      variant: the variant.
      means: means over seeds.
      grid: means over seeds, for each lambda; empty if no grid was asked for.
      deviations: differences from the publication.
      published: published figures by method and epsilon.
    """

    variant: Variant
    means: list[Mean]
    grid: list[Mean]
    deviations: list[str]
    published: Published


@dataclasses.dataclass(frozen=True)
class Reported:
    """All results of a reproduction.

    Attributes:
      setting: setting of the reproduction.
      title: title of the data set and the scale.
      variants: reports of the variants, in the order in which they were run.
      is_paper_scale: whether the scale is the scale of the published figures.
      infeasible: reason why the budget of a job allows no run, by job.
      failures: reason why a job failed, by job.
    """

    setting: Setting
    title: str
    variants: list[VariantReport]
    is_paper_scale: bool
    infeasible: dict[str, str]
    failures: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for `--json`."""
        return {
            "title": self.title,
            "metric": self.setting.metric,
            "variants": {
                one.variant.name: {
                    "means": [_without_none(mean) for mean in one.means],
                    "grid": [_without_none(mean) for mean in one.grid],
                    "statements": {statement.text: verdict for statement, verdict in self.verdicts(one)},
                    "deviations": one.deviations,
                }
                for one in self.variants
            },
            "infeasible": self.infeasible,
            "failures": self.failures,
        }

    def verdicts(self, variant: VariantReport) -> list[tuple[Statement, bool]]:
        """Checks the publication's statements; leaves out a statement unless both compared methods were run."""
        found = [(one, holds(one, variant.means, self.setting.measured)) for one in self.setting.statements]
        return [(one, verdict) for one, verdict in found if verdict is not None]


def build_report(reproduction: Reproduction, store: ResultStore, failures: Mapping[Job, str]) -> Reported:
    """Builds the report of a sweep's outcomes."""
    setting, scale = reproduction.setting, reproduction.scale
    variants = []
    for name in reproduction.variant_names:
        variant = reproduction.variant(name)
        plain = store.rows(lambda job, name=name: job.variant == name and not is_a_grid_job(job))
        grid = store.rows(lambda job, name=name: job.variant == name and is_a_grid_job(job))
        variants.append(
            VariantReport(
                variant=variant,
                means=means_over_seeds(plain, is_at_every_epsilon=setting.is_same_at_every_epsilon),
                grid=means_over_seeds(grid, is_grid=True),
                deviations=setting.deviations_of(scale, variant, reproduction.data_input),
                published=setting.published(variant),
            )
        )
    return Reported(
        setting=setting,
        title=f"{setting.title} ({reproduction.scale_name} scale)",
        variants=variants,
        is_paper_scale=not scale.deviation,
        infeasible={str(job): one.infeasible for job, one in store.outcomes.items() if one.infeasible},
        failures={str(job): reason for job, reason in failures.items()},
    )


def _without_none(mean: Mean) -> dict[str, Any]:
    content = {name: value for name, value in dataclasses.asdict(mean).items() if value is not None}
    # JSON has no infinity.
    content = {name: "inf" if value == float("inf") else value for name, value in content.items()}
    return {**content, "claim": "none", "claim_reason": FIXED_SEED, "epsilon_spent": None}


_OF_USERS = (
    "Worst decile: mean over the tenth of the users that are served worst. Noise to signal: expected length of the "
    "noise on a round's mean, divided by the largest possible length of the mean."
)
_VERDICTS = {True: "holds", False: "does not hold"}


def report_text(report: Reported) -> str:
    """Writes the whole report as Markdown."""
    metric, paper = report.setting.measured, report.setting.paper
    lines = [
        f"# {report.title}",
        "",
        f"Test {metric_text(metric).axis}: mean ± sample standard deviation over seeds. A seed's value is the mean "
        f"over {report.setting.words.many}, weighted by numbers of test examples. Seeds are test-only ones: these "
        "figures are not private (claim: none, and no ε). For each training, the table has the ε that this project's "
        "accountants find for the same training with a secret key.",
    ]
    if report.setting.words == USERS:
        lines += ["", _OF_USERS]
    for variant in report.variants:
        lines += ["", f"## {variant.variant.title} (`{variant.variant.name}`)", ""]
        lines += _means_table(variant.means, report, variant.published)
        same = dict.fromkeys(METHODS[mean.method].title for mean in variant.means if mean.is_at_every_epsilon)
        for title in same:
            lines += ["", f"{title}: nothing leaves a user; the row holds for every ε."]
        if variant.grid:
            best = best_of_grid(variant.grid, metric)
            precedent = f" as in {paper}" if paper else ""
            lines += ["", f"Best λ of the grid, chosen on the test examples{precedent}: the figures are too good."]
            lines += ["", *_means_table(best, report, {})]
        verdicts = [f"* {_VERDICTS[verdict]}: {one.text}" for one, verdict in report.verdicts(variant)]
        if verdicts:
            lines += ["", f"Statements of {paper}, at its scale and with its hyper-parameters:", "", *verdicts]
        heading = f"Unlike {paper}:" if paper else "To know when reading this:"
        lines += ["", heading, "", *[f"* {deviation}" for deviation in variant.deviations]]
    if report.infeasible:
        lines += ["", "## Not feasible", "", *[f"* {job}: {reason}" for job, reason in report.infeasible.items()]]
    if report.failures:
        lines += ["", "## Failed", "", *[f"* {job}: {reason}" for job, reason in report.failures.items()]]
    return "\n".join(lines) + "\n"


def value_text(value: float, metric: Metric) -> str:
    """Writes a metric's value with enough digits to show differences between seeds.

    >>> from tff_pdp.models.metrics import ACCURACY, MEAN_SQUARED_ERROR
    >>> value_text(0.0239412, MEAN_SQUARED_ERROR), value_text(0.8125, ACCURACY)
    ('0.02394', '81.25 %')
    """
    return f"{100 * value:.2f} %" if metric.higher_is_better else f"{value:.5f}"


def _means_table(means: Sequence[Mean], report: Reported, paper: Published) -> list[str]:
    """Writes rows by epsilon, then by method, with published figures if any, compared only at their scale."""
    metric = report.setting.measured
    with_lambda = any(mean.prox_weight is not None for mean in means)
    with_paper = any((mean.method, mean.epsilon) in paper for mean in means)
    of_users = report.setting.words == USERS
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
        "ε with a secret key": True,
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
                spent(_cost(mean.with_secret_key)),
                plain(mean.noise_to_signal),
                MISSING if stated is None else value_text(stated, metric),
                MISSING if stated is None else f"{mean.mean - stated:+.5f}",
            ]
        )
    return _markdown([list(columns), *rows], list(columns.values()))


def _markdown(rows: Sequence[Sequence[str]], shown: Sequence[bool]) -> list[str]:
    """Writes a Markdown table, aligned so that it can be read as text."""
    kept = [[cell for cell, wanted in zip(row, shown, strict=True) if wanted] for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in kept
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]
