"""Reads the newest version of an experiment's export, and publishes the next version, with clients added or removed.

The next version's privacy report and model card say that clients were added or removed, and how.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.export.expectations import expectations_of_version
from serving.export.exporter import export_models
from serving.export.model_checks import check_client_ids
from serving.export.stored_models import read_models, with_clients, without_clients
from serving.export.versions import HeldBasePath, hold
from serving.models import GLOBAL_ROW, HYPERNETWORK, PersonalModels
from serving.saved_model import layout
from serving.verify.fresh_process import Expectation, FreshProcess
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.phases import ADAPTATION, in_phases
from tff_pdp.errors import ConfigError, ServingError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.hparams import build_algorithm
from tff_pdp.experiment.model import build_model, model_seed
from tff_pdp.models.derived import with_scaled_inputs
from tff_pdp.personal_models.model_card import check_settings, newest_version, served_ids
from tff_pdp.personal_models.new_clients.costs import claim_of_fit
from tff_pdp.personal_models.served import MAX_REFERENCES, PER_CLIENT, weights_from_states
from tff_pdp.personal_models.trained_clients import as_arrays
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.plans.plan import PlanSettings
from tff_pdp.reports.content import json_safe
from tff_pdp.training.record.all_runs import Composed


@dataclasses.dataclass(frozen=True)
class ExportedModels:
    """A version of an export that clients can be added to.

    Attributes:
      version: folder of the version.
      held: folder of all versions, locked so that no other process publishes a version in the meantime.
      models: models of all clients.
      answers: answers for the global model (id "") and for some clients, by id; the next version must give them, too.
      algorithm: algorithm that trained the models.
      hparams: hyper-parameters of the algorithm, with defaults filled in.
      served_id: function from a client's id to the client's id in requests.
      privacy_report: privacy report of the version.
      model_card: model card of the version.
    """

    version: Path
    held: HeldBasePath
    models: PersonalModels
    answers: Mapping[str, Expectation]
    algorithm: Algorithm
    hparams: Mapping[str, Any]
    served_id: Callable[[str], str]
    privacy_report: Mapping[str, Any]
    model_card: Mapping[str, Any]

    def check_new(self, client_ids: Sequence[str], *, replace: bool) -> list[str]:
        """Returns the ids that these clients will have in requests, if they can be added.

        Raises:
          ServingError: a client is in the export already and `replace` is false, or an id cannot be exported.
        """
        served_as = [self.served_id(client_id) for client_id in client_ids]
        known = set(self.models.client_ids)
        if not replace:
            for client_id, served_id in zip(client_ids, served_as, strict=True):
                if served_id in known:
                    raise ServingError(
                        f"Client {client_id!r} is in {self.version} already. Give --replace to fit it again, from the "
                        "global model; a silo pays again"
                    )
        # Ids that cannot be exported are refused before a silo has paid.
        check_client_ids(dataclasses.replace(self.models, client_ids=served_as))
        return served_as


@contextlib.contextmanager
def adding_to_export(config: ExperimentConfig) -> Iterator[ExportedModels]:
    """Reads the newest version of the experiment's export; no other process can export until the block ends.

    Raises:
      ConfigError: the export was made with another configuration, or its layout does not allow to add clients.
      ServingError: there is no version, or the newest version cannot be used.
      DataError: another process exports at the same time.
    """
    base_path = config.export_folder
    is_missing = newest_version(base_path) is None
    is_divided = any(path.name.startswith(f"{base_path.name}.") for path in base_path.parent.glob("*/"))
    if config.export.layout == PER_CLIENT or (is_missing and is_divided):
        raise ConfigError(
            f"{base_path}: clients can be added only to an export that holds all clients, but here every "
            f"client has an export of its own (export.layout {PER_CLIENT}, or auto where one would be too large). "
            "Export with export.layout stacked, then add clients"
        )
    if is_missing:
        raise ServingError(f"{base_path} holds no version to add clients to: run `tff-pdp export` first")
    with hold(base_path) as held:
        yield _read_newest(config, held)


def publish_with_clients(
    config: ExperimentConfig,
    exported: ExportedModels,
    rows: Mapping[str, Any],
    costs: Mapping[str, Composed],
    *,
    replace: bool,
) -> Path:
    """Publishes the next version, which has the rows of further clients.

    Args:
      config: the experiment.
      exported: the newest version, as `adding_to_export` yields it.
      rows: maps a client's id in requests to its row: the arrays of a new row, or the number of an existing row.
      costs: cost of all that is on record about each protected silo, by id in requests; empty if none is protected.
      replace: whether clients that are in the newest version already may get a new row.

    Raises:
      ServingError: the new version failed its checks, or answers other clients differently from the previous version;
        nothing was published.
    """
    # The order of clients would tell anyone who knows the added clients who is behind a pseudonym.
    rows, costs = dict(sorted(rows.items())), dict(sorted(costs.items()))
    models = with_clients(exported.models, rows, replace=replace)
    report = _report_with(exported.privacy_report, costs, config.privacy.generator)
    card = _card_with(exported.model_card, report, exported.version, rows, num_clients=len(models.client_ids))
    with FreshProcess() as process:
        return export_models(
            exported.held,
            models,
            model_name=config.export.model_name,
            privacy_report=report,
            model_card=card,
            process=process,
            references=_references(exported.models, rows),
            further_expectations=[one for client_id, one in exported.answers.items() if client_id not in rows],
        )


def publish_without(config: ExperimentConfig, exported: ExportedModels, served_id: str, remains: str) -> Path:
    """Publishes the next version without one client, whose requests the global model answers from then on.

    Args:
      config: the experiment.
      exported: the newest version, as `adding_to_export` yields it.
      served_id: id of the client in requests.
      remains: sentence for the privacy report that states what remains of removed clients.

    Raises:
      ServingError: the new version failed its checks, or answers other clients differently from the previous version;
        nothing was published.
    """
    models = without_clients(exported.models, {served_id})
    before = {key: value for key, value in exported.privacy_report.items() if key != "paragraphs"}
    silos = [silo for silo in before.get("silos", []) if silo["id"] != served_id]
    report = {**before, **({"silos": silos} if "silos" in before else {}), "clients_removed": remains}
    card = {
        **exported.model_card,
        "clients": len(models.client_ids),
        "clients_removed": exported.model_card.get("clients_removed", 0) + 1,
        "made_from_version": int(exported.version.name),
    }
    others = [one for client_id, one in exported.answers.items() if client_id != served_id]
    asked = exported.answers[""]
    removed_id = np.array([served_id] * len(asked.inputs["client_id"]), object)
    as_unknown = dataclasses.replace(asked, inputs={**asked.inputs, "client_id": removed_id})
    with FreshProcess() as process:
        return export_models(
            exported.held,
            models,
            model_name=config.export.model_name,
            privacy_report=report,
            model_card=card,
            process=process,
            references=_references(exported.models, {}),
            further_expectations=[*others, as_unknown],
        )


def _read_newest(config: ExperimentConfig, held: HeldBasePath) -> ExportedModels:
    version = newest_version(held)
    assert version is not None
    card = layout.read_document(version, layout.MODEL_CARD_FILE)
    report = layout.read_document(version, layout.PRIVACY_REPORT_FILE)
    check_settings(config, version, card)
    _check_plan(config.privacy, version, report)
    model, name = build_model(config), config.export.algorithm
    algorithm, hparams = build_algorithm(
        name,
        config.algorithms[name],
        num_clients=1,
        rounds=config.federated_rounds,
        head=model.head,
        further=ADAPTATION if config.privacy.synthetic else None,
    )
    if config.privacy.synthetic:
        # A new client has no synthetic data, and adapts the shared model to its records at once.
        algorithm = in_phases(algorithm, federated_rounds=config.privacy.synthetic.rounds, num_clients=1).adaptation
    is_scaled = not config.privacy.feature_scaling.changes_nothing
    make_weights = None
    if layout.read_manifest(version).get("layout") == HYPERNETWORK and algorithm.export.served_from_state:
        message = algorithm.broadcast(algorithm.init_server(model.init(model_seed(config))))
        make_weights = weights_from_states(algorithm, message, algorithm.init_client(message), is_scaled=is_scaled)
    try:
        models = read_models(version, with_scaled_inputs(model) if is_scaled else model, make_weights)
        answers = expectations_of_version(version, models)
    except ServingError as error:
        raise ServingError(
            f"{version} is the newest version, and no clients can be added to it: {error} An older version may "
            "lack clients of this version; to add clients to the older version all the same, move this one away"
        ) from error
    return ExportedModels(
        version=version,
        held=held,
        models=models,
        answers=answers,
        algorithm=algorithm,
        hparams=hparams,
        served_id=served_ids(config, version, card),
        privacy_report=report,
        model_card=card,
    )


def _check_plan(privacy: PlanSettings, version: Path, report: Mapping[str, Any]) -> None:
    """Refuses a plan other than that of training, under which the other rows were made; the report names the latter."""
    asked = ("user" if privacy.are_users else "silo_example", privacy.is_private and not privacy.are_users)
    if asked != (report.get("unit"), bool(report.get("silos"))):
        raise ConfigError(
            f"{version} was not trained with privacy.kind {privacy.kind}: its unit is {report.get('unit')!r}, "
            f"{'with' if report.get('silos') else 'without'} budgets of silos. Set privacy.kind as it was in training"
        )


def _references(models: PersonalModels, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights of the global model and of some new clients, whose answers the export must give."""
    some = {"": GLOBAL_ROW, **dict(list(rows.items())[:MAX_REFERENCES])}
    return {
        client_id: as_arrays(models.weights_of(row) if isinstance(row, Mapping) else models.weights_of_row(row))
        for client_id, row in some.items()
    }


