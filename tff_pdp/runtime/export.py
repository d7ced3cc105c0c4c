"""A trained method -> SavedModels that hold every client's personal model, and say what they are."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serving.client_ids import ClientIdHash
from serving.export.exporter import export_models
from serving.export.per_client import export_per_client
from tff_pdp.config import ExperimentConfig
from tff_pdp.privacy.contact_graph_plan import ContactGraphPlan
from tff_pdp.privacy.silo_example_plan import SiloExamplePlan
from tff_pdp.privacy.user_plan import UserPlan
from tff_pdp.reports import silo_texts, user_texts
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.numbers import plain
from tff_pdp.reports.silo_units import unit_of
from tff_pdp.reports.statement_parts import is_private
from tff_pdp.runtime.client_states import close_states
from tff_pdp.runtime.experiment import experiment_engine
from tff_pdp.runtime.method import Method
from tff_pdp.runtime.results import load_trained
from tff_pdp.runtime.served_models import PER_CLIENT, ServedModels, served_models
from tff_pdp.runtime.user_results import user_costs

_CLIENT_IDS = {
    "hashed": "keyed hashes (HMAC-SHA256, 32 hex digits) of the ids in the client dataset; the export lacks the key",
    "plain": "in plain text, as in the client dataset",
}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      versions: folders of the new versions by the name of the model: one, or one for every client.
      layout: how personal models lie in it; of `tff_pdp.config.EXPORT_LAYOUTS`, never `auto`.
      sizes: about how many bytes weights take in each layout that is possible.
    """

    versions: Mapping[str, Path]
    layout: str
    sizes: Mapping[str, int]

    @property
    def version(self) -> Path:
        """The folder of the new version, where all clients are in one.

        Raises:
          ValueError: they are not.
        """
        (version,) = self.versions.values()
        return version

    def layout_text(self) -> str:
        """The layout, and what all that are possible would take, for a reader."""
        by_size = sorted(self.sizes, key=self.sizes.__getitem__)
        sizes = ", ".join(f"{name} {plain(self.sizes[name] / 1e6)} MB" for name in by_size)
        return f"{self.layout} (weights take about: {sizes})"


def export_experiment(config: ExperimentConfig) -> Exported:
    """Exports the experiment's chosen method.

    Raises:
      ConfigError: the method has not been trained, or the layout is not possible for it.
      ServingError: the export failed its checks; nothing was published.
    """
    method, state = load_trained(config, config.export.algorithm)
    exported_id = exported_ids(config)
    with contextlib.ExitStack() as stack:
        stack.callback(close_states, state.client_states)
        stack.enter_context(experiment_engine(config))
        served = served_models(
            method, state, model_seed=config.model.seed, layout=config.export.layout, exported_id=exported_id
        )
    report = _privacy_report(method, state, exported_id, is_divided=served.layout == PER_CLIENT)
    card = _model_card(config, method, state, served, report)
    name, folder = config.export.model_name, config.export_folder
    if served.layout == PER_CLIENT:
        own = export_per_client(
            folder.parent,
            served.models,
            model_name=name,
            privacy_report=report,
            model_card=card,
            references=served.references,
            progress=True,
        )
        versions = {f"{name}.{client_id}": version for client_id, version in own.items()}
    else:
        versions = {
            name: export_models(
                folder,
                served.models,
                model_name=name,
                privacy_report=report,
                model_card=card,
                references=served.references,
            )
        }
    return Exported(versions, served.layout, served.sizes)


def exported_ids(config: ExperimentConfig) -> Callable[[str], str]:
    """What the experiment's export has in place of a client's id; makes the key of hashes, where there is none.

    Raises:
      ServingError: the key is damaged.
    """
    return str if config.export.client_ids == "plain" else ClientIdHash.load_or_create(config.client_id_key)


def _model_card(
    config: ExperimentConfig, method: Method, state: Any, served: ServedModels, privacy_report: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "title": config.title,
        "algorithm": method.algorithm.name,
        "model": {"name": method.model.name, "parameters": method.model.num_parameters()},
        "rounds": state.round_number,
        "clients": len(served.models.client_ids),
        "client_ids": _CLIENT_IDS[config.export.client_ids],
        "unknown_clients": f"answered by {_global_name(method)}, with personalized = false",
        "personal_models": privacy_report["personal_models"],
        "layout": {"name": served.layout, "bytes_about": dict(served.sizes)},
    }


def _global_name(method: Method) -> str:
    """What `_global_weights` returns, in words."""
    is_initial = method.algorithm.global_model is None and method.user_plan is not None
    return "the untrained initial model" if is_initial else "the global model"


def _privacy_report(
    method: Method, state: Any, exported_id: Callable[[str], str] = str, *, is_divided: bool = False
) -> dict[str, Any]:
    """What the export says of its privacy: epsilon and delta of every silo, or once for all users.

    Where each client has an export of its own (`is_divided`), it is the same in all of these, and names no client.
    """
    plan = method.user_plan
    if plan is None:
        bare, costs = _silo_report(method.silo_plan, state, exported_id, is_divided)
    else:
        bare, costs = _user_report(plan, state)
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
    if plan is None:
        unit = unit_of(method.plan.row_influence if isinstance(method.plan, ContactGraphPlan) else None)
        content["personal_models"] = silo_texts.export_text(is_private(claim), unit)
    else:
        content["personal_models"] = user_texts.export_text(is_private(claim))
    return json_safe(content)


def _silo_report(
    plan: SiloExamplePlan, state: Any, exported_id: Callable[[str], str], is_divided: bool
) -> tuple[str, dict[str, Any]]:
    """Who trained without noise, if anyone did; what every silo spent, and what that does not cover."""
    bare = sorted(exported_id(silo) for silo, mechanism in plan.mechanisms.items() if mechanism.noise_multiplier == 0)
    silos = [
        {
            "id": exported_id(client_id),
            "epsilon": plan.guaranteed_epsilon(state.ledger, client_id).best,
            "delta": budget.delta,
        }
        for client_id, budget in plan.budgets.items()
    ]
    # In the order of the budgets, pseudonyms would tell who they are.
    silos.sort(key=lambda silo: silo["id"])
    not_covered = (
        "validation and test examples, the choice of hyper-parameters, other methods trained beside it"
        if plan.search is None
        else "test examples, the choice of hyper-parameters beyond the search, other methods trained beside it"
    )
    without_noise = f"{len(bare)} silos trained without noise" if bare else ""
    if is_divided:
        largest = {f"{key}_at_most": max(silo[key] for silo in silos) for key in ("epsilon", "delta")}
        return without_noise, {**largest, "not_covered": not_covered}
    example = f", for example {bare[0]}" if bare else ""
    return without_noise + example, {"silos": silos, "not_covered": not_covered}


def _user_report(plan: UserPlan, state: Any) -> tuple[str, dict[str, Any]]:
    """Why there is no epsilon, if so; what every user spent, and what that does not cover."""
    costs = user_costs(plan, state)
    return user_texts.NO_NOISE if costs.is_bare else "", {
        "epsilon": costs.epsilon_spent,
        "delta": costs.delta,
        "noise_to_signal": costs.noise_to_signal,
        "not_covered": user_texts.NOT_COVERED,
    }
