"""Reads TensorFlow Federated's Federated EMNIST: handwriting by writer, with each writer's own train and test images.

Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. `tff.simulation.datasets.emnist` distributes
`emnist_all.sqlite.lzma`, a database with two tables,

    examples         split_name TEXT, client_id TEXT, serialized_example_proto BLOB
    client_metadata  client_id TEXT, split_name TEXT, num_examples INTEGER

where each example is a `tf.train.Example` of `pixels`, float32 `[28, 28]`, background 1 and ink 0, and `label`, int64.

The older form is read too: two HDF5 files, such as `fed_emnist_digitsonly_train.h5` and
`fed_emnist_digitsonly_test.h5`, each with `/examples/<client>/pixels`, float32 `[n, 28, 28]`, background 1 and ink 0,
and `/examples/<client>/label`, int32 `[n]`.
"""

import contextlib
import functools
import itertools
import lzma
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from beam_pipelines.options import RawData, SourceSettings
from beam_pipelines.records import UserRecord
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import replacing

FED_EMNIST_SHAPE = (28, 28, 1)
# The published database holds the digits a second time, with a division of their own: 3,383 of the 3,400 writers.
_SPLIT_PREFIXES = {10: "digits_only_", 62: "all_"}
FED_EMNIST_CLASSES = tuple(_SPLIT_PREFIXES)
_COLUMNS = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}


def find_splits(path: Path, num_classes: int) -> tuple[str, str]:
    """Finds the names of a database's train split and test split for a number of classes.

    In the published database the names are `digits_only_train` and `digits_only_test` for 10 classes, `all_train` and
    `all_test` for 62; a database with one pair of splits may use the names `train` and `test`.

    Raises:
      DataError: the file is not a database, has another schema, or lacks these splits.
    """
    with _opened_database(path) as database:
        for table, columns in _COLUMNS.items():
            found = {column for _, column, *_ in database.execute(f"PRAGMA table_info({table})")}
            if not columns <= found:
                raise DataError(
                    f"{path}: not TFF's format: table {table!r} has {', '.join(sorted(found)) or 'no columns'} instead "
                    f"of {', '.join(sorted(columns))}; data.input must be emnist_all.sqlite"
                )
        names = {name for (name,) in database.execute("SELECT DISTINCT split_name FROM client_metadata")}
    for prefix in (_SPLIT_PREFIXES[num_classes], ""):
        splits = (f"{prefix}train", f"{prefix}test")
        if names.issuperset(splits):
            return splits
    wanted = f"{_SPLIT_PREFIXES[num_classes]}train and {_SPLIT_PREFIXES[num_classes]}test, nor train and test"
    raise DataError(
        f"{path}: no splits {wanted}, for data.num_classes {num_classes}; it has {', '.join(map(str, sorted(names)))}"
    )


def read_database(train_split: str, test_split: str, path: Path) -> Iterator[UserRecord]:
    """Reads the train and test examples of every writer in a database, one writer at a time, unchecked.

    Raises:
      DataError: the file is damaged, or an example (of the writer that the message names) lacks pixels or a label.
    """
    place = str(path)
    splits = (train_split, test_split)
    with _opened_database(path) as database:
        query = "SELECT client_id, SUM(num_examples) FROM client_metadata WHERE split_name IN (?, ?) GROUP BY client_id"
        counts = dict(database.execute(query, splits))
        # Row numbers are sorted instead of examples: this takes little memory even without an index.
        query = "SELECT client_id, split_name, rowid FROM examples WHERE split_name IN (?, ?) ORDER BY client_id, rowid"
        rows = database.execute(query, splits)
        try:
            for client, group in itertools.groupby(rows, key=lambda row: row[0]):
                if not isinstance(client, str):
                    raise DataError(f"{path}: client_id {client!r} in 'examples' is not text")
                sides, numbers = zip(*((split, rowid) for _, split, rowid in group), strict=True)
                x, y = zip(*(_example(path, database, client, rowid) for rowid in numbers), strict=True)
                is_test = [side == test_split for side in sides]
                yield UserRecord(client, path.name, list(x), list(y), counts.pop(client, None), is_test=is_test)
                place = f"{path}: after client {client!r}"
        except sqlite3.DatabaseError as error:
            raise DataError(f"{place}: {error}; the file is damaged, get it again") from error
    for client, count in counts.items():
        yield UserRecord(client, path.name, x=None, y=None, num_samples=count)


def _example(path: Path, database: sqlite3.Connection, client: str, rowid: int) -> tuple[np.ndarray, int]:
    query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
    (content,) = database.execute(query, (rowid,)).fetchone()
    try:
        return _parse(content)
    except ValueError as error:
        raise DataError(f"{path}: client {client!r}, row {rowid} of 'examples': {error}") from error


