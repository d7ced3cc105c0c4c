"""Describes published experiments: their data, methods, variants and scales, and the published figures.

Each experiment is a file in `tff_pdp/configs/reproduce/published`. The experiment's runs vary the configuration of the
same name in `tff_pdp/configs/reproduce`. Each method is a row of the results.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tff_pdp.errors import ConfigError
from tff_pdp.models.metrics import ACCURACY, AVERAGE_PRECISION, MEAN_SQUARED_ERROR, Metric
from tff_pdp.reports.words import SILOS, USERS, ClientWords
from tff_pdp.reproduce.budget import Budget, budget_text
from tff_pdp.reproduce.comparisons import Comparison
from tff_pdp.reproduce.inputs import INPUTS
from tff_pdp.reproduce.methods import METHODS, RELEASE_NOTHING, SILO_METHODS
from tff_pdp.settings import CONFIGS, Count, Name, Settings, did_you_mean, read_settings, read_yaml

PUBLISHED = CONFIGS / "reproduce" / "published"
NAMES = tuple(sorted(path.stem for path in PUBLISHED.glob("*.yaml")))
_METRICS = {metric.name: metric for metric in (ACCURACY, MEAN_SQUARED_ERROR, AVERAGE_PRECISION)}
_CLIENTS = {"silos": SILOS, "users": USERS}

# Values of an experiment by dotted key, as `tff_pdp.experiment.config.load_experiment` takes them.
Overrides = dict[str, Any]
# A test metric by method and budget, and as files have it: by method, then by epsilon or by name of budgets.
Published = Mapping[tuple[str, Budget], float]
PublishedByMethod = dict[str, dict[str, float]]


class Variant(Settings):
    """One way to run a setting; results are in `results.json` for the default, else in `results_<name>.json`.

    Attributes:
      name: `default`, or the name in the variant's files.
      title: title for readers.
      is_paper: whether the variant is run only with `--paper`; other variants are run only without `--paper`.
      is_optional: whether the variant is run only when it is asked for by name.
      overrides: values that replace the configuration's, by dotted key.
      algorithm_settings: settings that replace those of the configuration's methods, by name of the method.
      rounds: number of rounds in the publication, by epsilon; used by scales with `takes_rounds`.
      paper_values: published figures that replace the setting's; None for the setting's.
      deviations: differences from the publication that not every variant has: sentences, or names in the setting's
        `deviations`.
    """

    name: Name
    title: Name
    is_paper: bool = False
    is_optional: bool = False
    overrides: Overrides = msgspec.field(default_factory=dict)
    algorithm_settings: dict[str, Overrides] = msgspec.field(default_factory=dict)
    rounds: dict[str, Count] = msgspec.field(default_factory=dict)
    paper_values: PublishedByMethod | None = None
    deviations: tuple[Name, ...] = ()

    def rounds_at(self, budget: Budget) -> int | None:
        """Returns the publication's number of rounds at an epsilon; None if the publication has none."""
        return {float(key): rounds for key, rounds in self.rounds.items()}.get(budget)  # pyright: ignore[reportArgumentType]

    def file_name(self, stem: str) -> str:
        """Returns the name of one of the variant's files.

        >>> [Variant(name=name, title="-").file_name("results") for name in ("default", "paper")]
        ['results.json', 'results_paper.json']
        """
        return f"{stem}.json" if self.name == "default" else f"{stem}_{self.name}.json"


class Scale(Settings):
    """The size of a reproduction: budgets, seeds, methods, and replaced settings.

    Attributes:
      epsilons: epsilons of each silo, or of all users; infinite for no privacy.
      budgets: names of the setting's budgets.
      variants: names of the variants that this scale has; None for all.
      seeds: number of repetitions.
      methods: methods of the setting that are run by default; None for all.
      lambdas: grid of lambda for `--grid`.
      overrides: values that replace the configuration's, by dotted key.
      inputs: name of raw data other than the setting's; None for the setting's.
      takes_rounds: whether a variant's `rounds` are used.
      deviation: difference of the scale from the publication; empty for none.
    """

    epsilons: tuple[float, ...] = ()
    budgets: tuple[Name, ...] = ()
    variants: tuple[Name, ...] | None = None
    seeds: Count = 5
    methods: tuple[Name, ...] | None = None
    lambdas: tuple[float, ...] = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    overrides: Overrides = msgspec.field(default_factory=dict)
    inputs: Name | None = None
    takes_rounds: bool = False
    deviation: str = ""

    def __post_init__(self):
        if not self.epsilons and not self.budgets:
            raise ValueError("a scale needs epsilons or budgets")


