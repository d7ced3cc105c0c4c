"""The stages that join NIST's images by class with those by writer, and give the writers as users.

| stage | tasks | gives |
|---|---|---|
| hash class images | folders of `by_class` | (hash, class), to the hash's partition |
| hash writer images | folders of `by_write` | (hash, writer, name of the file), to the hash's partition |
| join images | partitions of hashes | (writer, name, label or what is wrong), to the writer's partition |
| read writers | partitions of writers | users, with their images decoded |
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow

from beam_pipelines.dataset.accounting import count_dropped, count_read, count_rows
from beam_pipelines.dataset.clients import USERS, ClientRules, user_pieces
from beam_pipelines.records import Reason, Unusable, UserRecord
from beam_pipelines.rules import keyed_hash
from beam_pipelines.sources.images import read_image
from beam_pipelines.stages import Piece, Stage, TaskContext, partition_stage
from tff_pdp.errors import DataError

BY_CLASS, BY_WRITE = "by_class", "by_write"
_CLASS_IMAGES, _WRITER_IMAGES, _LABELLED = "class_images", "writer_images", "labelled_images"
_COLUMNS = {
    "hash": pyarrow.binary(16),
    "class": pyarrow.string(),
    "writer": pyarrow.string(),
    "name": pyarrow.string(),
    "label": pyarrow.int16(),
    "reason": pyarrow.string(),
    "found": pyarrow.string(),
}
_MOST_PARTITIONS = 64
# How many classes or writers a dead letter names.
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class NistStages:
    """Builds the stages.

    Attributes:
      folder: of `by_class` and `by_write`; every worker must see it under this name.
      class_tasks: for each task the folders of images of one class each.
      writer_tasks: for each task the folders of images of one writer each.
      numbers: the label of each class that is wanted, by the name of its folder.
      shape: height, width and 1.
    """

    folder: Path
    class_tasks: tuple[tuple[str, ...], ...]
    writer_tasks: tuple[tuple[str, ...], ...]
    numbers: dict[str, int]
    shape: tuple[int, ...]

    def __call__(self, rules: ClientRules) -> tuple[Stage, ...]:
        """Builds them; the last gives the table of users."""
        partitions = min(_MOST_PARTITIONS, max(len(self.class_tasks), len(self.writer_tasks)))
        hash_classes = _HashClassImages(self.folder, partitions)
        hash_writers = _HashWriterImages(self.folder, partitions)
        join = _JoinImages(self.numbers, partitions)
        read = _ReadWriters(self.folder, self.shape, rules)
        takes = (_CLASS_IMAGES, _WRITER_IMAGES)
        return (
            Stage("hash_class_images", self.class_tasks, hash_classes, gives=(_CLASS_IMAGES,)),
            Stage("hash_writer_images", self.writer_tasks, hash_writers, gives=(_WRITER_IMAGES,)),
            partition_stage("join_images", partitions, join, takes, gives=(_LABELLED,)),
            partition_stage("read_writers", partitions, read, (_LABELLED,), gives=(USERS,)),
        )


@dataclasses.dataclass(frozen=True)
class _HashClassImages:
    """Folders of images of one class each -> (hash, name of the class), by hash."""

    folder: Path
    partitions: int

    def __call__(self, task: tuple[str, ...], context: TaskContext) -> Iterator[Piece]:
        rows = [(_content_hash(self.folder, name), place.split("/")[1]) for place, name in images_in(self.folder, task)]
        count_rows(context, _CLASS_IMAGES, "read", len(rows))
        yield from _pieces(_CLASS_IMAGES, ("hash", "class"), rows, lambda row: row[0][0] % self.partitions)


@dataclasses.dataclass(frozen=True)
class _HashWriterImages:
    """Folders of images of one writer each -> (hash, writer, name of the file), by hash."""

    folder: Path
    partitions: int

    def __call__(self, task: tuple[str, ...], context: TaskContext) -> Iterator[Piece]:
        rows = [
            (_content_hash(self.folder, name), place.split("/")[2], name)
            for place, name in images_in(self.folder, task)
        ]
        yield from _pieces(_WRITER_IMAGES, ("hash", "writer", "name"), rows, lambda row: row[0][0] % self.partitions)


@dataclasses.dataclass(frozen=True)
class _JoinImages:
    """Images of both kinds with the same hashes -> (writer, name, label or what is wrong), by writer."""

    numbers: dict[str, int]
    partitions: int

    def __call__(self, task: int, context: TaskContext) -> Iterator[Piece]:
        classes: dict[bytes, list[str]] = {}
        for content, name in _rows(context, _CLASS_IMAGES):
            classes.setdefault(content, []).append(name)
        writers: dict[bytes, set[str]] = {}
        for content, writer, _ in _rows(context, _WRITER_IMAGES):
            writers.setdefault(content, set()).add(writer)
        rows = []
        for content, writer, name in _rows(context, _WRITER_IMAGES):
            label, problem = self._label(set(classes.get(content, ())), writers[content])
            if label is None and problem is None:
                count_read(context, users=0, examples=1)
                count_dropped(context, Reason.CLASS_NOT_CHOSEN, users=0, examples=1)
            else:
                reason, found = problem or (None, None)
                rows.append((writer, name, label, reason, found))
        for content, copies in classes.items():
            what = "kept" if content in writers else Reason.IMAGE_WITHOUT_USER
            count_rows(context, _CLASS_IMAGES, what, len(copies))
        columns = ("writer", "name", "label", "reason", "found")
        yield from _pieces(_LABELLED, columns, rows, lambda row: _partition_of(row[0], self.partitions))

    def _label(self, classes: set[str], writers: set[str]) -> tuple[int | None, Unusable | None]:
        """An image's label, or what is wrong with it; neither for one of a class that is not chosen."""
        labels = {self.numbers.get(name) for name in classes}
        if not labels:
            return None, Unusable(Reason.IMAGE_WITHOUT_CLASS, "no image in by_class has this content")
        if len(labels) > 1:
            return None, Unusable(Reason.IMAGE_OF_SEVERAL_CLASSES, f"in classes {_listed(classes)}")
        (label,) = labels
        if label is not None and len(writers) > 1:
            return None, Unusable(Reason.IMAGE_OF_SEVERAL_USERS, f"by {_listed(writers)}")
        return label, None


