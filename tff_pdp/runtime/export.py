"""A trained method -> one SavedModel that holds every client's personal model."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from serving.export import export_personalized
from tff_pdp.config import ExperimentConfig
from tff_pdp.models.base import Model
from tff_pdp.models.scaled_inputs import SCALE, SHIFT, with_scaled_inputs
from tff_pdp.privacy.silo_example_plan import SiloExamplePlan
from tff_pdp.privacy.user_plan import UserPlan
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.statement_parts import is_private
from tff_pdp.reports.user_texts import NO_NOISE, NOT_COVERED, export_text
from tff_pdp.runtime.client_states import close_states
from tff_pdp.runtime.experiment import experiment_engine
from tff_pdp.runtime.method import Method
from tff_pdp.runtime.results import load_trained
from tff_pdp.runtime.rounds import ready_states
from tff_pdp.runtime.user_results import user_costs

NUM_EXAMPLE_INPUTS = 8


def export_experiment(config: ExperimentConfig) -> Path:
    """Exports the experiment's chosen method and returns the version's folder.

    Raises:
      ConfigError: the method has not been trained.
      ServingError: the export failed its checks; nothing was published.
    """
    method, state = load_trained(config, config.export.algorithm)
    with contextlib.ExitStack() as stack:
        stack.callback(close_states, state.client_states)
        stack.enter_context(experiment_engine(config))
        served = served_model(method, state, config.model.seed)
    privacy_report = _privacy_report(method, state)
    model_card = {
        "title": config.title,
        "algorithm": method.algorithm.name,
        "model": {"name": method.model.name, "parameters": method.model.num_parameters()},
        "rounds": state.round_number,
        "clients": len(served.personal_weights),
        "client_ids": "in plain text, as in the client dataset",
        "unknown_clients": f"answered by {_global_name(method)}, with personalized = false",
    }
    if method.user_plan is not None:
        model_card["personal_models"] = privacy_report["personal_models"]
    return export_personalized(
        config.export_folder,
        served.model,
        served.global_weights,
        served.personal_weights,
        # Public inputs: a served file must not carry anyone's examples.
        example_inputs=np.random.default_rng(0)
        .uniform(size=(NUM_EXAMPLE_INPUTS, *method.model.input_shape))
        .astype(np.float32),
        model_name=config.export.model_name,
        privacy_report=privacy_report,
        model_card=model_card,
    )


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A trained method as it is served: a model that takes raw examples, and its weights.

    Attributes:
      model: the trained model, with the scaling of its inputs where the experiment has one.
      personal_weights: by client id.
      global_weights: what unknown clients get.
    """

    model: Model
    personal_weights: dict[str, dict[str, np.ndarray]]
    global_weights: dict[str, np.ndarray]


def served_model(method: Method, state: Any, model_seed: int = 0) -> ServedModel:
    """Returns what is served of a trained method. Needs an engine.

    Unknown clients get the shared model or, of a method that has none, the mean of silos' personal ones, and where
    clients are users the initial model; where silos scale their features, by the mean of their scalings.

    Args:
      method: what was trained.
      state: after the last round.
      model_seed: of the initial weights.
    """
    personal = personal_weights(method, state)
    shared = _global_weights(method, state, personal, model_seed)
    if not method.scalings:
        return ServedModel(method.model, personal, shared)
    scalings = {
        client_id: {SHIFT: scaling.shift, SCALE: scaling.scale} for client_id, scaling in method.scalings.items()
    }
    return ServedModel(
        with_scaled_inputs(method.model),
        {client_id: {**scalings[client_id], **weights} for client_id, weights in personal.items()},
        {**_mean(scalings), **shared},
    )


def personal_weights(method: Method, state: Any) -> dict[str, dict[str, np.ndarray]]:
    """Returns each client's personal weights by client id. Needs an engine."""
    found = {}
    for places, states in ready_states(method, state, method.examples("train")):
        weights = method.process.personalise(state.server_state, states)
        for place, one in zip(places, weights, strict=True):
            found[state.client_ids[place]] = {name: np.asarray(array) for name, array in one.items()}
    return found


def _global_weights(
    method: Method, state: Any, personal: dict[str, dict[str, np.ndarray]], model_seed: int
) -> dict[str, np.ndarray]:
    """What unknown clients get: the shared model, or, for a method that has none, what may be given to anyone.

    Guarantee: it reveals no more of anyone than what training releases of them.
    """
    if method.algorithm.global_model is not None:
        shared = method.algorithm.global_model(state.server_state["algorithm"])
        return {name: np.asarray(array) for name, array in shared.items()}
    if method.user_plan is not None:
        # Personal models of users carry no noise, nor would their mean.
        return dict(method.model.init(model_seed))
    # Each personal model is private for its own silo's records, so their mean is post-processing.
    return _mean(personal)


def _global_name(method: Method) -> str:
    """What `_global_weights` returns, in words."""
    is_initial = method.algorithm.global_model is None and method.user_plan is not None
    return "the untrained initial model" if is_initial else "the global model"


def _mean(weights: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = next(iter(weights.values()))
    return {name: np.mean([one[name] for one in weights.values()], axis=0) for name in names}


def _privacy_report(method: Method, state: Any) -> dict[str, Any]:
    """What the export says of its privacy: epsilon and delta of every silo, or once for all users."""
    plan = method.user_plan
    bare, costs = _silo_report(method.silo_plan, state) if plan is None else _user_report(plan, state)
    claim, reason = method.plan.claim, method.plan.claim_reason
    if state.run_key.is_test_only:
        claim, reason = "none", "all noise follows from a fixed seed"
    elif bare:
        claim, reason = "none", bare
    content = {
        "unit": method.plan.unit,
        "adjacency": method.plan.adjacency.value,
        "claim": claim,
        "claim_reason": reason,
        **costs,
    }
    if plan is not None:
        content["personal_models"] = export_text(is_private(claim))
    return json_safe(content)


def _silo_report(plan: SiloExamplePlan, state: Any) -> tuple[str, dict[str, Any]]:
    """Who trained without noise, if anyone did; what every silo spent, and what that does not cover."""
    bare = [client_id for client_id, mechanism in plan.mechanisms.items() if mechanism.noise_multiplier == 0]
    silos = [
        {
            "id": client_id,
            "epsilon": plan.guaranteed_epsilon(state.ledger, client_id).best,
            "delta": budget.delta,
        }
        for client_id, budget in plan.budgets.items()
    ]
    not_covered = (
        "validation and test examples, the choice of hyper-parameters, other methods trained beside it"
        if plan.search is None
        else "test examples, the choice of hyper-parameters beyond the search, other methods trained beside it"
    )
    without_noise = f"{len(bare)} silos trained without noise, for example {bare[0]}" if bare else ""
    return without_noise, {"silos": silos, "not_covered": not_covered}


def _user_report(plan: UserPlan, state: Any) -> tuple[str, dict[str, Any]]:
    """Why there is no epsilon, if so; what every user spent, and what that does not cover."""
    costs = user_costs(plan, state)
    return NO_NOISE if costs.is_bare else "", {
        "epsilon": costs.epsilon_spent,
        "delta": costs.delta,
        "noise_to_signal": costs.noise_to_signal,
        "not_covered": NOT_COVERED,
    }
