"""The newest export of an experiment, read to be added to, and its next version."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from serving.client_ids import ClientIdHash
from serving.export.exporter import export_models
from serving.export.model_checks import check_client_ids
from serving.export.personal_models import GLOBAL_ROW, HYPERNETWORK, PersonalModels
from serving.export.stored_models import read_models, with_clients
from serving.export.versions import last_version
from serving.saved_model import layout
from tff_pdp.algorithms.base import Algorithm
from tff_pdp.config import ExperimentConfig, PrivacyConfig
from tff_pdp.errors import ConfigError, ServingError
from tff_pdp.models.base import Model, Weights
from tff_pdp.models.scaled_inputs import SCALE, SHIFT, with_scaled_inputs
from tff_pdp.privacy.feature_scaling import parse_feature_scaling
from tff_pdp.reports.content import json_safe
from tff_pdp.runtime.algorithm_settings import build_algorithm
from tff_pdp.runtime.experiment import build_model
from tff_pdp.runtime.new_silo_costs import RecordedCost
from tff_pdp.runtime.served_models import MAX_REFERENCES, PER_CLIENT, from_states
from tff_pdp.runtime.trained_clients import TrainedClients

_logger = logging.getLogger(__name__)

_HASHED_ID = re.compile("[0-9a-f]{32}")
_SILOS_ADDED = (
    "rows of silos that were added after training are made by DP-SGD on, or a private selection by, the silo's own "
    "examples alone; their epsilon is that of everything on record of the silo"
)
_NOT_PROTECTED = (
    "rows of clients that were added after training are made of the client's own examples without noise: whoever sees "
    "such a row can learn about its own client from it, and about nobody else more than before"
)


@dataclasses.dataclass(frozen=True)
class ExportedModels:
    """A version of an export, and what is needed to add to it.

    Attributes:
      version: its folder.
      number: the next version's, so that no version comes between unnoticed.
      models: all clients' models.
      algorithm: what trained them.
      hparams: its hyper-parameters, defaults filled in.
      served_id: a client's id in requests.
      privacy_report: as it lies in the version.
      model_card: the same.
    """

    version: Path
    number: int
    models: PersonalModels
    algorithm: Algorithm
    hparams: Mapping[str, Any]
    served_id: Callable[[str], str]
    privacy_report: Mapping[str, Any]
    model_card: Mapping[str, Any]

    def check_new(self, client_ids: Sequence[str], *, replace: bool) -> list[str]:
        """The clients' ids in requests.

        Raises:
          ServingError: one is in the export already and is not to be replaced, or cannot be exported.
        """
        served_as = [self.served_id(client_id) for client_id in client_ids]
        known = set(self.models.client_ids)
        if not replace:
            for client_id, served_id in zip(client_ids, served_as, strict=True):
                if served_id in known:
                    raise ServingError(
                        f"Client {client_id!r} is in {self.version} already. Give --replace to fit it again, from the "
                        "global model; a silo pays for that again"
                    )
        # What cannot be exported should not come to light after a silo has paid.
        check_client_ids(dataclasses.replace(self.models, client_ids=served_as))
        return served_as


def read_exported(config: ExperimentConfig) -> ExportedModels:
    """Reads the newest good version of the experiment's export.

    Raises:
      ConfigError: the configuration is of another experiment, or its layout cannot be added to.
      ServingError: there is no good version.
    """
    if config.export.layout == PER_CLIENT:
        raise ConfigError(
            f"export.layout {PER_CLIENT}: every client has an export of its own, which another client does not belong "
            "into. Export with layout auto to add clients"
        )
    model = build_model(config)
    name = config.export.algorithm
    algorithm, hparams = build_algorithm(
        name,
        config.algorithms[name],
        num_clients=1,
        rounds=config.training.rounds,
        head=model.head,
    )
    is_scaled = parse_feature_scaling(config.privacy.feature_scaling, model.input_shape).kind != "none"
    served_model = with_scaled_inputs(model) if is_scaled else model
    make_weights = _make_weights(algorithm, model, config.model.seed, is_scaled)
    number = last_version(config.export_folder) + 1 if config.export_folder.is_dir() else 1
    version, models = _newest_good(config, served_model, make_weights)
    card = _read_json(version / layout.MODEL_CARD_FILE)
    if card.get("algorithm") != name:
        raise ConfigError(
            f"{version} holds models of {card.get('algorithm')!r}, but export.algorithm is {name!r}: export again first"
        )
    report = _read_json(version / layout.PRIVACY_REPORT_FILE)
    _check_plan(config.privacy, version, report)
    is_hashed = config.export.client_ids == "hashed"
    if models.client_ids and is_hashed != all(_HASHED_ID.fullmatch(client_id) for client_id in models.client_ids):
        raise ConfigError(
            f"export.client_ids is {config.export.client_ids!r}, but the ids in {version} are "
            f"{'plain' if is_hashed else 'hashed'}: export again first"
        )
    return ExportedModels(
        version=version,
        number=number,
        models=models,
        algorithm=algorithm,
        hparams=hparams,
        served_id=ClientIdHash.load(config.client_id_key) if is_hashed else str,
        privacy_report=report,
        model_card=card,
    )


def publish_with_clients(
    config: ExperimentConfig,
    exported: ExportedModels,
    rows: Mapping[str, Any],
    costs: Mapping[str, RecordedCost],
    *,
    replace: bool,
) -> Path:
    """Publishes the next version, with these clients' rows.

    Args:
      config: the experiment.
      exported: the version that rows are added to.
      rows: by served id, arrays of all that a client owns, or the number of a row there is.
      costs: by served id, what is on record of silos that are protected; empty where clients are not.
      replace: replace clients that are there.

    Raises:
      ServingError: the new version failed its checks, or another was published meanwhile; nothing was published.
    """
    # Not in the order of clients, which would tell who is behind a pseudonym to whoever knows who was added.
    rows, costs = dict(sorted(rows.items())), dict(sorted(costs.items()))
    models = with_clients(exported.models, rows, replace=replace)
    return export_models(
        config.export_folder,
        models,
        model_name=config.export.model_name,
        privacy_report=_privacy_report(exported.privacy_report, costs),
        model_card=_model_card(exported, models, len(rows)),
        references=_references(exported.models, rows),
        version=exported.number,
    )


def _check_plan(privacy: PrivacyConfig, version: Path, report: Mapping[str, Any]) -> None:
    """Refuses a plan that the other rows were not made under: what was promised is read from the export."""
    is_user = privacy.plan == "user" or (privacy.plan == "none" and privacy.users_per_round is not None)
    asked = ("user" if is_user else "silo_example", privacy.plan == "silo_example")
    if asked != (report.get("unit"), bool(report.get("silos"))):
        raise ConfigError(
            f"{version} was not trained with privacy.plan {privacy.plan}: its unit is {report.get('unit')!r}, "
            f"{'with' if report.get('silos') else 'without'} budgets of silos. New clients take the plan of training"
        )


def _newest_good(
    config: ExperimentConfig, model: Model, make_weights: Callable[[Weights, Weights], Weights] | None
) -> tuple[Path, PersonalModels]:
    base_path = config.export_folder
    versions = layout.published_versions(base_path) if base_path.is_dir() else {}
    why = ""
    for version in reversed(versions.values()):
        try:
            is_made = _read_json(version / layout.MANIFEST_FILE).get("layout") == HYPERNETWORK
            return version, read_models(version, model, make_weights if is_made else None)
        except ServingError as error:
            _logger.warning("%s is passed over: %s", version, error)
            why = why or f" ({error})"
    raise ServingError(f"{base_path} holds no good version to add clients to{why}: run `tff-pdp export` first")


def _make_weights(
    algorithm: Algorithm, model: Model, model_seed: int, is_scaled: bool
) -> Callable[[Weights, Weights], Weights] | None:
    """How rows become weights where they are small states, as `served_models` has it of no clients at all."""
    if not algorithm.served_from_state:
        return None
    unscaled = {SHIFT: np.zeros(model.input_shape, np.float32), SCALE: np.ones(model.input_shape, np.float32)}
    trained = TrainedClients(
        model=model,
        algorithm=algorithm,
        server_state=algorithm.init_server(model.init(model_seed)),
        client_ids=[],
        ready_states=lambda numbers: [],
        personalise=lambda states: [],
        global_weights=None,
        scalings=[unscaled] if is_scaled else [],
    )
    return from_states(trained).make_weights


def _references(models: PersonalModels, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of the global model and of some new clients: what the export must answer like."""

    def weights_of(row: Any) -> Any:
        if not isinstance(row, Mapping):
            return models.weights_of_row(row)
        if models.make_weights is None:
            return {**models.shared, **row}
        shared = {name: tf.convert_to_tensor(array) for name, array in models.shared.items()}
        return models.make_weights(shared, {name: tf.convert_to_tensor(array) for name, array in row.items()})

    some = dict(list(rows.items())[:MAX_REFERENCES])
    found = {client_id: weights_of(row) for client_id, row in {"": GLOBAL_ROW, **some}.items()}
    return {client_id: {name: np.asarray(array) for name, array in own.items()} for client_id, own in found.items()}


def _privacy_report(before: Mapping[str, Any], costs: Mapping[str, RecordedCost]) -> dict[str, Any]:
    """The report with the new silos' costs in it, beside the others'; of other clients, what protects them."""
    if not costs:
        return {**before, "clients_added_after_training": _NOT_PROTECTED}
    new = [
        {
            "id": client_id,
            "epsilon": cost.epsilon,
            "delta": cost.delta,
            "releases_on_record": cost.releases,
            "added_after_training": True,
        }
        for client_id, cost in costs.items()
    ]
    others = [silo for silo in before.get("silos", []) if silo["id"] not in costs]
    return json_safe({**before, "silos": [*others, *new], "clients_added_after_training": _SILOS_ADDED})


def _model_card(exported: ExportedModels, models: PersonalModels, num_fitted: int) -> dict[str, Any]:
    card = exported.model_card
    return {
        **card,
        "clients": len(models.client_ids),
        "clients_fitted_after_training": card.get("clients_fitted_after_training", 0) + num_fitted,
        "made_from_version": int(exported.version.name),
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ServingError(f"{path} cannot be read ({error}): export again.") from error
