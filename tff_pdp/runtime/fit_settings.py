"""How new clients are fitted: what may be asked for, what training had in its place, and what the plan demands."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from serving.models import CLUSTERS, HYPERNETWORK, PersonalModels
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig, PrivacyConfig
from tff_pdp.personal_models.new_clients.gradient_fit import fitted_names
from tff_pdp.personal_models.new_clients.version import ExportedModels
from tff_pdp.privacy.accounting.budgets import SiloBudget

DEFAULT_STEPS = 100
_OF_STEPS = ("steps", "learning_rate", "batch_size", "clip_norm")


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """How new clients are fitted; what is None is as training had it.

    Attributes:
      steps: gradient steps; 100 by default.
      learning_rate: of each step.
      batch_size: expected size of a protected silo's Poisson batch; otherwise size of a plain batch.
      clip_norm: of each example's gradient, in protected silos.
      epsilon: budget of each silo for this fit; required where silos are protected.
      delta: of the same.
      replace: fit clients again that the export has already.
    """

    steps: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    clip_norm: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    replace: bool = False


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How new clients are fitted, nothing left open.

    Attributes:
      is_choice: each client chooses one of the clusters' models, so that nothing is trained; otherwise by steps.
      steps: gradient steps of each client.
      learning_rate: of each step.
      batch_size: expected size of a protected silo's Poisson batch; otherwise size of a plain batch.
      clip_norm: of each example's gradient, in protected silos.
      budget: of each silo for this fit; None where clients' own examples are not protected from who sees their rows.
    """

    is_choice: bool
    steps: int
    learning_rate: float
    batch_size: int
    clip_norm: float
    budget: SiloBudget | None

    def text(self, models: PersonalModels, num_clients: int) -> str:
        """What is about to be done, in one line: in particular, what a silo is about to pay for."""
        if self.is_choice:
            how = "by the exponential mechanism" if self.budget else "by its loss"
            done = f"each of {num_clients} clients chooses one of {models.num_rows - 1} clusters' models {how}"
        else:
            how = "steps of DP-SGD" if self.budget else "gradient steps"
            done = f"each of {num_clients} clients trains {_part(models)} by {self.steps} {how} from the global model's"
        cost = f"for epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g}" if self.budget else "without noise"
        return f"{done}, {cost}"


def fit_budget(privacy: PrivacyConfig, options: FitOptions) -> SiloBudget | None:
    """Each silo's budget where silos are protected, otherwise None.

    Raises:
      ConfigError: it is missing, or out of range, or given where nothing is protected by it; or the plan allows no new
        clients.
    """
    if privacy.plan == "contact_graph":
        raise ConfigError(
            "privacy.plan contact_graph: examples are rows made of people's contacts, so that a new client's tell of "
            "people in other clients' rows, too, and no figure would cover both. Train again with the new client"
        )
    if privacy.plan == "silo_example":
        if options.epsilon is None or options.delta is None:
            raise ConfigError(
                "--epsilon and --delta are needed: trained silos' rows are differentially private for their silos' own "
                "examples, and so must be a new silo's, which pays for it from a budget of its own"
            )
        if math.isinf(options.epsilon):
            raise ConfigError("--epsilon must be finite")
        return SiloBudget(options.epsilon, options.delta)
    for name in ("epsilon", "delta", "clip_norm"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{_flag(name)} is for silos whose examples are protected (privacy.plan silo_example): with plan "
                f"{privacy.plan}, a new client's row is made of its examples without noise"
            )
    return None


def fit_settings(
    config: ExperimentConfig, options: FitOptions, budget: SiloBudget | None, exported: ExportedModels
) -> FitSettings:
    """The options, with what training had in place of what is left out.

    Raises:
      ConfigError: one is out of range, or does nothing for these models, or clients have nothing of their own.
    """
    models, algorithm = exported.models, exported.algorithm
    fitted_names(models)
    # Not by the layout alone: a row that several clients own may be one silo's personal model, which is that silo's.
    is_choice = models.layout == CLUSTERS and algorithm.serves_candidates
    defaults = {
        "steps": DEFAULT_STEPS,
        "learning_rate": default_learning_rate(exported.hparams, models),
        "batch_size": config.privacy.batch_size,
        "clip_norm": config.privacy.clip_norm,
    }
    given = {name: getattr(options, name) for name in _OF_STEPS if getattr(options, name) is not None}
    for name in given if is_choice else ():
        raise ConfigError(
            f"{_flag(name)} does nothing here: clients of {algorithm.name} share the models of clusters, and a new "
            "client chooses one of them without training. Leave it out"
        )
    chosen = {**defaults, **given}
    for name, value in chosen.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{_flag(name)} must be positive and finite, not {value!r}")
    return FitSettings(is_choice, **chosen, budget=budget)


def default_learning_rate(hparams: Mapping[str, Any], models: PersonalModels) -> float:
    """The rate that training moved a client's own part with."""
    rate = float(hparams["learning_rate"])
    if models.layout == HYPERNETWORK:
        return rate * float(hparams.get("descriptor_learning_rate", 1.0))
    return float(hparams.get("head_learning_rate", rate)) if _is_head(models) else rate


def _is_head(models: PersonalModels) -> bool:
    return set(fitted_names(models)) <= set(models.model.head)


def _part(models: PersonalModels) -> str:
    if models.layout == HYPERNETWORK:
        return "its descriptor"
    return "its head" if _is_head(models) else "all that it owns"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
