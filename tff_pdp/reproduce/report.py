"""Averages the results of a reproduction over seeds, and compares them with published figures.

A report is plain data, from which tables, figures and the command's JSON are made. Its Markdown has, for each variant,
a table, the best of the grid, the publication's statements, and the differences from the publication.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.privacy.facts import FIXED_SEED
from tff_pdp.reports.summary import metric_text
from tff_pdp.reports.words import MISSING, USERS, plain, spent
from tff_pdp.reproduce.budget import budget_text, to_entry
from tff_pdp.reproduce.comparisons import CONFIDENCE, Difference, differences_over_seeds
from tff_pdp.reproduce.jobs import Job, Reproduction
from tff_pdp.reproduce.means import Mean, best_of_grid, by_budget, cost, holds, means_over_seeds, measured_in
from tff_pdp.reproduce.methods import METHODS
from tff_pdp.reproduce.setting import Published, Setting, Statement, Variant, limit_text
from tff_pdp.reproduce.sweep import ResultStore, is_a_grid_job
from tff_pdp.reproduce.tables import markdown_table, traffic_lines


@dataclasses.dataclass(frozen=True)
class VariantReport:
    """The results of one variant.

    Attributes:
      variant: the variant.
      means: means over seeds.
      grid: means over seeds, for each lambda; empty if no grid was asked for.
      deviations: differences from the publication.
      published: published figures by method and budget.
      differences: mean differences of the setting's comparisons.
    """

    variant: Variant
    means: list[Mean]
    grid: list[Mean]
    deviations: list[str]
    published: Published
    differences: list[Difference]


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
                    **({"bands": self.verdicts_on_bands(one)} if self.setting.bands else {}),
                    **({"differences": list(map(_plain, one.differences))} if self.setting.comparisons else {}),
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

    def verdicts_on_bands(self, variant: VariantReport) -> list[dict[str, Any]]:
        """Checks this project's expectations of a variant; leaves out an expectation unless its methods were run.

        Returns:
          For each expectation its `text`, the `measured` mean or difference as text and as a `value`, and whether the
          expectation `holds`.
        """
        bands = [band for band in self.setting.bands if band.variant == variant.variant.name]
        found = [(band, measured_in(band, variant.means)) for band in bands]
        return [
            {
                "text": band.text(self.setting.measured),
                "measured": limit_text(value, self.setting.measured, is_difference=band.minus is not None, digits=4),
                "value": value,
                "holds": band.at_least <= value <= band.at_most,
            }
            for band, value in found
            if value is not None
        ]


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
                differences=differences_over_seeds(plain, setting.comparisons),
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


def _plain(one: Difference) -> dict[str, Any]:
    compared = {"method": one.comparison.method, "minus": one.comparison.minus, **to_entry(one.budget)}
    interval = {} if one.margin is None else {"interval": [one.mean - one.margin, one.mean + one.margin]}
    return {**compared, "mean": one.mean, **interval, "seeds": one.seeds, "is_finding": one.is_finding}


def _without_none(mean: Mean) -> dict[str, Any]:
    content = {name: value for name, value in dataclasses.asdict(mean).items() if value is not None}
    content = {"method": mean.method, **to_entry(content.pop("budget")), **content}
    return {**content, "claim": "none", "claim_reason": FIXED_SEED, "epsilon_spent": None}


_OF_USERS = (
    "Worst decile: mean over the tenth of the users that are served worst. Noise to signal: expected length of the "
    "noise on a round's mean, divided by the largest possible length of the mean."
)
_WEIGHTS = {"examples": "weighted by numbers of test examples", "clients": "each with the same weight"}
_VERDICTS = {True: "holds", False: "does not hold"}


def report_text(report: Reported, images: Mapping[str, Sequence[str]] = MappingProxyType({})) -> str:
    """Writes the whole report as Markdown; `images` has files of synthetic images, by name of the variant."""
    metric, paper = report.setting.measured, report.setting.paper
    lines = [
        f"# {report.title}",
        "",
        f"Test {metric_text(metric).axis}: mean ± sample standard deviation over seeds. A seed's value is the mean "
        f"over {report.setting.words.many}, {_WEIGHTS[report.setting.averages]}. Seeds are test-only ones: these "
        "figures are not private (claim: none, and no ε). For each training, the table has the ε that this project's "
        "accountants find for the same training with a secret key.",
    ]
    for paragraph in report.setting.explanation:
        lines += ["", paragraph]
    if report.setting.words == USERS:
        lines += ["", _OF_USERS]
    for variant in report.variants:
        lines += ["", f"## {variant.variant.title} (`{variant.variant.name}`)", ""]
        lines += _means_table(variant.means, report, variant.published)
        lines += _not_comparable_lines(report.setting)
        same = dict.fromkeys(METHODS[mean.method].title for mean in variant.means if mean.is_at_every_epsilon)
        for title in same:
            lines += ["", f"{title}: nothing leaves a user; the row holds for every ε."]
        if variant.grid:
            best = best_of_grid(variant.grid, metric)
            precedent = f" as in {paper}" if paper else ""
            lines += ["", f"Best λ of the grid, chosen on the test examples{precedent}: the figures are too good."]
            lines += ["", *_means_table(best, report, {})]
        lines += _difference_lines(variant.differences, metric)
        verdicts = [f"* {_VERDICTS[verdict]}: {one.text}" for one, verdict in report.verdicts(variant)]
        if verdicts:
            lines += ["", f"Statements of {paper}, at its scale and with its hyper-parameters:", "", *verdicts]
        if bands := report.verdicts_on_bands(variant):
            lines += ["", "Expected here:", "", *map(_band_line, bands)]
        for place in images.get(variant.variant.name, ()):
            lines += ["", f"![Synthetic images of seed 0, a row for each silo]({place})"]
        if report.setting.traffic_baseline:
            lines += traffic_lines(variant.means, report.setting.traffic_baseline)
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


def _not_comparable_lines(setting: Setting) -> list[str]:
    shown = setting.not_comparable
    return [] if shown is None else ["", f"{shown.heading}:", "", *[f"* {reason}" for reason in shown.reasons]]


def _difference_lines(differences: Sequence[Difference], metric: Metric) -> list[str]:
    """Writes differences between methods with their confidence intervals, and which of them are findings."""
    if not differences:
        return []
    rows = [["difference", "ε or budgets", "mean", f"{100 * CONFIDENCE:.0f} % interval", "seeds", "finding"]]
    for one in differences:
        interval = MISSING
        if one.margin is not None:
            ends = [limit_text(one.mean + sign * one.margin, metric, is_difference=True) for sign in (-1, 1)]
            interval = " to ".join(ends)
        mean = limit_text(one.mean, metric, is_difference=True)
        finding = "yes" if one.is_finding else "no"
        rows.append([one.comparison.text, budget_text(one.budget), mean, interval, str(one.seeds), finding])
    return [
        "",
        f"Differences between two methods, seed by seed, with the {100 * CONFIDENCE:.0f} % interval of Student's t for "
        "their mean. A difference whose interval contains zero is within the spread of the seeds, and no finding:",
        "",
        *markdown_table(rows),
    ]


def _band_line(band: Mapping[str, Any]) -> str:
    return f"* {_VERDICTS[band['holds']]}: {band['text']}; measured: {band['measured']}"


def _means_table(means: Sequence[Mean], report: Reported, paper: Published) -> list[str]:
    """Writes rows by budget, then by method, with published figures if any, compared only at their scale."""
    metric = report.setting.measured
    with_lambda = any(mean.prox_weight is not None for mean in means)
    with_paper = any((mean.method, mean.budget) in paper for mean in means)
    of_users = report.setting.words == USERS
    of_rankings = any(mean.prevalence is not None for mean in means)
    with_shared = report.setting.shows_shared_model
    beside = report.setting.not_comparable
    columns = {
        _budget_heading(means): True,
        "method": True,
        "λ": with_lambda,
        "shared model": with_shared,
        "personal models" if with_shared else metric_text(metric).label: True,
        "of all together": of_rankings,
        "prevalence": of_rankings,
        "worst decile": of_users,
        "seeds": True,
        "ε with a secret key": True,
        "noise to signal": of_users,
        "paper" if report.is_paper_scale else "paper, at its scale": with_paper,
        "difference": with_paper and report.is_paper_scale,
        beside.heading if beside else "beside": beside is not None,
    }
    rows = []
    for mean in by_budget(means):
        stated = paper.get((mean.method, mean.budget))
        rows.append(
            [
                mean.budget if isinstance(mean.budget, str) else plain(mean.budget),
                METHODS[mean.method].title,
                MISSING if mean.prox_weight is None else f"{mean.prox_weight:g}",
                MISSING if mean.shared is None else _with_deviation(mean.shared, mean.shared_deviation, metric),
                _with_deviation(mean.mean, mean.deviation, metric),
                MISSING if mean.pooled is None else value_text(mean.pooled, metric),
                MISSING if mean.prevalence is None else value_text(mean.prevalence, metric),
                value_text(mean.worst_decile, metric),
                str(mean.seeds),
                spent(cost(mean.with_secret_key)),
                plain(mean.noise_to_signal),
                MISSING if stated is None else value_text(stated, metric),
                MISSING if stated is None else f"{mean.mean - stated:+.5f}",
                value_text(beside.values[mean.method], metric) if beside and mean.method in beside.values else MISSING,
            ]
        )
    return markdown_table([list(columns), *rows], list(columns.values()))


def _with_deviation(value: float, deviation: float | None, metric: Metric) -> str:
    return value_text(value, metric) + ("" if deviation is None else f" ± {value_text(deviation, metric)}")


def _budget_heading(means: Sequence[Mean]) -> str:
    named = {isinstance(mean.budget, str) for mean in means}
    return "ε or budgets" if len(named) == 2 else "budgets" if True in named else "ε"