class Statement(Settings):
    """A publication's statement on two methods: one is better, under one budget or under every budget.

    Attributes:
      better: name of the better method, in `METHODS`.
      worse: name of the worse method, in `METHODS`.
      source: figure or table of the publication.
      epsilon: epsilon of the comparison; None for every epsilon.
      budgets: name of the budgets of the comparison, in place of `epsilon`.
    """

    better: Name
    worse: Name
    source: Name
    epsilon: float | None = None
    budgets: Name | None = None

    def __post_init__(self):
        if self.epsilon is not None and self.budgets is not None:
            raise ValueError("a statement has either epsilon or budgets")

    @property
    def text(self) -> str:
        """The statement as a sentence."""
        if self.budgets is not None:
            place = f"with {budget_text(self.budgets)}"
        else:
            place = "at every ε" if self.epsilon is None else f"at {budget_text(self.epsilon)}"
        return f"{METHODS[self.better].title} is better than {METHODS[self.worse].title} {place} ({self.source})"


class Band(Settings):
    """An expectation of this project: the mean of a method, or the difference of two means, lies between two numbers.

    Attributes:
      variant: name of the variant.
      method: name of a method, in `METHODS`.
      minus: name of a method whose mean is subtracted; None for no difference.
      at_least: smallest expected value, in units of the metric.
      at_most: largest expected value, in units of the metric.
      budgets: name of the budgets.
      epsilon: epsilon of every client, in place of `budgets`.
      source: origin of the expectation.
    """

    variant: Name
    method: Name
    minus: Name | None = None
    at_least: float = -math.inf
    at_most: float = math.inf
    budgets: Name | None = None
    epsilon: float | None = None
    source: Name

    def __post_init__(self):
        if (self.budgets is None) == (self.epsilon is None):
            raise ValueError("a band needs either budgets or epsilon")
        if not (self.at_least <= self.at_most and math.isfinite(self.at_least) | math.isfinite(self.at_most)):
            raise ValueError("a band needs at_least or at_most, and at_least may not exceed at_most")

    @property
    def budget(self) -> Budget:
        """Epsilon of every client, or the name of budgets."""
        return self.epsilon if self.budgets is None else self.budgets  # pyright: ignore[reportReturnType]

    def text(self, metric: Metric) -> str:
        """Writes the expectation as a sentence."""
        minus = f" minus {METHODS[self.minus].title}" if self.minus else ""
        limits = {"at least": self.at_least, "at most": self.at_most}
        said = " and ".join(
            f"{words} {limit_text(one, metric, is_difference=self.minus is not None)}"
            for words, one in limits.items()
            if math.isfinite(one)
        )
        place = f"{'at' if self.budgets is None else 'with'} {budget_text(self.budget)}"
        return f"{METHODS[self.method].title}{minus} is {said} {place} ({self.source})"


def limit_text(value: float, metric: Metric, *, is_difference: bool, digits: int = 3) -> str:
    """Writes a value of a metric, or a difference of two values, with `digits` significant digits.

    >>> limit_text(0.855, ACCURACY, is_difference=False), limit_text(-0.01, ACCURACY, is_difference=True)
    ('85.5 %', '-1 points')
    """
    if not metric.higher_is_better:
        return f"{value:.{digits}g}"
    return f"{100 * value:.{digits}g} {'points' if is_difference else '%'}"


class NotComparable(Settings):
    """Published figures that are shown beside ours although they do not measure the same.

    Attributes:
      heading: heading of their column.
      values: published figures by name of the method, in `METHODS`, in units of the metric.
      reasons: reasons why the figures cannot be compared, one sentence each.
    """

    heading: Name
    values: dict[str, float]
    reasons: tuple[Name, ...]