@dataclasses.dataclass(frozen=True)
class _ReadWriters:
    """All images of some writers -> the writers as users."""

    folder: Path
    shape: tuple[int, ...]
    rules: ClientRules

    def __call__(self, task: int, context: TaskContext) -> Iterator[Piece]:
        return user_pieces(self._users(context), self.rules, context)

    def _users(self, context: TaskContext) -> Iterator[UserRecord]:
        rows = sorted(_rows(context, _LABELLED), key=lambda row: row[:2])
        for writer, images in itertools.groupby(rows, key=lambda row: row[0]):
            x, y = [], []
            for _, name, label, reason, found in images:
                problem = reason and Unusable(Reason(reason), f"{name}: {found}")
                x.append(problem or self._pixels(name))
                y.append(label)
            yield UserRecord(writer, BY_WRITE, x, y, len(x))

    def _pixels(self, name: str) -> np.ndarray | Unusable:
        # LEAF calls Pillow's `thumbnail`, which resizes square images so. Newer versions of it take a short cut.
        return read_image(
            self.folder, name, file_format="PNG", shape=self.shape, resampling="LANCZOS", must_be_square=True
        )


def images_in(folder: Path, places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The PNG files under some places in a folder: (place, name in the folder), sorted for each place."""
    for place in places:
        names = []
        for parent, _, files in os.walk(folder / place):
            inside = Path(parent).relative_to(folder).as_posix()
            names += [f"{inside}/{file}" for file in files if file.lower().endswith(".png")]
        yield from ((place, name) for name in sorted(names))


def _content_hash(folder: Path, name: str) -> bytes:
    try:
        return hashlib.blake2b((folder / name).read_bytes(), digest_size=16).digest()
    except OSError as error:
        raise DataError(f"{folder / name}: cannot be read: {error.strerror}") from error


def _partition_of(writer: str, partitions: int) -> int:
    return keyed_hash(0, "writer", writer.encode()) % partitions


def _listed(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:_NAMED]) + (f" and {len(first) - _NAMED} more" if len(first) > _NAMED else "")


def _pieces(
    table: str, columns: tuple[str, ...], rows: list[tuple], partition_of: Callable[[tuple], int]
) -> Iterator[Piece]:
    by_partition: dict[int, list[tuple]] = {}
    for row in rows:
        by_partition.setdefault(partition_of(row), []).append(row)
    for partition, ones in sorted(by_partition.items()):
        arrays = [
            pyarrow.array(values, _COLUMNS[name]) for name, values in zip(columns, zip(*ones, strict=True), strict=True)
        ]
        yield Piece(table, partition, pyarrow.record_batch(arrays, names=list(columns)))


def _rows(context: TaskContext, table: str) -> Iterator[tuple]:
    for batch in context.tables.get(table, []):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
