"""Puts the results of a reproduction together over seeds, and holds them against what was published.

They are plain data, which tables, figures and the command's JSON are made of. As Markdown they are a table for each
variant, the best of the grid, what was published, and what is unlike it.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import FIXED_SEED
from tff_pdp.reports.summary import metric_text
from tff_pdp.reports.words import MISSING, USERS, ClientWords, plain, spent
from tff_pdp.reproduce.jobs import Reproduction
from tff_pdp.reproduce.setting import METHODS, Published, Statement
from tff_pdp.reproduce.sweep import Failure, ResultStore, is_a_grid_job


@dataclasses.dataclass(frozen=True)
class Mean:
    """The figure of one method at one epsilon, over seeds.

    Attributes:
      method: a name in `METHODS`.
      epsilon: of every silo, or of all users.
      prox_weight: lambda, for a point of the grid.
      mean: over seeds.
      deviation: sample standard deviation over seeds; None of one seed.
      seeds: how many.
      with_secret_key: of the seed that costs most, the claim of the same training with a secret key, see `result_row`.
      worst_decile: mean over seeds of what the tenth of the clients gets that is served worst.
      pooled: mean over seeds of the figure of all clients' test examples together; None where it is no other.
      prevalence: mean over seeds of the share of positive test examples; None where that says nothing.
      noise_to_signal: of users' noised means, as `UserPlan.noise_to_signal`; None where clients are silos.
      is_at_every_epsilon: whether it was run once for all of them.
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
    """One mean for each method, epsilon and, of a grid, lambda, in the order of their first rows."""
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
    """None where rows do not have it: figures of all clients together are those of rankings alone."""
    return statistics.fmean(row[name] for row in rows) if name in rows[0] else None


def best_of_grid(means: Sequence[Mean], metric: Metric) -> list[Mean]:
    """For each method and epsilon of a grid the best lambda: chosen on test examples, as is published."""
    best: dict[tuple[str, float], Mean] = {}
    for mean in means:
        key = (mean.method, mean.epsilon)
        if key not in best or is_better(mean.mean, best[key].mean, metric):
            best[key] = mean
    return list(best.values())


def is_better(one: float, other: float, metric: Metric) -> bool:
    """Whether one value of a metric is better than another."""
    return one > other if metric.higher_is_better else one < other


def holds(statement: Statement, means: Sequence[Mean], metric: Metric) -> bool | None:
    """Whether what is said of two methods holds here; None where not both were run at its epsilon."""
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
    """One variant's figures.

    Attributes:
      name: of the variant.
      title: for a reader.
      means: over seeds.
      grid: over seeds, for each lambda; empty where no grid was asked for.
      deviations: what is unlike the publication.
      published: figures by method and epsilon.
    """

    name: str
    title: str
    means: tuple[Mean, ...]
    grid: tuple[Mean, ...]
    deviations: tuple[str, ...]
    published: Published = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Reported:
    """All figures of a reproduction.

    Attributes:
      title: of the data set and the scale.
      metric: what was measured.
      variants: in the order they were run.
      statements: what the publication says.
      paper: what texts call the publication; empty for an experiment of our own.
      is_paper_scale: whether the scale is that of the published figures.
      clients: whose privacy is protected.
      infeasible: jobs whose budget allows no run, and why.
      failures: jobs that failed, and why.
    """

    title: str
    metric: Metric
    variants: tuple[VariantReport, ...]
    statements: tuple[Statement, ...]
    paper: str
    is_paper_scale: bool
    clients: ClientWords
    infeasible: tuple[tuple[str, str], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        return {
            "title": self.title,
            "metric": self.metric.name,
            "variants": {
                variant.name: {
                    "means": [_without_none(mean) for mean in variant.means],
                    "grid": [_without_none(mean) for mean in variant.grid],
                    "statements": {
                        statement.text: verdict
                        for statement in self.statements
                        if (verdict := holds(statement, variant.means, self.metric)) is not None
                    },
                    "deviations": list(variant.deviations),
                }
                for variant in self.variants
            },
            "infeasible": dict(self.infeasible),
            "failures": dict(self.failures),
        }


def build_report(reproduction: Reproduction, store: ResultStore, failures: Sequence[Failure]) -> Reported:
    """Puts a sweep's outcomes together."""
    setting, scale = reproduction.setting, reproduction.scale
    variants = []
    for name in reproduction.variant_names:
        variant = reproduction.variant(name)
        plain = store.rows(lambda job, name=name: job.variant == name and not is_a_grid_job(job))
        grid = store.rows(lambda job, name=name: job.variant == name and is_a_grid_job(job))
        variants.append(
            VariantReport(
                name=name,
                title=variant.title,
                means=tuple(means_over_seeds(plain, is_at_every_epsilon=setting.is_same_at_every_epsilon)),
                grid=tuple(means_over_seeds(grid, is_grid=True)),
                deviations=tuple(setting.deviations_of(scale, variant, reproduction.data_input)),
                published=setting.published(variant),
            )
        )
    return Reported(
        title=f"{setting.title} ({reproduction.scale_name} scale)",
        metric=setting.measured,
        variants=tuple(variants),
        statements=setting.statements,
        paper=setting.paper,
        is_paper_scale=not scale.deviation,
        clients=setting.words,
        infeasible=tuple(
            (str(job), outcome.infeasible) for job, outcome in store.outcomes.items() if outcome.infeasible
        ),
        failures=tuple((str(failure.job), failure.reason) for failure in failures),
    )


def _without_none(mean: Mean) -> dict[str, Any]:
    content = {name: value for name, value in dataclasses.asdict(mean).items() if value is not None}
    # JSON has no infinity.
    content = {name: "inf" if value == float("inf") else value for name, value in content.items()}
    return {**content, "claim": "none", "claim_reason": FIXED_SEED, "epsilon_spent": None}


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
        "are not private (claim: none, and no ε). Of each training, the table has the ε that this project's "
        "accountants find for the same with a secret key.",
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
