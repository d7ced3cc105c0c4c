"""Fits the rows of new clients, with the mechanism that the experiment's privacy plan asks for."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from serving.models import CLUSTERS, GLOBAL_ROW, HYPERNETWORK, PersonalModels
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.data.client_dataset import ClientExamples
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.run_key import RunKey
from tff_pdp.models.base import Model
from tff_pdp.personal_models.new_clients.costs import plan_gradients, plan_selection, put_on_record
from tff_pdp.personal_models.new_clients.examples import NewClients
from tff_pdp.personal_models.new_clients.gradient_fit import (
    Arrays,
    Progress,
    fit_rows,
    fitted_names,
    measure_rows,
    model_of_rows,
    stacks,
)
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.version import ExportedModels
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.mechanisms.selection import build_selector
from tff_pdp.privacy.plans.plan import PlanSettings
from tff_pdp.training.record.all_runs import Composed

DEFAULT_STEPS = 100
_OF_STEPS = ("steps", "learning_rate", "batch_size", "clip_norm")


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """The settings of a fit of new clients, with a value for every option.

    Attributes:
      is_choice: whether each client chooses one of the clusters' models without training; if false, each client trains
        by gradient steps.
      steps: number of gradient steps of each client.
      learning_rate: learning rate of each step.
      batch_size: expected size of a Poisson batch if silos are protected; otherwise the size of an ordinary batch.
      clip_norm: L2 bound on each example's gradient; used only if silos are protected.
      budget: budget of each silo for this fit; None if the fit does not protect clients' examples.
    """

    is_choice: bool
    steps: int
    learning_rate: float
    batch_size: int
    clip_norm: float
    budget: SiloBudget | None

    def text(self, models: PersonalModels, num_clients: int) -> str:
        """Returns a line that describes the planned fit, with its cost for each silo."""
        if self.is_choice:
            how = "by the exponential mechanism" if self.budget else "by its loss"
            done = f"each of {num_clients} clients chooses one of {models.num_rows - 1} clusters' models {how}"
        else:
            how = "steps of DP-SGD" if self.budget else "gradient steps"
            done = f"each of {num_clients} clients trains {_part(models)} by {self.steps} {how} from the global model's"
        cost = f"for epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g}" if self.budget else "without noise"
        return f"{done}, {cost}"


def fit_budget(privacy: PlanSettings, options: FitOptions) -> SiloBudget | None:
    """Returns the budget that each silo has for the fit; None if the plan does not protect silos.

    Raises:
      ConfigError: the budget is missing or out of range, is given for a plan that does not protect silos, or the plan
        does not allow new clients.
    """
    budget = privacy.fit_budget(options.epsilon, options.delta)
    for name in ("epsilon", "delta", "clip_norm") if budget is None else ():
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{_flag(name)} is for silos whose examples are protected (privacy.kind silo_example): with kind "
                f"{privacy.kind}, a new client's row is made of the client's examples without noise"
            )
    return budget


def fit_settings(
    config: ExperimentConfig, options: FitOptions, budget: SiloBudget | None, exported: ExportedModels
) -> FitSettings:
    """Returns the settings of a fit: the options and, for those that are None, the values of training.

    Raises:
      ConfigError: an option is out of range or has no effect on these models, or the models have no personal part.
    """
    models, algorithm = exported.models, exported.algorithm
    fitted_names(models)
    # The layout alone does not decide: a row that several clients own may be the personal model of a single silo.
    is_choice = models.layout == CLUSTERS and algorithm.export.serves_candidates
    defaults = {
        "steps": DEFAULT_STEPS,
        "learning_rate": _default_learning_rate(exported.hparams, models),
        "batch_size": config.privacy.batch_size,
        "clip_norm": getattr(config.privacy, "clip_norm", 1.0),
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


def _default_learning_rate(hparams: Mapping[str, Any], models: PersonalModels) -> float:
    """Returns the learning rate that training had for a client's own part."""
    # With rounds on synthetic data, the rate of those rounds is for another kind of step.
    rate = float(hparams.get("adaptation_learning_rate", hparams["learning_rate"]))
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


Metrics = dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class NewRows:
    """The rows of new clients, and the cost of the fit.

    Attributes:
      values: arrays `[clients, ...]` by name; all other arrays of a new row are those of the global model's row.
      chosen: int32 `[clients]`, the existing row that each client has chosen; None if the rows are new.
      epsilons: epsilon that this fit spent, by client id; empty if it spent none.
      noise_multipliers: noise multiplier of the gradients, by client id; empty if there are no gradients or no noise.
      recorded: cost of all that is on record about each protected silo, this fit included, by client id; empty if silos
        are not protected.
    """

    values: Arrays
    chosen: np.ndarray | None
    epsilons: Mapping[str, float]
    noise_multipliers: Mapping[str, float]
    recorded: Mapping[str, Composed]

    def each(self, models: PersonalModels, client_ids: Sequence[str]) -> dict[str, Any]:
        """Returns each client's row by client id: all arrays of a new row, or the number of an existing row."""
        if self.chosen is not None:
            return dict(zip(client_ids, map(int, self.chosen), strict=True))
        start = {name: stack[GLOBAL_ROW] for name, stack in models.stacked.items()}
        return {
            client_id: {**start, **{name: values[place] for name, values in self.values.items()}}
            for place, client_id in enumerate(client_ids)
        }