_SILOS_ADDED = (
    "rows of silos that were added after training are made by DP-SGD or a private selection on the silo's own examples "
    "alone; their epsilon is that of everything on record of the silo"
)
_NOT_PROTECTED = (
    "rows of clients that were added after training are made of the client's own examples without noise: whoever sees "
    "such a row can learn about the client that the row belongs to, but no more than before about any other client"
)


def _report_with(before: Mapping[str, Any], costs: Mapping[str, Composed], generator: Generator) -> dict[str, Any]:
    """Returns the privacy report with new silos' costs beside other silos'; for other clients, with their protection.

    `costs` has the composed cost on record of each new silo, and is empty if clients are users or nothing is protected.
    """
    # The paragraphs are only about clients of training.
    before = {key: value for key, value in before.items() if key != "paragraphs"}
    if not costs:
        return {**before, "clients_added_after_training": _NOT_PROTECTED}
    claim_of_new = claim_of_fit(generator)
    new = [
        {"id": client_id, **cost.to_dict(*claim_of_new), "added_after_training": True}
        for client_id, cost in costs.items()
    ]
    others = [silo for silo in before.get("silos", []) if silo["id"] not in costs]
    bare = sum(cost.why_no_bound != "" for cost in costs.values())
    claim = {"claim": "none", "claim_reason": f"no epsilon holds for {bare} silos that were added"} if bare else {}
    return json_safe({**before, **claim, "silos": [*others, *new], "clients_added_after_training": _SILOS_ADDED})


def _card_with(
    before: Mapping[str, Any], report: Mapping[str, Any], version: Path, fitted: Collection[str], *, num_clients: int
) -> dict[str, Any]:
    """Returns the model card of the version that is made from another version, `version`, whose card is `before`.

    `report` is the new version's report, as in `_report_with`; `fitted` has the ids of fitted clients; `num_clients` is
    the number of all clients.
    """
    num_new = num_clients - before["clients"]
    return {
        **before,
        **{key: report[key] for key in ("claim", "claim_reason")},
        "clients": num_clients,
        "clients_not_in_training": before.get("clients_not_in_training", 0) + num_new,
        "clients_fitted_after_training": before.get("clients_fitted_after_training", 0) + len(fitted),
        "made_from_version": int(version.name),
    }
