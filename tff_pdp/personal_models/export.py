"""Exports the personal models of a trained method's clients as SavedModels, with a model card and a privacy report."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from serving.export.exporter import export_models
from serving.export.model_checks import LayoutSize, estimate
from serving.export.per_client import export_per_client, only_client
from serving.export.versions import hold
from serving.verify.fresh_process import FreshProcess
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import experiment_engine
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.experiment.model import model_seed
from tff_pdp.lock import only_writer
from tff_pdp.personal_models.model_card import check_leaves_out_nobody, exported_ids, ids_and_settings
from tff_pdp.personal_models.served import PER_CLIENT, ServedModels, served_models
from tff_pdp.personal_models.trained_clients import global_model_of, trained_clients
from tff_pdp.privacy.facts import SiloCosts, SiloFacts
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.statement import export_text, not_covered, objects_content, statement
from tff_pdp.reports.words import plain
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.client_store.states import close_states, is_store
from tff_pdp.training.counted import cost_of_all_runs
from tff_pdp.training.evaluate import load_trained
from tff_pdp.training.privacy_facts import claim_of_run, facts_of
from tff_pdp.training.record.all_runs import AllRuns, Composed
from tff_pdp.training.record.charges import run_id_of


@dataclasses.dataclass(frozen=True)
class Exported:
    """An export that was written.

    Attributes:
      versions: folder of each new version, by model name: one for all clients, or one for each client.
      layout: layout of the export; where `tff_pdp.experiment.config.Export.layout` is `auto`, the chosen layout.
      size: approximate size of one version, as in the version's manifest.
      sizes: approximate number of bytes of all weights, by possible layout.
    """

    versions: Mapping[str, Path]
    layout: str
    size: LayoutSize
    sizes: Mapping[str, int]

    @property
    def version(self) -> Path:
        """Returns the folder of the only new version; raises ValueError if each client has a version of its own."""
        (version,) = self.versions.values()
        return version

    def layout_text(self) -> str:
        """Describes in one line the layout, and the size of all weights in each possible layout."""
        by_size = sorted(self.sizes, key=self.sizes.__getitem__)
        sizes = ", ".join(f"{name} {plain(self.sizes[name] / 1e6)} MB" for name in by_size)
        return f"{self.layout} (weights take about: {sizes})"


def export_experiment(config: ExperimentConfig, *, drop_added: bool = False) -> Exported:
    """Exports the method that the experiment's section `export` names.

    Args:
      config: the experiment.
      drop_added: whether the new version may leave out clients, and fits of clients, that `personalize` has added.

    Raises:
      ConfigError: the method has not been trained, the layout is not possible for it, or the models must not leave the
        silos (`check_may_leave`).
      ServingError: added clients would be lost, the key that hashes clients' ids is missing or wrong, or the export
        failed its checks; nothing was published.
      DataError: another process writes to the run's folder, or a file in this folder is damaged.

    >>> export_experiment(config).layout
    'stacked'
    """
    check_may_leave(config)
    # The fresh process is first: it imports TensorFlow while this process loads and checks.
    with FreshProcess() as process, only_writer(config.algorithm_folder(config.export.algorithm)):
        method, state = load_trained(config, config.export.algorithm)
        exported_id = exported_ids(config)
        with contextlib.ExitStack() as stack:
            stack.callback(close_states, state.client_states)
            stack.enter_context(experiment_engine(config, calls=None if is_store(state.client_states) else 1))
            trained = trained_clients(method, state, model_seed(config), exported_id)
            served = served_models(trained, config.export.layout)
        class_names = method.clients.manifest.class_names
        served = dataclasses.replace(served, models=dataclasses.replace(served.models, class_names=class_names))
        all_runs = cost_of_all_runs(config, method)
        is_divided = served.layout == PER_CLIENT
        report = _privacy_report(config, method, state, exported_id, is_divided=is_divided, all_runs=all_runs)
        card = _model_card(method, state, served, report) | {
            "title": config.title,
            **ids_and_settings(config, exported_id),
            "run": run_id_of(config.algorithm_folder(config.export.algorithm)),
        }
        name, folder = config.export.model_name, config.export_folder
        content: dict[str, Any] = {"privacy_report": report, "model_card": card, "references": served.references}
        content["process"] = process
        if is_divided:
            own = export_per_client(folder.parent, served.models, model_name=name, **content)
            versions = {f"{name}.{client_id}": version for client_id, version in own.items()}
            size = estimate(only_client(served.models, 0) if served.models.client_ids else served.models)
        else:
            with hold(folder) as held:
                # Nobody adds clients from here on.
                if not drop_added:
                    check_leaves_out_nobody(folder)
                version = export_models(held, served.models, model_name=name, **content)
            versions, size = {name: version}, estimate(served.models)
        return Exported(versions, served.layout, size, served.sizes)


def check_may_leave(config: ExperimentConfig) -> None:
    """Checks that personal models are not adapted to records without noise while others rely on a budget.

    Raises:
      ConfigError: the experiment's `privacy.synthetic.adaptation` is `non_private`.
    """
    synthetic = config.privacy.synthetic
    if synthetic is not None and not synthetic.is_adapted_privately:
        raise ConfigError(
            "personal models cannot be exported: privacy.synthetic.adaptation is non_private, so each model was "
            "trained on its silo's records without clip and noise, and has no guarantee. The silos' budgets cover "
            "synthetic data and the shared model alone. Set privacy.synthetic.adaptation to dp_sgd, and train again"
        )


def _model_card(
    method: Method, state: Checkpoint, served: ServedModels, privacy_report: Mapping[str, Any]
) -> dict[str, Any]:
    unknown_get = global_model_of(method, is_divided=served.layout == PER_CLIENT)
    return {
        "algorithm": method.algorithm.name,
        "model": {"name": method.model.name, "parameters": method.model.num_parameters()},
        "rounds": state.round_number,
        "clients": len(served.models.client_ids),
        "unknown_clients": f"answered by {unknown_get}, with personalized = false",
        **{
            key: privacy_report[key]
            for key in ("claim", "claim_reason", "composed", "budget_exposure", "personal_models")
        },
        "layout": served.layout,
        **({} if served.models.class_names is None else {"class_names": list(served.models.class_names)}),
    }


def _privacy_report(
    config: ExperimentConfig,
    method: Method,
    state: Checkpoint,
    exported_id: Callable[[str], str] = str,
    *,
    is_divided: bool = False,
    all_runs: AllRuns | None = None,
) -> dict[str, Any]:
    """Builds the privacy report: epsilon and delta of every silo, or once for all users, and the statement.

    The report's figures are for this method's models alone; `composed` is for all runs on the same records so far. If
    each client has an export of its own (`is_divided`), all these exports have the same report, which names no client.
    """
    claim, reason = claim_of_run(method, state, None if is_divided else exported_id)
    facts = facts_of(config, [(method, state)])
    facts = replace(facts, methods=(replace(facts.methods[0], claim=claim, claim_reason=reason),))
    if isinstance(facts, SiloFacts):
        by_scope = all_runs.by_scope if all_runs else {}
        # There are no budgets under `privacy.kind: none`.
        costs = _silo_report(facts.silos if method.plan.budgets else (), exported_id, is_divided, by_scope)
        silos = [replace(silo, id="" if is_divided else exported_id(silo.id)) for silo in facts.silos]
        # In the order of the data set, pseudonyms would reveal the silos behind them.
        facts = replace(facts, silos=tuple(sorted(silos, key=lambda silo: silo.id)))
    else:
        spent = facts.most_spent if math.isfinite(facts.most_spent) else None
        costs = {"epsilon": spent, "delta": facts.largest_delta, "noise_to_signal": facts.worst.noise_to_signal}
    content = {
        "unit": method.plan.unit,
        "adjacency": method.plan.adjacency.value,
        "claim": claim,
        "claim_reason": reason,
        "composed": all_runs
        and {
            **all_runs.worst.to_dict(claim, reason),
            "in_other_folders": all_runs.elsewhere,
            "taken_for_granted": list(all_runs.notes),
        },
        "budget_exposure": facts.budget_exposure,
        **objects_content(facts),
        **costs,
        "not_covered": not_covered(are_users=facts.are_users, is_searched=method.plan.search is not None),
        "personal_models": export_text(claim, method.plan.row_influence, are_users=facts.are_users),
        "paragraphs": [paragraph._asdict() for paragraph in statement(facts).paragraphs],
    }
    return json_safe(content)


def _silo_report(
    costs: Iterable[SiloCosts], exported_id: Callable[[str], str], is_divided: bool, by_scope: Mapping[str, Composed]
) -> dict[str, Any]:
    """Lists the spending of every silo; where silos have exports of their own, only the largest spending of a silo."""
    silos = [
        {
            "id": exported_id(silo.id),
            "claim": silo.claim,
            "claim_reason": silo.claim_reason,
            "epsilon": silo.epsilon_spent if math.isfinite(silo.epsilon_spent) else None,
            "delta": silo.delta,
            "composed": by_scope[silo.id].to_dict(silo.claim, silo.claim_reason) if by_scope else None,
        }
        for silo in costs
    ]
    # In the order of the data set, pseudonyms would reveal the silos behind them.
    silos.sort(key=lambda silo: silo["id"])
    if not is_divided:
        return {"silos": silos}
    if not silos:
        return {}
    epsilons = [silo["epsilon"] for silo in silos]
    return {
        "epsilon_at_most": None if None in epsilons else max(epsilons),
        "delta_at_most": max(silo["delta"] for silo in silos),
    }
