"""What a reproduction has to show, as plain data: what tables, figures and the command's JSON are made of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tff_pdp.models.metrics import Metric
from tff_pdp.reports.client_words import ClientWords
from tff_pdp.reproduce.jobs import Reproduction
from tff_pdp.reproduce.means import Mean, holds, means_over_seeds
from tff_pdp.reproduce.results import ResultStore, is_a_grid_job
from tff_pdp.reproduce.setting import Published, Statement
from tff_pdp.reproduce.settings import deviations
from tff_pdp.reproduce.sweep import Failure


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
                deviations=tuple(deviations(setting, scale, variant, reproduction.data_input)),
                published=setting.paper_values if variant.paper_values is None else variant.paper_values,
            )
        )
    return Reported(
        title=f"{setting.title} ({reproduction.scale_name} scale)",
        metric=setting.metric,
        variants=tuple(variants),
        statements=setting.statements,
        paper=setting.paper,
        is_paper_scale=not scale.deviation,
        clients=setting.clients,
        infeasible=tuple(
            (str(job), outcome.infeasible) for job, outcome in store.outcomes.items() if outcome.infeasible
        ),
        failures=tuple((str(failure.job), failure.reason) for failure in failures),
    )


def _without_none(mean: Mean) -> dict[str, Any]:
    content = {name: value for name, value in dataclasses.asdict(mean).items() if value is not None}
    # JSON has no infinity.
    return {name: "inf" if value == float("inf") else value for name, value in content.items()}
