"""Exports one SavedModel for each client, with the client's row and the global row, but no other client's row."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm.auto import tqdm

from serving.export import expectations
from serving.export.exporter import Documents, publish
from serving.export.model_checks import GRAPH_BYTES, LOADED_GRAPH_BYTES, check_models, check_references
from serving.export.versions import HeldBasePath, hold
from serving.models import GLOBAL_ROW, STACKED, Arrays, PersonalModels
from serving.saved_model import layout
from serving.verify.fresh_process import Expectation, FreshProcess
from tff_pdp.errors import ServingError

MAX_SEPARATE_CLIENTS = 200
# Seconds for one export: a small model with TensorFlow 2.14 took 1.4 to 2.3 on two busy cores.
_SECONDS = 2
_CONTENT = "content_sha256"


def export_per_client(
    folder: Path,
    models: PersonalModels,
    *,
    model_name: str,
    privacy_report: Mapping[str, Any],
    model_card: Mapping[str, Any],
    process: FreshProcess,
    references: Mapping[str, Arrays] | None = None,
) -> dict[str, Path]:
    """Writes, verifies and publishes one SavedModel for each client, with the client's row and the global row.

    No other client's id or row is in an export. All exports have the global model, which must therefore not reveal any
    client's model. For example, if the global model were the mean of two clients' models, each of the two clients could
    compute the other client's model.

    Exports are in `<folder>/<model_name>.<client id>/<version>` and are served as `<model_name>.<client id>`. A second
    call, such as after an interruption, keeps a client's newest version if a new version would have the same content
    and the newest version still passes its verification. Other clients get new versions.

    The other arguments are those of `export_models`, and apply to every export. Each export is also verified with the
    weights in `models` of the export's client and of the global model, unless `references` has weights for the same id.

    Returns:
      The published directories by client id.

    Raises:
      ServingError: there are more than `MAX_SEPARATE_CLIENTS` clients, an id cannot be part of a model's name, or
        `export_models` would refuse an argument or an export.
      DataError: another process exports to one of the folders.
    """
    clients = len(models.client_ids)
    if clients > MAX_SEPARATE_CLIENTS:
        raise ServingError(
            f"Separate exports of {clients} clients would take about {clients * _SECONDS / 60:.0f} minutes, "
            f"{clients * GRAPH_BYTES / 1e6:.0f} MB for graphs, and "
            f"{clients * LOADED_GRAPH_BYTES / 1e9:.1f} GB of a server's memory besides the weights. At most "
            f"{MAX_SEPARATE_CLIENTS} are allowed: make one export for all clients."
        )
    folder = folder.absolute()
    check_models(models)
    references = references or {}
    check_references(models, references)
    for client_id in models.client_ids:
        layout.check_model_name(f"{model_name}.{client_id}")
    examples = expectations.examples_for(models.model)
    exported = {}
    for number, client_id in enumerate(tqdm(models.client_ids, "export", unit="client")):
        own = only_client(models, number)
        of_client = expectations.default_references(own)
        of_client |= {one: weights for one, weights in references.items() if one in ("", client_id)}
        expected = expectations.build_expectations(own, examples, of_client)
        documents = Documents(f"{model_name}.{client_id}", privacy_report, model_card)
        with hold(folder / documents.model_name) as held:
            exported[client_id] = _kept_or_published(held, own, documents, expected, process)
    return exported


def only_client(models: PersonalModels, number: int) -> PersonalModels:
    """Returns `models` with client number `number` only: the client's row and the global row."""
    row = int(models.rows[number])
    rows = [GLOBAL_ROW] if row == GLOBAL_ROW else [GLOBAL_ROW, row]
    return dataclasses.replace(
        models,
        client_ids=[models.client_ids[number]],
        rows=np.array([len(rows) - 1], np.int32),
        stacked={name: stack[rows] for name, stack in models.stacked.items()},
        layout=STACKED if models.make_weights is None else models.layout,
    )


def _kept_or_published(
    held: HeldBasePath, models: PersonalModels, documents: Documents, expected: list[Expectation], process: FreshProcess
) -> Path:
    content = _content(models, documents)
    for newest in list(layout.published_versions(held).values())[-1:]:
        with contextlib.suppress(ServingError):
            if layout.read_manifest(newest).get(_CONTENT) == content:
                # The functions of a model are in no hash, so the export must still answer like them.
                process.verify(newest, expected)
                return newest
    return publish(held, models, documents, expected, process, {_CONTENT: content})


def _content(models: PersonalModels, documents: Documents) -> str:
    """Returns the SHA-256 of everything that an export is made of, except functions."""
    about = {
        "documents": dataclasses.asdict(documents),
        "client_ids": list(models.client_ids),
        "layout": models.layout,
        "tensorflow": tf.__version__,
        **({} if models.class_names is None else {"class_names": list(models.class_names)}),
    }
    try:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise ServingError(f"The model card or the privacy report cannot be written as JSON: {error}.") from error
    for arrays in (models.shared, models.stacked, {"rows": models.rows}):
        for name, array in sorted(arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
