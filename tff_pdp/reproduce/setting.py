"""Describes a setting of a published experiment: its data, methods, variants and scales, and what was published.

It finds where raw data lie, and which data they are. Its methods are compared as rows of results.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import beam_pipelines
import tff_pdp
from beam_pipelines.options import GENERATED
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.models.metrics import MEAN_SQUARED_ERROR, Metric
from tff_pdp.reports.words import SILOS, USERS, ClientWords

DATA_VARIABLE = "TFF_PDP_DATA"
_BLOCK = 2**20
# A deviation that all settings of user-level privacy have.
USER_SEEDS = "seeds: batches, cohorts and noise are drawn from small test-only seeds, so these figures are NOT private"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Raw data.

    Attributes:
      paths: where they may lie under the data folder, the best first; none for data that are made up.
      origin: where they come from.
      beside: what lies in the same folder and is read as well, where it is there.
    """

    paths: tuple[str, ...]
    origin: str
    beside: tuple[str, ...] = ()


MADE_UP = Inputs((), "made up when they are prepared")
CIFAR10 = Inputs(
    ("cifar10/cifar-10-python.tar.gz", "cifar10/cifar-10-batches-py", "cifar10/cifar-10-python-subset.tar.gz"),
    "the python version of CIFAR-10, from www.cs.toronto.edu/~kriz/cifar.html",
)
MNIST = Inputs(("mnist",), "the four idx.gz files of MNIST")
MNIST_WRITERS = Inputs(
    ("mnist",),
    "the four idx.gz files of MNIST, and in it or in mnist_writers beside it QMNIST's qmnist-train-labels-idx2-int.gz",
    beside=("mnist_writers",),
)


def find_input(inputs: Inputs, folder: str | None) -> Path:
    """Returns where raw data lie, or the word for data that are made up.

    Args:
      inputs: which data.
      folder: where all data lie; None for the folder that the environment variable TFF_PDP_DATA names. Made-up data
        need none.

    Raises:
      DataError: no folder is named, or it does not hold the data.
    """
    if not inputs.paths:
        return Path(GENERATED)
    named = folder or os.environ.get(DATA_VARIABLE)
    if not named:
        raise DataError(f"give the folder that holds {inputs.paths[0]}: --data DIR, or set {DATA_VARIABLE}")
    for name in inputs.paths:
        path = Path(named) / name
        if path.exists():
            return path.absolute()
    raise DataError(f"{named} holds none of: {', '.join(inputs.paths)} ({inputs.origin})")


def digest_of_data(inputs: Inputs, path: Path) -> str:
    """A sha256 of raw data at a path that `find_input` has returned, with what is read from beside it.

    Of data that are made up, of the modules that make them.
    """
    if not inputs.paths:
        return digest_of(Path(beam_pipelines.__file__).parent, "*.py")
    parts = [path, *filter(Path.exists, (path.parent / name for name in inputs.beside))]
    digests = [digest_of(part) for part in parts]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def digest_of(path: Path, pattern: str = "*") -> str:
    """A sha256 of a file, or of the names and contents of those of a folder's files that match the pattern."""
    digest = hashlib.sha256()
    files = sorted(file for file in path.rglob(pattern) if file.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(f"{file.relative_to(path)}:{file.stat().st_size}:".encode())
        with open(file, "rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


@functools.cache
def digest_of_sources() -> str:
    """A sha256 of the modules that prepare data and train: a result of other ones is not a result of these."""
    packages = (tff_pdp, beam_pipelines)
    digests = [digest_of(Path(str(package.__file__)).parent, "*.py") for package in packages]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class SweptMethod:
    """A row of the results: a method of the configuration, perhaps with other settings of its own."""

    title: str
    algorithm: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_LOCAL = {"local_only": SweptMethod("Local", "local_only")}
_SILO_METHODS = {
    **_LOCAL,
    "fed_avg": SweptMethod("FedAvg", "fed_avg"),
    "finetune": SweptMethod("Fine-tuning", "finetune"),
    "mr_mtl": SweptMethod("MR-MTL", "mr_mtl"),
    "mr_mtl_auto": SweptMethod("MR-MTL, automatic λ", "mr_mtl", {"prox_weight": "auto"}),
    "ditto": SweptMethod("Ditto", "ditto"),
    "mocha": SweptMethod("Mocha", "mocha"),
    "ifca": SweptMethod("IFCA, every round", "ifca"),
    "ifca_fed_avg": SweptMethod("IFCA, first rounds", "ifca_fed_avg"),
    "ifca_mr_mtl": SweptMethod("IFCA, then MR-MTL", "ifca_mr_mtl"),
    "ifca_local": SweptMethod("IFCA, then local", "ifca_local"),
    "ifca_finetune": SweptMethod("IFCA, then fine-tuning", "ifca_finetune"),
}
_USER_METHODS = {
    **_LOCAL,
    "dp_fed_avg_ft": SweptMethod("DP-FedAvg, tuned heads", "dp_fed_avg_ft"),
    "pp_sgd": SweptMethod("PP-SGD", "pp_sgd"),
    "pmtl_ft": SweptMethod("PMTL, tuned heads", "pmtl_ft"),
    "centaur": SweptMethod("CENTAUR", "centaur"),
    "dp_pfed_dsu": SweptMethod("DP-pFedDSU", "dp_pfed_dsu"),
    "udp_hypernet": SweptMethod("UDP-Alg", "udp_hypernet"),
    "udp_hypernet_ft": SweptMethod(
        "UDP-Alg, fine-tuned", "udp_hypernet", {"fine_tune": True, "adapt_steps": "5 epochs"}
    ),
}
METHODS = {**_SILO_METHODS, **_USER_METHODS}
# By whose privacy is protected.
SILO_METHODS = tuple(_SILO_METHODS)
USER_METHODS = tuple(_USER_METHODS)
# Nothing leaves a client: where users are protected from what the server releases, no epsilon matters.
RELEASE_NOTHING = ("local_only",)
# Whose figures are drawn against lambda.
GRID_METHODS = ("mr_mtl", "ditto")
# What selecting clusters and touching the data twice costs is seen in these.
OVERHEAD_METHODS = ("local_only", "fed_avg", "mr_mtl", "ditto", "ifca_fed_avg", "ifca")


CONFIGS = Path(__file__).parents[2] / "configs" / "reproduce"
LAMBDA_GRID = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

# Values of an experiment by dotted key, as `tff_pdp.experiment.config.load_experiment` takes them.
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
