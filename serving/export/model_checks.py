"""Checks personal models before their export, and estimates the export's size on disk and in a server's memory."""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

from serving.client_ids import encode_id
from serving.export.served_module import GLOBAL_ID
from serving.models import CLUSTERS, GLOBAL_ROW, HYPERNETWORK, STACKED, Arrays, PersonalModels
from tff_pdp.errors import ServingError
from tff_pdp.models.base import Model

# Bytes of the graph and the other small files, and of a loaded graph with its session. With TensorFlow 2.14, a small
# perceptron and a small convolutional network have 90 to 230 KB and 5 to 11 MB; large ones have more.
GRAPH_BYTES, LOADED_GRAPH_BYTES = 100_000, 10_000_000
# Bytes of an entry of the table of ids in memory, besides the id itself: 77 in a table of a million.
_TABLE_ENTRY_BYTES = 77
_ROW_NUMBER_BYTES, _FLOAT_BYTES = 4, 4


@dataclasses.dataclass(frozen=True)
class LayoutSize:
    """The approximate size of an export.

    Attributes:
      bytes_on_disk: bytes of all files of one version.
      bytes_in_memory: memory of a server with one version; while one version replaces another, both are in memory.
      bytes_per_example: memory for the weights of each example in a running request.
    """

    bytes_on_disk: int
    bytes_in_memory: int
    bytes_per_example: int

    def text(self) -> str:
        """Returns the three sizes as text for people."""
        return (
            f"{_megabytes(self.bytes_on_disk)} on disk, {_megabytes(self.bytes_in_memory)} in a server's memory, and "
            f"{_megabytes(self.bytes_per_example)} for each example of a running request"
        )


def estimate(models: PersonalModels) -> LayoutSize:
    """Estimates the size of an export of `models`, which are not checked."""
    ids = sum(len(client_id.encode()) + 1 for client_id in models.client_ids)
    rows = _ROW_NUMBER_BYTES * len(models.client_ids)
    return LayoutSize(
        bytes_on_disk=models.nbytes + ids + rows + GRAPH_BYTES,
        bytes_in_memory=models.nbytes + ids + rows + _TABLE_ENTRY_BYTES * len(models.client_ids) + LOADED_GRAPH_BYTES,
        bytes_per_example=weight_bytes_per_example(models),
    )


def weight_bytes_per_example(models: PersonalModels) -> int:
    """Returns the bytes of one example's weights: the client's row, and the output of `make_weights`, if any."""
    gathered = _FLOAT_BYTES * models.values_per_client
    if models.make_weights is None:
        return gathered
    made = sum(int(np.prod(array.shape, dtype=np.int64)) for array in models.model.init(0).values())
    return gathered + _FLOAT_BYTES * made


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.3g} GB"


def check_models(models: PersonalModels) -> None:
    """Checks the layout, ids, rows and weights: each client must have a row, and rows must fit the model.

    Raises:
      ServingError: a check fails; the message names the weight or the client.
    """
    _check_layout(models)
    _check_class_names(models)
    check_client_ids(models)
    _check_rows(models)
    for name, array in (*models.shared.items(), *models.stacked.items()):
        if array.dtype != np.float32:
            raise ServingError(f"Weight {name!r} is {array.dtype}; served weights must be float32.")
        # `isfinite` of the array would take a quarter of its memory; minimum and maximum are NaN if a value is NaN.
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise ServingError(f"{name!r} of {_owner(models, name)} has a value that is not finite.")
    check_weights(models.model, models.weights_of_row(GLOBAL_ROW), "the global model")