class Setting(Settings):
    """A published experiment, or an experiment of this project.

    Attributes:
      name: name of the experiment in the command and in files.
      title: title for readers.
      metric: name of the metric of test examples.
      inputs: name of the raw data, in `INPUTS`.
      seed_splits: whether a seed also decides the split into training and test data, besides noise and batches.
      averages: weights of the clients in a seed's result: `examples`, by numbers of test examples; `clients`, equal.
      shows_shared_model: whether results have the shared model's test metric beside that of the personal models.
      scales: scales by name.
      default_scale: name of the scale that is run if the user names none.
      variants: the variants. If the user names none, all variants that are not optional are run: with `--paper` those
        with `is_paper`, otherwise the others.
      paper: name of the publication in texts; empty for an experiment of our own.
      clients: kind of the clients: `silos` or `users`.
      methods: names in `METHODS` for which the configuration has settings.
      paper_values: published test metrics at the publication's own scale, from the publication or its released code.
      statements: the publication's statements on which of two methods is better.
      budgets: budgets that differ between silos, by name: the section `privacy.budgets` of a configuration. A seed also
        decides drawn budgets.
      bands: expectations of this project on means and differences of means.
      comparisons: pairs of methods that are compared seed by seed.
      not_comparable: published figures that do not measure the same as ours; None for none.
      explanation: paragraphs at the top of the report.
      traffic_baseline: name of the method whose traffic other methods' traffic is compared with; None leaves out
        traffic. For silos only.
      deviations: differences from the publication, by name: `every`, for all variants, and names that variants list.
    """

    name: Name
    title: Name
    metric: Literal["accuracy", "mean_squared_error", "average_precision"]
    inputs: Name
    seed_splits: bool
    averages: Literal["examples", "clients"] = "examples"
    shows_shared_model: bool = False
    scales: dict[str, Scale]
    default_scale: Name
    variants: tuple[Variant, ...]
    paper: str = ""
    clients: Literal["silos", "users"] = "silos"
    methods: tuple[Name, ...] = SILO_METHODS
    paper_values: PublishedByMethod = msgspec.field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    budgets: dict[str, Overrides] = msgspec.field(default_factory=dict)
    bands: tuple[Band, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    not_comparable: NotComparable | None = None
    explanation: tuple[Name, ...] = ()
    traffic_baseline: Name | None = None
    deviations: dict[str, tuple[Name, ...]] = msgspec.field(default_factory=dict)

    def __post_init__(self):
        scales = self.scales.values()
        named = {
            "inputs": (INPUTS, [self.inputs, *(scale.inputs for scale in scales if scale.inputs)]),
            "methods": (METHODS, [*self.methods, *(name for scale in scales for name in scale.methods or ())]),
            "default_scale": (self.scales, [self.default_scale]),
            "statements": (METHODS, [name for one in self.statements for name in (one.better, one.worse)]),
            "bands": (METHODS, [name for one in self.bands for name in (one.method, one.minus) if name]),
            "comparisons": (self.methods, [name for one in self.comparisons for name in (one.method, one.minus)]),
            "not_comparable": (METHODS, self.not_comparable.values if self.not_comparable else []),
            "traffic_baseline": (self.methods, [self.traffic_baseline] if self.traffic_baseline else []),
            "budgets": (
                self.budgets,
                [
                    *(name for scale in scales for name in scale.budgets),
                    *(one.budgets for one in (*self.statements, *self.bands) if one.budgets),
                ],
            ),
            "variants": (
                [variant.name for variant in self.variants],
                [*(name for scale in scales for name in scale.variants or ()), *(one.variant for one in self.bands)],
            ),
        }
        for key, (known, names) in named.items():
            for name in names:
                if name not in known:
                    raise ValueError(f"{key}: unknown name {name!r}; {did_you_mean(name, known)}")

    @property
    def words(self) -> ClientWords:
        """The words that texts use for the setting's clients: silos or users."""
        return _CLIENTS[self.clients]

    @property
    def measured(self) -> Metric:
        """The metric of test examples."""
        return _METRICS[self.metric]

    def published(self, variant: Variant) -> Published:
        """Returns the published test metrics to compare a variant's results with, by method and budget."""
        values = self.paper_values if variant.paper_values is None else variant.paper_values
        return {
            (method, key if key in self.budgets else float(key)): value
            for method, own in values.items()
            for key, value in own.items()
        }

    def deviations_of(self, scale: Scale, variant: Variant, data_input: Path) -> list[str]:
        """Lists a run's differences from the publication and other remarks on the run, one sentence each."""
        named = (*variant.deviations, "every")
        found = [line for one in named for line in self.deviations.get(one, () if one == "every" else (one,))]
        if scale.deviation:
            found.append(scale.deviation)
        if "subset" in data_input.name:
            consequence = "each user has fewer of them" if self.clients == "users" else "the same ε costs more accuracy"
            found.append(
                f"data: a part of the images, {data_input.name}; {self.paper} has all 50,000, so {consequence}"
            )
        return found

    @property
    def config_file(self) -> Path:
        """Path of the configuration that all runs vary."""
        return CONFIGS / "reproduce" / f"{self.name}.yaml"

    def is_same_at_every_epsilon(self, method: str) -> bool:
        """Checks that a method's results do not depend on epsilon."""
        return self.clients == "users" and method in RELEASE_NOTHING

    def chosen_variants(self, names: tuple[str, ...], scale: Scale, *, is_paper: bool) -> tuple[Variant, ...]:
        """Returns the variants with these names; without names, the scale's variants that are run by default.

        Raises:
          ConfigError: the scale has no variant of a name, or there is no publication for `--paper`.
        """
        known = {
            variant.name: variant
            for variant in self.variants
            if variant.is_paper == is_paper and (scale.variants is None or variant.name in scale.variants)
        }
        if not known:
            raise ConfigError(f"--paper: {self.name} repeats no publication")
        for name in names:
            if name not in known:
                raise ConfigError(f"--variants {name!r} is not a variant of {self.name}, which has: {', '.join(known)}")
        return tuple(known[name] for name in names or known if names or not known[name].is_optional)


@functools.cache
def read_setting(name: str) -> Setting:
    """Reads the setting of a published experiment, whose name is in `NAMES`.

    Raises:
      ConfigError: the name is unknown, or the setting's file is not valid.
    """
    path = PUBLISHED / f"{name}.yaml"
    if name not in NAMES:
        raise ConfigError(f"unknown experiment {name!r}; {did_you_mean(name, NAMES)}")
    return read_settings(Setting, {"name": name, **read_yaml(path)}, str(path))
