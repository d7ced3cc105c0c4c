"""Records in the model card how an export was made, and checks if a configuration still fits the export."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from serving.client_ids import ClientIdHash
from serving.saved_model import layout
from tff_pdp.errors import ConfigError, ServingError
from tff_pdp.experiment.build import SHAPES, data_shapes
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.hparams import FROM_EXPERIMENT
from tff_pdp.experiment.kinds import ALGORITHMS, MODELS
from tff_pdp.kinds import settings_of
from tff_pdp.settings import Settings, join_key, read_settings, to_plain

_CLIENT_IDS = {
    "hashed": "keyed hashes (HMAC-SHA256, 32 hex digits) of the ids in the client dataset; the export lacks the key",
    "plain": "in plain text, as in the client dataset",
}


def ids_and_settings(config: ExperimentConfig, exported_id: Callable[[str], str]) -> dict[str, Any]:
    """Returns the model card's entries that `check_settings` and `served_ids` read: kind of ids, and settings."""
    kind = config.export.client_ids
    key = {"client_id_key": exported_id.fingerprint} if isinstance(exported_id, ClientIdHash) else {}
    return {"client_ids": _CLIENT_IDS[kind], "client_id_kind": kind, **key, "settings": _settings(config)}


def check_settings(config: ExperimentConfig, version: Path, card: Mapping[str, Any]) -> None:
    """Checks that a version was made with the configuration's settings of model and method.

    Raises:
      ConfigError: the version was made by another method, or a setting of the model or the method differs.
    """
    name = config.export.algorithm
    if card.get("algorithm") != name:
        raise ConfigError(
            f"{version} holds models of {card.get('algorithm')!r}, but export.algorithm is {name!r}: export again first"
        )
    stored = {_key_of_today(key): value for key, value in card.get("settings", {}).items()}
    # In cards of earlier versions, a method's name is its kind.
    then, now = {f"algorithms.{name}.kind": name, **stored}, _settings(config)
    for key in sorted({*then, *now}):
        if key not in then or key not in now or then[key] != now[key]:
            raise ConfigError(
                f"{key} is {_value(now, key)}, but {version} was made with {_value(then, key)}: predictions for "
                "all its clients would change. Restore the setting, or train and export again"
            )


def served_ids(config: ExperimentConfig, version: Path, card: Mapping[str, Any]) -> Callable[[str], str]:
    """Returns a function from a client's id in the data set to the client's id in an existing version.

    Raises:
      ConfigError: the configuration asks for hashed ids and the version has plain ids, or the reverse.
      ServingError: the key that hashes ids is missing or damaged, or the version was made with another key.
    """
    kind = card.get("client_id_kind")
    if kind != config.export.client_ids:
        raise ConfigError(
            f"export.client_ids is {config.export.client_ids!r}, but the ids in {version} are {kind}: export again "
            "first"
        )
    if kind == "plain":
        return str
    hashed = ClientIdHash.load(config.client_id_key)
    _check_key(config, hashed, version, card)
    return hashed


def exported_ids(config: ExperimentConfig) -> Callable[[str], str]:
    """Returns a function from a client's id in the data set to the id in exports; makes the key if there is none.

    Raises:
      ServingError: the key that hashes ids is missing or damaged, or an existing export was made with another key.
    """
    if config.export.client_ids == "plain":
        return str
    exports = list(_versions_with_hashes(config.export_folder.parent))
    if exports and not config.client_id_key.exists():
        version, _ = exports[0]
        raise ServingError(
            f"{config.client_id_key} is missing: restore this key, which hashed the ids in {version}. A new key "
            f"would change the ids of all clients; to begin anew, move {config.export_folder.parent} away"
        )
    hashed = ClientIdHash.load_or_create(config.client_id_key)
    for version, card in exports:
        _check_key(config, hashed, version, card)
    return hashed


def check_leaves_out_nobody(base_path: Path) -> None:
    """Checks that no client of the newest version was fitted after training: a new export would lose the fit.

    Raises:
      ServingError: clients were fitted after training, or the version's model card cannot be read.
    """
    version = newest_version(base_path)
    card = layout.read_document(version, layout.MODEL_CARD_FILE) if version else {}
    if fits := card.get("clients_fitted_after_training", 0):
        raise ServingError(
            f"{version} has results of `tff-pdp personalize`: {card['clients_not_in_training']} clients that were not "
            f"in training, {fits} fits in all. An export of the trained method lacks these clients and fits. To "
            "export nevertheless, give --drop-added; silos that are added again are charged again"
        )


def newest_version(base_path: Path) -> Path | None:
    """Returns the folder of the newest version of a model; None if there is no version."""
    versions = layout.published_versions(base_path) if base_path.is_dir() else {}
    return versions[max(versions)] if versions else None


def _settings(config: ExperimentConfig) -> dict[str, Any]:
    """Returns all settings that the served function is built with, by configuration key, defaults filled in."""
    name = config.export.algorithm
    model, method = dict(config.model), dict(config.algorithms[name])
    kind = str(model.pop("kind"))
    shape, num_classes = data_shapes(config)
    settings_of_model = settings_of(MODELS.find(kind), SHAPES)
    model.pop("seed", None)
    taken = settings_of(ALGORITHMS.find(config.kind_of(name)), FROM_EXPERIMENT)
    own = {field.name for field in msgspec.structs.fields(taken)}
    given = {key: value for key, value in method.items() if key in own}
    settings = {
        "model.kind": kind,
        "data.input_shape": shape,
        "data.num_classes": num_classes,
        **_filled("model", settings_of_model, model),
        f"algorithms.{name}.kind": config.kind_of(name),
        **_filled(f"algorithms.{name}", taken, given),
    }
    # In the form that a file gives back: tuples are lists there.
    return json.loads(json.dumps(settings))


def _filled(key: str, kind: type[Settings], given: Mapping[str, Any]) -> dict[str, Any]:
    filled = to_plain(read_settings(kind, given, "the experiment", key))
    return {join_key(key, name): value for name, value in filled.items()}


def _key_of_today(key: str) -> str:
    """Returns the present key of a setting, which may have had another key in an earlier version."""
    if key == "model.name":
        return "model.kind"
    old, _, name = key.partition("model.arguments.")
    return f"model.{name}" if name and not old else key


def _value(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "not set"


def _versions_with_hashes(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields versions of all models in a folder whose ids are hashes, with their model cards."""
    for base_path in sorted(folder.iterdir()) if folder.is_dir() else ():
        for version in layout.published_versions(base_path).values() if base_path.is_dir() else ():
            try:
                card = layout.read_document(version, layout.MODEL_CARD_FILE)
            except ServingError:
                # A damaged version is not served, so nobody relies on its ids.
                continue
            if "client_id_key" in card:
                yield version, card


def _check_key(config: ExperimentConfig, hashed: ClientIdHash, version: Path, card: Mapping[str, Any]) -> None:
    if hashed.fingerprint != card.get("client_id_key"):
        raise ServingError(
            f"{config.client_id_key} is not the key of the ids in {version}: restore the old key. To begin anew under "
            f"other ids, move {config.export_folder.parent} away"
        )