def decompress_database(path: Path, workspace: Path) -> Path:
    """Decompresses `<name>.sqlite.lzma` to `workspace/<name>.sqlite`, atomically.

    Raises:
      DataError: the file is missing, truncated or damaged.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    database = workspace / path.stem
    try:
        with (
            lzma.open(path) as compressed,
            tqdm.wrapattr(compressed, "read", desc=f"decompress {path.name}") as source,
            replacing(database) as staging,
            open(staging, "wb") as target,
        ):
            shutil.copyfileobj(source, target)
    except (FileNotFoundError, IsADirectoryError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be decompressed: {error}; get the file again") from error
    return database


@contextlib.contextmanager
def _opened_database(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; data.input must be TFF's emnist_all.sqlite or emnist_all.sqlite.lzma")
    try:
        # Immutable: otherwise SQLite writes a lock beside the file, in a folder that may be read-only.
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as database:
            yield database
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path}: not an SQLite database, or damaged: {error}") from error


def _parse(content: object) -> tuple[np.ndarray, int]:
    """Parses an example's pixels, float32 and flat, and its label; raises ValueError for anything else."""
    # Imported late: the settings are checked before TensorFlow is imported.
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    if not isinstance(content, bytes):
        raise ValueError(f"needs a serialized tf.train.Example, not {type(content).__name__}")
    try:
        features = tf.train.Example.FromString(content).features.feature
    except DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}; the file is damaged, get it again") from error
    if {"pixels", "label"} <= set(features):
        pixels, label = features["pixels"].float_list.value, features["label"].int64_list.value
        if pixels and len(label) == 1:
            return np.array(pixels, np.float32), label[0]
    raise ValueError(
        f"a tf.train.Example with {', '.join(sorted(features)) or 'nothing'}; it needs floats under 'pixels' and one "
        "integer under 'label'; data.input must be TFF's emnist_all.sqlite"
    )


_TRAIN, _TEST = "_train.h5", "_test.h5"
# Errors of h5py for files that are cut short, damaged or of another layout.
_UNREADABLE = (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError)


def list_h5_files(folder: Path) -> tuple[str, str]:
    """Finds the names of a folder's training file and test file.

    Raises:
      DataError: the folder does not contain exactly one training file, or lacks its test file.
    """
    train = sorted(path.name for path in folder.glob(f"*{_TRAIN}"))
    names = (train[0], _test_file(train[0])) if len(train) == 1 else None
    if names is None or not (folder / names[1]).is_file():
        raise DataError(
            f"{folder}: data.input must be emnist_all.sqlite, or a folder with one *{_TRAIN} and its *{_TEST}; "
            f"this folder has {', '.join(train) or f'no *{_TRAIN}'}"
        )
    return names


def read_h5_users(path: Path) -> Iterator[UserRecord]:
    """Reads every writer from a training file and the test file beside it, one at a time, unchecked.

    Yields nothing for the path of a test file, whose writers are read with the training file.

    Raises:
      DataError: a file is damaged or has another layout; the message names the file and, if known, the writer.
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
    """Yields a file's clients by name; they can be read while the file is open."""
    # Imported late: the import is slow, and few users need it.
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
        raise DataError(f"{path}: client {client!r}: lacks pixels or label, or is damaged: {error}") from error
    if pixels.ndim < 2 or labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: client {client!r}: pixels of shape {pixels.shape} do not match {labels.dtype} labels of shape "
            f"{labels.shape}"
        )
    return list(pixels.reshape(len(pixels), -1)), labels.tolist()


class FedEmnist(SourceSettings):
    """Reads TensorFlow Federated's Federated EMNIST: handwriting by some 3,400 people, 10 or 62 classes.

    `input` is `emnist_all.sqlite`, or `emnist_all.sqlite.lzma`, which is decompressed first; or a folder with the two
    `.h5` files of the older form. `num_classes` is 10 for the database's digits, 62 for all characters. Each writer's
    own test images are the test examples; `test_fraction` is not used. Background 1, ink 0.
    """

    def build(self, workspace: Path) -> RawData:
        """Describes the database, decompressed into the workspace if needed; errors as in `SourceSettings.build`."""
        if self.num_classes not in FED_EMNIST_CLASSES:
            raise ConfigError(
                f"data.num_classes is {self.num_classes}; fed_emnist has 10 (digits) or 62 (all characters)"
            )
        self.check_features(FED_EMNIST_SHAPE, self.num_classes)
        path = Path(self.input)
        if path.is_dir():
            files = list_h5_files(path)
            return RawData("fed_emnist", path, files, read_h5_users, are_images=True, has_test_examples=True)
        if path.suffix == ".lzma":
            path = decompress_database(path, workspace)
        splits = find_splits(path, self.num_classes)
        read, parameters = functools.partial(read_database, *splits), {"splits": list(splits)}
        return RawData(
            "fed_emnist",
            path.parent,
            (path.name,),
            read,
            are_images=True,
            has_test_examples=True,
            parameters=parameters,
        )