def fit_new_rows(
    config: ExperimentConfig,
    models: PersonalModels,
    new: NewClients,
    settings: FitSettings,
    key: RunKey,
    progress: Progress,
) -> NewRows:
    """Fits new clients' rows; if clients share the models of clusters, chooses one of these models for each client.

    Guarantee: with a budget, each row is (epsilon, delta)-DP for its client's examples, and the cost is on record in
      the experiment's folder and in the registry before anything is computed from the examples. A fit under the plan
      `none`, which has no privacy, is on record as well.
    Assumes: shared weights, the global model and the models of clusters are public, or have been made private; the key
      is secret and new.

    Raises:
      ConfigError, BudgetError, DataError: the errors of `new_clients.costs`; ConfigError also if a fit diverges.
    """
    privacy, ledger, recorded, chosen = config.privacy, None, {}, None
    plan, epsilon = None, math.inf
    model = model_of_rows(models, list(models.stacked) if settings.is_choice else fitted_names(models))
    if settings.budget is not None and settings.is_choice:
        epsilon, ledger = plan_selection(privacy, settings.budget, new.num_examples)
    elif settings.budget is not None:
        plan, ledger = plan_gradients(
            privacy,
            settings.budget,
            settings.steps,
            new.num_examples,
            model.num_parameters(),
            batch_size=settings.batch_size,
            clip_norm=settings.clip_norm,
        )
    if ledger is not None:
        recorded = put_on_record(config, new, ledger)
    elif not privacy.is_private:
        # Rows of users under privacy.kind user are made without noise, too, and are for those users alone.
        put_on_record(config, new, None)
    seeds = key.client_seeds(1, list(new.client_ids))
    if settings.is_choice:
        selector = build_selector(model, privacy.selection_loss_bound, privacy.generator)
        chosen = _select(selector, model, models, new, epsilon, seeds, progress)
        values = {name: stack[chosen] for name, stack in models.stacked.items()}
    else:
        estimator = plan.estimator(model) if plan else build_minibatch(model, settings.batch_size)
        mechanism = plan.client_mechanism(new.client_ids) if plan else {}
        steps, rate = settings.steps, settings.learning_rate
        values = _finite(new, fit_rows(model, new.train, estimator, steps, rate, mechanism, seeds, progress))
    return NewRows(
        values,
        chosen,
        {client_id: ledger.epsilon(client_id).best for client_id in new.client_ids} if ledger else {},
        {client_id: plan.mechanisms[client_id].noise_multiplier for client_id in new.client_ids} if plan else {},
        recorded,
    )


def measure(
    models: PersonalModels, held_out: Sequence[ClientExamples], rows: NewRows
) -> tuple[list[Metrics], list[Metrics]]:
    """Returns clients' mean metrics on held-out examples: a list for the global model, and one for clients' own models.

    The metrics are exact, not private. For a client without held-out examples, they are None.
    """
    places = [place for place, own in enumerate(held_out) if len(own.y)]
    model = model_of_rows(models, list(rows.values))
    own_rows = {name: values[places] for name, values in rows.values.items()}

    def of(chosen: Arrays | None) -> list[Metrics]:
        measured = measure_rows(model, [held_out[place] for place in places], chosen)
        found: list[Metrics] = [None] * len(held_out)
        for number, place in enumerate(places):
            found[place] = {name: float(values[number]) for name, values in measured.items()}
        return found

    return of(None), of(own_rows)


def _select(
    selector: Callable[..., Any],
    model: Model,
    models: PersonalModels,
    new: NewClients,
    epsilon: float,
    seeds: np.ndarray,
    progress: Progress,
) -> np.ndarray:
    """Returns the row of the cluster that fits each client best, selected with `epsilon`; inf gives the exact best."""
    select = tf.function(selector, reduce_retracing=True, autograph=False)
    first = GLOBAL_ROW + 1
    candidates = {name: tf.constant(stack[first:]) for name, stack in models.stacked.items()}
    chosen = np.zeros(len(new.client_ids), np.int32)
    for places, (x, y, num_examples) in stacks(new.train, model):
        data = {"x": tf.constant(x), "y": tf.constant(y), "num_examples": tf.constant(num_examples)}
        epsilons = tf.fill([len(places)], tf.constant(epsilon, tf.float32))
        chosen[places] = first + select(candidates, data, epsilons, tf.constant(seeds[places])).numpy()
        progress(len(places))
    return chosen


def _finite(new: NewClients, rows: Arrays) -> Arrays:
    for values in rows.values():
        bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if bad.size:
            raise ConfigError(
                f"the fit of client {new.client_ids[bad[0]]!r} diverged: give a smaller --learning-rate, or scale the "
                "client's examples like the examples of training"
            )
    return rows
