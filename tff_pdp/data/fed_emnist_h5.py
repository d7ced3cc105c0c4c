"""Reads Federated EMNIST in the form that TensorFlow Federated distributed before its SQLite database.

Two HDF5 files, such as `fed_emnist_digitsonly_train.h5` and `fed_emnist_digitsonly_test.h5`, each with
`/examples/<client>/pixels`, float32 `[n, 28, 28]`, background 1 and ink 0, and `/examples/<client>/label`, int32 `[n]`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from beam_pipelines.records import UserRecord
from tff_pdp.errors import DataError

_TRAIN, _TEST = "_train.h5", "_test.h5"
# What h5py raises for files that are cut short, damaged or of another layout.
_UNREADABLE = (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError)


def list_h5_files(folder: Path) -> tuple[str, str]:
    """The names of a folder's training file and test file.

    Raises:
      DataError: the folder does not hold exactly one of each, of the same name.
    """
    train = sorted(path.name for path in folder.glob(f"*{_TRAIN}"))
    names = (train[0], _test_file(train[0])) if len(train) == 1 else None
    if names is None or not (folder / names[1]).is_file():
        raise DataError(
            f"{folder}: data.input takes emnist_all.sqlite, or a folder with one *{_TRAIN} and its *{_TEST}; "
            f"this has {', '.join(train) or f'no *{_TRAIN}'}"
        )
    return names


def read_h5_users(path: Path) -> Iterator[UserRecord]:
    """Reads every writer, one at a time, not judged: from a training file and the test file beside it.

    A test file by itself gives nothing: its writers are those of the training file.

    Raises:
      DataError: a file is damaged or has another layout; names it, and the writer where one was being read.
    """
    if path.name.endswith(_TEST):
        return
    paths = (path, path.with_name(_test_file(path.name)))
    with _opened_h5(paths[0]) as train, _opened_h5(paths[1]) as test:
        for client in sorted(train.keys() | test.keys()):
            x, y, is_test = [], [], []
            for side, clients in enumerate((train, test)):
                if client in clients:
                    pixels, labels = _examples(paths[side], client, clients[client])
                    x += pixels
                    y += labels
                    is_test += [side == 1] * len(labels)
            yield UserRecord(client, path.name, x, y, len(x), is_test=is_test)


def _test_file(train_file: str) -> str:
    return train_file.removesuffix(_TRAIN) + _TEST


@contextlib.contextmanager
def _opened_h5(path: Path) -> Iterator[dict[str, Any]]:
    """A file's clients by name, each to be read while the file is open."""
    # Imported late: it is slow, and few need it.
    import h5py

    with contextlib.ExitStack() as stack:
        try:
            examples: Any = stack.enter_context(h5py.File(path))["examples"]
            clients = dict(examples.items())
        except _UNREADABLE as error:
            raise DataError(f"{path}: not TFF's HDF5 format, truncated or damaged: {error}") from error
        yield clients


def _examples(path: Path, client: str, group: Any) -> tuple[list[np.ndarray], list[int]]:
    try:
        pixels, labels = np.asarray(group["pixels"][()], np.float32), np.asarray(group["label"][()])
    except _UNREADABLE as error:
        raise DataError(f"{path}: client {client!r}: no pixels and label, or damaged: {error}") from error
    if pixels.ndim < 2 or labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: client {client!r}: pixels of shape {pixels.shape} do not go with {labels.dtype} labels of shape "
            f"{labels.shape}"
        )
    return list(pixels.reshape(len(pixels), -1)), labels.tolist()
