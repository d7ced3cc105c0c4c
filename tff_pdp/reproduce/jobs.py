"""Lists a reproduction's jobs, one for each variant, method, budget and seed, and builds each job's experiment."""

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, Workers, load_experiment
from tff_pdp.privacy.accounting.budgets import Drawn
from tff_pdp.privacy.plans.plan import PlanSettings
from tff_pdp.privacy.plans.unprotected import with_epsilon
from tff_pdp.reproduce import setting as settings
from tff_pdp.reproduce.budget import Budget
from tff_pdp.reproduce.inputs import digest_of_sources
from tff_pdp.reproduce.methods import GRID_METHODS, METHODS
from tff_pdp.reproduce.setting import Scale, Setting, Variant
from tff_pdp.settings import to_plain

# Parts of an experiment on which its results do not depend.
_NOT_DECISIVE = ("title", "output", "export", "tuning")
_NOT_DECISIVE_IN_TRAINING = (
    "evaluate_every",
    "checkpoint_every",
    "device",
    "clients_per_call",
    "xla",
    "deterministic_operations",
    "test_only_seed",
    "workers",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a reproduction; the job, the reproduction's settings and the data decide the run's result.

    Attributes:
      variant: name of a variant of the setting.
      method: a name in `METHODS`.
      budget: epsilon of every silo or of all users, infinite for no privacy; or the name of budgets.
      seed: seed of batches, noise and drawn budgets, and of the split if the setting says so.
      prox_weight: lambda of a run for the grid; None if the run has the configuration's lambda.
    """

    variant: str
    method: str
    budget: Budget
    seed: int
    prox_weight: float | None = None

    @property
    def group(self) -> tuple[str, str]:
        """Method and variant; jobs with equal groups share computations, and so run faster in one process."""
        return self.method, self.variant

    def __str__(self) -> str:
        grid = "" if self.prox_weight is None else f", lambda {self.prox_weight:g}"
        budget = f"budgets {self.budget}" if isinstance(self.budget, str) else f"epsilon {self.budget:g}"
        return f"{self.method} ({self.variant}), {budget}, seed {self.seed}{grid}"


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A reproduction: a setting, a scale, and all values that are swept.

    Attributes:
      setting_name: a name in `NAMES`.
      scale_name: name of one of the setting's scales.
      variant_names: names of variants of the setting, in the order in which they are run.
      methods: names in `METHODS`.
      epsilons: epsilons of every silo, or of all users.
      seeds: number of repetitions.
      lambdas: grid of lambda; empty for no grid.
      data_input: path of the raw data.
      data_digest: sha256 of the raw data.
      output: folder of all results.
      budgets: names of the setting's budgets, which differ between silos.
      workers: workers that compute the clients; None for the process of the job.
    """

    setting_name: str
    scale_name: str
    variant_names: tuple[str, ...]
    methods: tuple[str, ...]
    epsilons: tuple[float, ...]
    seeds: int
    lambdas: tuple[float, ...]
    data_input: Path
    data_digest: str
    output: Path
    budgets: tuple[str, ...] = ()
    workers: Workers | None = None

    def __post_init__(self):
        for name in self.methods:
            if name not in self.setting.methods:
                known = ", ".join(self.setting.methods)
                raise ConfigError(f"--methods {name!r} is not a method of {self.setting_name}, which has: {known}")
        for name in self.budgets:
            if name not in self.setting.budgets:
                known = ", ".join(self.setting.budgets) or "none"
                raise ConfigError(f"--budgets {name!r} is not one of {self.setting_name}'s budgets: {known}")
        for epsilon in self.epsilons:
            if not epsilon > 0:
                raise ConfigError(f"--epsilons {epsilon:g} must be positive; inf trains without privacy")
            if math.isfinite(epsilon) and not any(scale.epsilons for scale in self.setting.scales.values()):
                known = ", ".join(self.setting.budgets)
                raise ConfigError(f"--epsilons {epsilon:g}: {self.setting_name} has --budgets instead: {known}")
        for value in self.lambdas:
            if not 0 <= value < math.inf:
                raise ConfigError(f"--grid {value:g} must be finite and not negative")
        if self.lambdas and not set(self.methods) & set(GRID_METHODS):
            raise ConfigError(f"--grid needs at least one of the methods {', '.join(GRID_METHODS)}")
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds} must be at least 1")

    @property
    def setting(self) -> Setting:
        """The setting that is reproduced."""
        return settings.read_setting(self.setting_name)

    @property
    def scale(self) -> Scale:
        """The scale of the runs."""
        return self.setting.scales[self.scale_name]

    def variant(self, name: str) -> Variant:
        """Returns the setting's variant of this name."""
        return next(variant for variant in self.setting.variants if variant.name == name)

    def jobs(self) -> list[Job]:
        """Lists every job: first the jobs outside of the grid of lambda, variant by variant, then the grid's jobs.

        If a method's results do not depend on epsilon, the method is run without privacy, in place of once per budget.
        """
        plain = [
            Job(variant, method, budget, seed)
            for variant, method in itertools.product(self.variant_names, self.methods)
            for budget in ((math.inf,) if self.setting.is_same_at_every_epsilon(method) else self.all_budgets)
            for seed in range(self.seeds)
            if self._is_possible(variant, method, budget)
        ]
        if not plain:
            raise ConfigError("nothing to run: the automatic lambda needs a finite epsilon, and is not for --paper")
        methods = [name for name in self.methods if name in GRID_METHODS]
        grid = [
            Job(variant, method, budget, seed, prox_weight)
            for variant, method, budget, prox_weight, seed in itertools.product(
                self.variant_names, methods, self.all_budgets, self.lambdas, range(self.seeds)
            )
        ]
        return plain + grid

    @property
    def all_budgets(self) -> tuple[Budget, ...]:
        """The budgets that are swept: epsilons, then names of budgets."""
        return (*self.epsilons, *self.budgets)

    def _is_possible(self, variant: str, method: str, budget: Budget) -> bool:
        # The automatic lambda is ours, not the paper's, and it is set from the noise.
        is_auto = METHODS[method].settings.get("prox_weight") == "auto"
        return not is_auto or (not self.variant(variant).is_paper and budget != math.inf)

    def config(self, job: Job) -> ExperimentConfig:
        """Builds the experiment that a job runs.

        Raises:
          ConfigError: the configuration is not valid with the values that the job overrides.
        """
        base = self._base_of(job)
        data = replace(base.data, seed=job.seed) if self.setting.seed_splits else base.data
        privacy = _with_budget(base.privacy, job)
        decisive = [self.data_digest, to_plain(data)]
        if privacy.synthetic is not None:
            # Synthetic data lie beside the records, once in a folder.
            released = {key: value for key, value in to_plain(privacy).items() if key != "registry"}
            decisive += [released, job.seed]
        return replace(
            base,
            data=data,
            privacy=privacy,
            training=replace(base.training, test_only_seed=job.seed),
            output=str(self.output / "data" / _digest(decisive)[:16]),
        )

    def digest(self, job: Job) -> str:
        """Computes a hash of everything, apart from the job itself, that decides the job's result."""
        content = self._base_of(job).to_dict()
        for key in _NOT_DECISIVE:
            del content[key]
        for key in _NOT_DECISIVE_IN_TRAINING:
            del content["training"][key]
        del content["data"]["input"], content["privacy"]["registry"]
        if not isinstance(job.budget, str):
            # The job's own.
            content["privacy"]["budgets"].pop("epsilon", None)
        measured = [self.setting.seed_splits, self.setting.averages, self.setting.shows_shared_model]
        return _digest([digest_of_sources(), self.data_digest, measured, content])

    def _base_of(self, job: Job) -> ExperimentConfig:
        """Returns a job's configuration before epsilon and seed, which many jobs share."""
        rounds = self.variant(job.variant).rounds_at(job.budget) if self.scale.takes_rounds else None
        budgets = job.budget if isinstance(job.budget, str) else None
        return self._base_config(job.variant, job.method, job.prox_weight, rounds, budgets)

    @functools.cache  # noqa: B019 - a reproduction lives as long as its command.
    def _base_config(
        self, variant_name: str, method: str, prox_weight: float | None, rounds: int | None, budgets: str | None
    ) -> ExperimentConfig:
        """Returns the configuration of one method, before epsilon and seed."""
        variant, swept = self.variant(variant_name), METHODS[method]
        path = self.setting.config_file
        overrides = {**self.scale.overrides, **variant.overrides, "data.input": str(self.data_input)}
        # Hundreds of runs on published data, under known seeds: they do not count for the user's own runs.
        overrides["privacy.registry"] = str((self.output / "registry").absolute())
        if rounds is not None:
            overrides["training.rounds"] = rounds
        if budgets is not None:
            # A copy, as the method may override parts of it.
            overrides["privacy.budgets"] = copy.deepcopy(self.setting.budgets[budgets])
        whole = load_experiment(path, {**overrides, **swept.overrides})
        if swept.algorithm not in whole.algorithms:
            raise ConfigError(f"{path}: algorithms has no {swept.algorithm!r}, which {method!r} needs")
        settings = {
            **whole.algorithms[swept.algorithm],
            **variant.algorithm_settings.get(swept.algorithm, {}),
            **swept.settings,
        }
        if prox_weight is not None:
            settings["prox_weight"] = prox_weight
        return replace(
            whole,
            algorithms={swept.algorithm: settings},
            export=replace(whole.export, algorithm=swept.algorithm),
            training=replace(
                whole.training, rounds=whole.training.rounds + swept.warm_start_rounds, workers=self.workers
            ),
        )


def _with_budget(privacy: PlanSettings, job: Job) -> PlanSettings:
    """Sets a job's epsilon or, for named budgets that are drawn, its seed."""
    if not isinstance(job.budget, str):
        return with_epsilon(privacy, job.budget)
    budgets = getattr(privacy, "budgets", None)
    return replace(privacy, budgets=replace(budgets, seed=job.seed)) if isinstance(budgets, Drawn) else privacy


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
