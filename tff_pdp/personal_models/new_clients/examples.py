"""Reads examples of clients that were not in training: an .npz file of one client, a client dataset, or raw data."""

import contextlib
import dataclasses
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from beam_pipelines.epidemic.sources import promised_influence
from tff_pdp.data.client_dataset import ClientDataset, ClientExamples
from tff_pdp.data.manifest import MANIFEST_FILE, SHARD_FOLDER, Manifest, RowInfluence
from tff_pdp.errors import DataError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.models.base import Model


@dataclasses.dataclass(frozen=True)
class NewClients:
    """The clients to be added, with their examples.

    Attributes:
      client_ids: ids of the clients, all different.
      train: examples for the fit of each client; every client has at least one.
      held_out: examples for the metrics of each client; a client may have none.
      left_out: ids of clients that cannot be fitted, since they have no training examples.
      row_influence: number of rows that one person can change, if examples are rows made from a contact graph.
      dataset: client dataset that contains the examples; None if the examples are from a file.
    """

    client_ids: Sequence[str]
    train: Sequence[ClientExamples]
    held_out: Sequence[ClientExamples]
    left_out: Sequence[str] = ()
    row_influence: RowInfluence | None = None
    dataset: ClientDataset | None = None

    @property
    def num_examples(self) -> dict[str, int]:
        """Returns the number of each client's examples for the fit, by client id."""
        return {client_id: len(own.y) for client_id, own in zip(self.client_ids, self.train, strict=True)}

    @property
    def features(self) -> dict[str, np.ndarray]:
        """Returns the features of each client's examples for the fit, float32 `[n, *input_shape]`, by client id."""
        return {client_id: own.x for client_id, own in zip(self.client_ids, self.train, strict=True)}


@contextlib.contextmanager
def prepared_examples(config: ExperimentConfig, path: Path) -> Iterator[Path]:
    """Yields a path for `read_new_clients`: the given path, or a client dataset made from raw data at this path.

    Raw data of the kind `data.kind` are prepared as the data of training were, with every client that has an example,
    in a temporary folder. Clients that are left out are named on standard error.

    Args:
      config: the experiment.
      path: an `.npz` file with the arrays x and y of one client, a client dataset, or raw data.

    Raises:
      ConfigError, DataError: the raw data cannot be prepared, as in `tff_pdp.experiment.prepare.prepare_clients`.
    """
    if not path.exists() or _is_prepared(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tff_pdp_examples_") as folder:
        data = config.data.of_more_clients(path.absolute(), Manifest.load(config.clients_folder))
        more = replace(config, output=folder, data=data)
        for reason, names in prepare_clients(more).manifest.left_out.items():
            print(f"left out ({reason}): {', '.join(names)}", file=sys.stderr, flush=True)
        yield more.clients_folder


def _is_prepared(path: Path) -> bool:
    """Tells whether a path is a client dataset, or an `.npz` file of one client."""
    if path.is_dir():
        return any((path / name).exists() for name in (MANIFEST_FILE, SHARD_FOLDER)) or not any(path.iterdir())
    if not zipfile.is_zipfile(path):
        # A damaged file is reported as what its name says.
        return path.suffix == ".npz"
    with zipfile.ZipFile(path) as archive:
        return not any("/" in name for name in archive.namelist())


def read_new_clients(path: Path, client_ids: Sequence[str], model: Model) -> NewClients:
    """Reads new clients' examples, which must be raw like the data of training: features are not scaled yet.

    Args:
      path: `.npz` file of one client, with `x` `[n, *input_shape]` and `y` `[n]`; or folder of a client dataset, whose
        validation and test examples become `held_out`.
      client_ids: ids of the clients to read; exactly one if `path` is a file; if empty, all clients of the dataset.
      model: model that the examples are for.

    Raises:
      DataError: a file cannot be read, an array is missing or has a wrong shape, a value is not finite, or a label is
        not a class; or a client is given twice, is not in the dataset, or has no training examples.
    """
    if repeated := sorted({one for one in client_ids if list(client_ids).count(one) > 1}):
        raise DataError(f"--client-id {repeated[0]!r} is given more than once")
    if path.is_dir():
        return _of_dataset(path, client_ids, model)
    if len(client_ids) != 1:
        raise DataError(f"{path} holds one client's examples: name that client with exactly one --client-id")
    nothing = ClientExamples(np.zeros((0, *model.input_shape), np.float32), np.zeros(0, model.label_dtype))
    return NewClients(tuple(client_ids), [_of_file(path, model)], [nothing])


def _of_dataset(path: Path, client_ids: Sequence[str], model: Model) -> NewClients:
    dataset = ClientDataset.open(path)
    features = dataset.manifest.features
    if (features.shape, features.num_classes) != (model.input_shape, model.num_classes):
        raise DataError(
            f"{path} holds examples of shape {features.shape} in {features.num_classes} classes, but the model is for "
            f"{model.input_shape} in {model.num_classes}: prepare these examples like the data of training"
        )
    sizes = {client_id: dataset.num_examples(client_id, "train") for client_id in client_ids or dataset.client_ids}
    left_out = [client_id for client_id, size in sizes.items() if not size]
    if left_out and (client_ids or len(left_out) == len(sizes)):
        raise DataError(f"{path}: client {left_out[0]!r} has no training examples to be fitted with")
    chosen = [client_id for client_id, size in sizes.items() if size]
    held_out = [[dataset.load(client_id, split) for split in ("validation", "test")] for client_id in chosen]
    return NewClients(
        client_ids=tuple(chosen),
        train=[dataset.load(client_id, "train") for client_id in chosen],
        held_out=[
            ClientExamples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
            for parts in held_out
        ],
        left_out=tuple(left_out),
        row_influence=promised_influence(dataset.manifest),
        dataset=dataset,
    )


def _of_file(path: Path, model: Model) -> ClientExamples:
    try:
        # A file of objects would run code when it is read.
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("x", "y") if name in archive}
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as an .npz file or as a client dataset ({error})") from None
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{path} has no array {name!r}: write x [n, {_shape(model)}] and y [n] with np.savez")
        if arrays[name].dtype.kind not in "buif":
            raise DataError(f"{path}: {name} is {arrays[name].dtype}; it must have numbers")
    x, y = arrays["x"], arrays["y"]
    if x.shape[1:] != model.input_shape or not len(x):
        raise DataError(f"{path}: x has shape {x.shape}; the model needs [n, {_shape(model)}], with n at least 1")
    if y.shape != x.shape[:1]:
        raise DataError(f"{path}: y has shape {y.shape}; with x of {len(x)} rows it must be [{len(x)}]")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    _check_rows(path, "x", np.isfinite(x.reshape(len(x), -1)).all(axis=1), "has a value that is not finite")
    if not model.num_classes:
        with np.errstate(over="ignore"):
            y = y.astype(np.float32)
        _check_rows(path, "y", np.isfinite(y), "is not a finite number")
        return ClientExamples(x, y)
    is_label = (y == np.floor(y)) & (y >= 0) & (y < model.num_classes)
    _check_rows(path, "y", is_label, f"is not a class from 0 to {model.num_classes - 1}")
    return ClientExamples(x, y.astype(np.int64))


def _check_rows(path: Path, name: str, is_good: np.ndarray, what: str) -> None:
    bad = np.flatnonzero(~is_good)
    if bad.size:
        more = f", like {bad.size - 1} more" if bad.size > 1 else ""
        raise DataError(f"{path}: row {bad[0]} of {name} (counted from 0) {what}{more}")


def _shape(model: Model) -> str:
    return ", ".join(map(str, model.input_shape))
