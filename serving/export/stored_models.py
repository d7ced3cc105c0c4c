"""Reads the models of an export, and adds clients, so that no model is trained again when a client joins."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from serving.export.model_checks import check_models
from serving.export.served_module import GLOBAL_ID
from serving.models import CLUSTERS, GLOBAL_ROW, HYPERNETWORK, Arrays, PersonalModels
from serving.saved_model import layout
from serving.saved_model.checks import check_export
from tff_pdp.errors import ServingError
from tff_pdp.models.base import Model, Weights


def read_models(
    export_dir: Path, model: Model, make_weights: Callable[[Weights, Weights], Weights] | None = None
) -> PersonalModels:
    """Reads the models of an export, without running its graph.

    Args:
      export_dir: the directory of one version.
      model: model of the export, built again from its configuration, since an export has only the model's graph.
      make_weights: `PersonalModels.make_weights` of the exported models; only for the layout `hypernetwork`.

    Raises:
      ServingError: the export is damaged, was not written by this package, or does not fit the model.
    """
    check_export(export_dir)
    path = export_dir / layout.MANIFEST_FILE
    details = layout.read_manifest(export_dir)
    try:
        names: dict[str, list[str]] = details["weights"]
        checkpoint = tf.train.load_checkpoint(str(export_dir / layout.VARIABLES_PREFIX))
        shared = _read_list(checkpoint, "shared", names["shared"])
        stacked = _read_list(checkpoint, "stacked", names["stacked"])
        rows = checkpoint.get_tensor(_key("rows"))
        lines = (export_dir / layout.VOCABULARY_FILE).read_bytes().decode().split("\n")
        of_layout = details["layout"]
        class_names = details.get("class_names")
    except (KeyError, TypeError, ValueError, OSError, tf.errors.OpError) as error:
        raise ServingError(f"{export_dir} does not hold models of this package: {error}.") from error
    if lines[0] != GLOBAL_ID or lines[-1] or len(lines) - 1 != len(rows) or rows[0] != GLOBAL_ROW:
        raise ServingError(f"{export_dir / layout.VOCABULARY_FILE} does not fit the rows of the export; export again.")
    if of_layout == HYPERNETWORK and make_weights is None:
        raise ServingError(f"{path}: make_weights is needed to read models of the layout 'hypernetwork'.")
    named = None if class_names is None else tuple(class_names)
    models = PersonalModels(model, lines[1:-1], rows[1:], shared, stacked, make_weights, of_layout, named)
    _check_weights_can_be_made(export_dir, models)
    check_models(models)
    return models


def with_clients(
    models: PersonalModels, clients: Mapping[str, Mapping[str, np.ndarray] | int], *, replace: bool = False
) -> PersonalModels:
    """Returns `models` with further clients. If `models.client_ids` are hashes, new ids must be hashes, too.

    Args:
      models: models so far; they are not changed.
      clients: rows of the clients, by client id. A row is given as float32 arrays by stack name or, in the layout
        `clusters`, as the number of an existing row.
      replace: whether clients that have a model already may get a new row. New arrays overwrite the client's old row,
        unless another client owns that row, too. A client that gets an existing row leaves its old row in the stacks.

    Raises:
      ServingError: a client has a model already and `replace` is false, or a row does not fit the stacks.
    """
    numbers = {client_id: number for number, client_id in enumerate(models.client_ids)}
    if not replace and (known := next((client_id for client_id in clients if client_id in numbers), None)) is not None:
        raise ServingError(f"Client {known!r} has a personal model already; pass replace=True to replace it.")
    client_ids, rows = list(models.client_ids), models.rows.tolist()
    owners = np.bincount(models.rows, minlength=models.num_rows)
    owners[GLOBAL_ROW] += 1
    written: dict[int, Arrays] = {}
    num_rows = models.num_rows
    for client_id, own in clients.items():
        number = numbers.get(client_id)
        if isinstance(own, Mapping):
            _check_row(models, client_id, own)
            if not models.stacked:
                row = GLOBAL_ROW
            elif number is not None and owners[rows[number]] == 1:
                row = rows[number]
            else:
                row, num_rows = num_rows, num_rows + 1
            written[row] = own
        else:
            row = _checked_row_number(models, client_id, own)
        if number is None:
            client_ids.append(client_id)
            rows.append(row)
        else:
            # The old row has one owner less; the last client to leave a row writes over it.
            if row != rows[number]:
                owners[rows[number]] -= 1
            rows[number] = row
    stacked = {name: _with_rows(name, stack, num_rows, written) for name, stack in models.stacked.items()}
    changed = dataclasses.replace(models, client_ids=client_ids, rows=np.array(rows, np.int32), stacked=stacked)
    check_models(changed)
    return changed


def _check_weights_can_be_made(export_dir: Path, models: PersonalModels) -> None:
    """Refuses a `make_weights` with other names or other shapes than the export's."""
    if models.make_weights is None:
        return
    try:
        models.weights_of_row(GLOBAL_ROW)
    except (KeyError, TypeError, ValueError, IndexError, tf.errors.OpError) as error:
        raise ServingError(
            f"{export_dir}: its rows do not make weights of the model as it is configured now "
            f"({type(error).__name__}: {error}). Restore the configuration that was exported, or export again."
        ) from error


def _key(name: str) -> str:
    return f"{name}/.ATTRIBUTES/VARIABLE_VALUE"


def _read_list(checkpoint: Any, attribute: str, names: list[str]) -> dict[str, np.ndarray]:
    return {name: checkpoint.get_tensor(_key(f"{attribute}/{number}")) for number, name in enumerate(names)}


def _check_row(models: PersonalModels, client_id: str, own: Mapping[str, np.ndarray]) -> None:
    if set(own) != set(models.stacked):
        raise ServingError(f"Client {client_id!r} has {sorted(own)}; each client must have {sorted(models.stacked)}.")
    for name, stack in models.stacked.items():
        if own[name].shape != stack.shape[1:] or own[name].dtype != stack.dtype:
            raise ServingError(
                f"{name!r} of client {client_id!r} is {own[name].dtype} {own[name].shape}; a row needs "
                f"{stack.dtype} {stack.shape[1:]}."
            )


def _checked_row_number(models: PersonalModels, client_id: str, row: int) -> int:
    if models.layout != CLUSTERS or not 0 <= row < models.num_rows:
        raise ServingError(
            f"Client {client_id!r} cannot have row {row}: rows are shared in the layout {CLUSTERS!r} only, and this "
            f"layout is {models.layout!r}, with {models.num_rows} rows."
        )
    return int(row)


def _with_rows(name: str, stack: np.ndarray, num_rows: int, written: Mapping[int, Arrays]) -> np.ndarray:
    longer = np.empty((num_rows, *stack.shape[1:]), stack.dtype)
    longer[: len(stack)] = stack
    for row, own in written.items():
        longer[row] = own[name]
    return longer