def check_weights(model: Model, weights: Mapping[str, np.ndarray], owner: str) -> None:
    """Raises ServingError, which names the weights' `owner`, if names or shapes of the weights do not fit the model."""
    shapes = {name: array.shape for name, array in model.init(0).items()}
    if set(weights) != set(shapes):
        raise ServingError(
            f"Weights of {owner} are {sorted(weights)}, but the model {model.name!r} has {sorted(shapes)}."
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ServingError(
                f"Weight {name!r} of {owner} has shape {tuple(weights[name].shape)}; the model needs {shape}."
            )


def check_client_ids(models: PersonalModels) -> None:
    """Raises ServingError if two ids are equal, or an id cannot be a line of the vocabulary, such as an empty id."""
    for client_id in models.client_ids:
        # The vocabulary has one id a line, and TensorFlow drops carriage returns when it reads it.
        if client_id in ("", GLOBAL_ID) or "\n" in client_id or "\r" in client_id:
            raise ServingError(
                f"Client id {client_id!r} cannot be exported: it is empty, {GLOBAL_ID!r}, or holds a line break."
            )
        encode_id(client_id)
    if len(set(models.client_ids)) != len(models.client_ids):
        (repeated, _), *_ = collections.Counter(models.client_ids).most_common(1)
        raise ServingError(f"Client id {repeated!r} cannot be exported: two clients have it.")


def check_references(models: PersonalModels, references: Mapping[str, Arrays]) -> None:
    """Checks reference weights, given by client id; the global model has the id "".

    Raises:
      ServingError: an id is neither "" nor the id of a client in `models`, or weights do not fit the model.
    """
    known = {"", *models.client_ids}
    for client_id, weights in references.items():
        if client_id not in known:
            raise ServingError(f"There are reference weights of client {client_id!r}, but models has no such client.")
        check_weights(models.model, weights, f"client {client_id!r}, for reference,")


def _check_layout(models: PersonalModels) -> None:
    if models.layout not in (STACKED, CLUSTERS, HYPERNETWORK):
        raise ServingError(f"{models.layout!r} is no layout; layouts are {STACKED}, {CLUSTERS} and {HYPERNETWORK}.")
    if (models.make_weights is not None) != (models.layout == HYPERNETWORK):
        raise ServingError(
            f"The layout {HYPERNETWORK!r} needs make_weights, other layouts must have none; this is {models.layout!r}."
        )
    if both := sorted(set(models.shared) & set(models.stacked)):
        raise ServingError(f"Weights {', '.join(both)} are both shared and stacked; keep one of both.")


def _check_class_names(models: PersonalModels) -> None:
    names = models.class_names
    if names is None:
        return
    if len(names) != models.model.num_classes or len(set(names)) != len(names):
        raise ServingError(
            f"There are {len(names)} names of classes, {len(set(names))} different ones; the model has "
            f"{models.model.num_classes} classes, each with a name of its own."
        )
    for name in names:
        encode_id(name)


def _check_rows(models: PersonalModels) -> None:
    rows, num_rows = models.rows, models.num_rows
    for name, stack in models.stacked.items():
        if stack.ndim < 1 or len(stack) != num_rows or not num_rows:
            raise ServingError(
                f"The stack {name!r} has shape {stack.shape}; all stacks need the same number of rows, at least 1."
            )
    if rows.shape != (len(models.client_ids),) or rows.dtype != np.int32:
        raise ServingError(f"rows is {rows.dtype} {rows.shape}; it must be int32 ({len(models.client_ids)},).")
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_rows):
        client = int(np.flatnonzero((rows < 0) | (rows >= num_rows))[0])
        raise ServingError(
            f"Client {models.client_ids[client]!r} has row {rows[client]}, but the stacks have {num_rows} rows."
        )


def _owner(models: PersonalModels, name: str) -> str:
    if name in models.shared:
        return "the shared weights"
    stack = models.stacked[name]
    row = int(np.flatnonzero(~np.isfinite(stack.reshape(len(stack), -1)).all(axis=1))[0])
    owners = np.flatnonzero(models.rows == row)
    return f"client {models.client_ids[owners[0]]!r}" if len(owners) and row != GLOBAL_ROW else f"row {row}"
