"""What a setting of a published experiment consists of: its data, its variants, its scales, and what was published."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tff_pdp.errors import ConfigError
from tff_pdp.models.metrics import MEAN_SQUARED_ERROR, Metric
from tff_pdp.reports.client_words import SILOS, USERS, ClientWords
from tff_pdp.reproduce.inputs import Inputs
from tff_pdp.reproduce.methods import METHODS, RELEASE_NOTHING, SILO_METHODS

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "reproduce"
LAMBDA_GRID = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

# Values of an experiment by dotted key, as `tff_pdp.config.load_config` takes them.
Overrides = Mapping[str, Any]
# A test metric by method and epsilon.
Published = Mapping[tuple[str, float], float]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a setting; its rows are in `results.json`, or in `results_<name>.json` but for the default.

    Attributes:
      name: `default`, or what the files are named by.
      title: for a reader.
      is_paper: whether it is run with `--paper` instead of without.
      is_optional: whether it is run only when it is asked for by name.
      overrides: of the configuration.
      algorithm_settings: of methods of the configuration, by name.
      rounds: the publication's, by epsilon, for scales that take them; with others, the configuration's.
      paper_values: in place of the setting's; None for those.
      deviations: what is unlike the publication in this variant and not in every one.
    """

    name: str
    title: str
    is_paper: bool = False
    is_optional: bool = False
    overrides: Overrides = dataclasses.field(default_factory=dict)
    algorithm_settings: Mapping[str, Overrides] = dataclasses.field(default_factory=dict)
    rounds: Mapping[float, int] = dataclasses.field(default_factory=dict)
    paper_values: Published | None = None
    deviations: tuple[str, ...] = ()

    def file_name(self, stem: str) -> str:
        """Name of one of the variant's files.

        >>> Variant("default", "").file_name("results"), Variant("paper", "").file_name("results")
        ('results.json', 'results_paper.json')
        """
        return f"{stem}.json" if self.name == "default" else f"{stem}_{self.name}.json"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
      epsilons: of each silo, or of all users; infinite for no privacy.
      seeds: how many repetitions.
      methods: of the setting's, those that are run by default.
      lambdas: the grid of `--grid`.
      overrides: of the configuration.
      inputs: other raw data than the setting's; None for those.
      takes_rounds: whether a variant's rounds by epsilon are taken.
      deviation: how it falls short of the publication; empty where it does not.
    """

    epsilons: tuple[float, ...]
    seeds: int = 5
    methods: tuple[str, ...] = SILO_METHODS
    lambdas: tuple[float, ...] = LAMBDA_GRID
    overrides: Overrides = dataclasses.field(default_factory=dict)
    inputs: Inputs | None = None
    takes_rounds: bool = False
    deviation: str = ""


@dataclasses.dataclass(frozen=True)
class Statement:
    """What a publication says of two methods: one is better, at one epsilon or at every one."""

    better: str
    worse: str
    source: str
    epsilon: float | None = None

    @property
    def text(self) -> str:
        """The statement as a sentence."""
        place = "at every ε" if self.epsilon is None else f"at ε = {self.epsilon:g}"
        return f"{METHODS[self.better].title} is better than {METHODS[self.worse].title} {place} ({self.source})"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One published experiment, or one of our own.

    Attributes:
      name: as the command knows it, and of its file under `configs/reproduce`.
      title: for a reader.
      metric: what is measured on test examples.
      inputs: the raw data.
      seed_splits: whether a seed decides the division into training and test as well, or noise and batches alone.
      scales: by name.
      default_scale: the one run where none is named.
      variants: the default of each kind first.
      paper: what texts call the publication; empty for an experiment of our own.
      clients: whose privacy is protected.
      methods: names in `METHODS` that the configuration has settings for.
      paper_values: as the publication, or its released code, states them at its own scale.
      statements: what the publication says of methods' order.
      deviations: what is unlike the publication in every variant.
    """

    name: str
    title: str
    metric: Metric
    inputs: Inputs
    seed_splits: bool
    scales: Mapping[str, Scale]
    default_scale: str
    variants: tuple[Variant, ...]
    paper: str = ""
    clients: ClientWords = SILOS
    methods: tuple[str, ...] = SILO_METHODS
    paper_values: Published = dataclasses.field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    deviations: tuple[str, ...] = ()

    @property
    def row_metric(self) -> str:
        """The metric's name in result rows."""
        return "mse" if self.metric == MEAN_SQUARED_ERROR else self.metric.name

    @property
    def config_file(self) -> Path:
        """The experiment all runs are variations of."""
        return CONFIGS / f"{self.name}.yaml"

    def is_same_at_every_epsilon(self, method: str) -> bool:
        """Whether a method's results have nothing to do with epsilon."""
        return self.clients == USERS and method in RELEASE_NOTHING

    def chosen_variants(self, names: tuple[str, ...] = (), *, is_paper: bool = False) -> tuple[Variant, ...]:
        """The variants of those names, or those run by default.

        Raises:
          ConfigError: there is no variant of that name.
        """
        known = {variant.name: variant for variant in self.variants if variant.is_paper == is_paper}
        if not known:
            raise ConfigError(f"--paper: {self.name} repeats no publication")
        for name in names:
            if name not in known:
                raise ConfigError(f"--variants {name!r} is not one of {self.name}'s: {', '.join(known)}")
        return tuple(known[name] for name in names or known if names or not known[name].is_optional)
