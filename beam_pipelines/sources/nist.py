"""Reads NIST Special Database 19 by writer: joins the images sorted by writer with the images sorted by class.

Source: Grother, "NIST Special Database 19", 1995; joined and scaled as in Caldas et al., "LEAF: A Benchmark for
Federated Settings", 2018 (`data/femnist/preprocess`). The second edition has every image twice, as PNG files of 128 x
128 pixels:

    by_class/<class>/hsf_<part>/*.png                   by class, in ASCII: 30 is 0, 41 is A, 61 is a
    by_write/hsf_<part>/f<writer>_<form>/<kind>/*.png   by writer

The two files of an image are found by their equal content. In examples, the background is 1 and ink is 0. The stages:

| stage | tasks | output |
|---|---|---|
| hash class images | folders of `by_class` | (hash, class), to the hash's partition |
| hash writer images | folders of `by_write` | (hash, writer, name of the file), to the hash's partition |
| join images | partitions of hashes | (writer, name, label or fault), to the writer's partition |
| read writers | partitions of writers | users, with decoded images |
"""

import functools
import hashlib
import itertools
import os
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import pyarrow
from tqdm import tqdm

from beam_pipelines.dataset.accounting import EXAMPLES, KEPT, READ, USERS
from beam_pipelines.dataset.clients import user_pieces
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.options import ClientRules, RawData, SourceSettings
from beam_pipelines.records import Reason, Unusable, UserRecord
from beam_pipelines.rules import keyed_hash
from beam_pipelines.sources.images import hash_images, read_image
from tff_pdp.errors import ConfigError, DataError

# The smallest number of images that one task reads; nothing else depends on it.
_IMAGES_PER_TASK = 2000
_Tasks = tuple[tuple[str, ...], ...]
_CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# Lower-case letters that differ in shape from upper case; EMNIST's By_Merge counts all others as upper case.
_OWN_LOWER_CASE = "abdefghnqrt"
_CHOICES = {
    "all": _CHARACTERS,
    "digits": string.digits,
    "letters": string.ascii_uppercase + string.ascii_lowercase,
    "merged": string.digits + string.ascii_uppercase + _OWN_LOWER_CASE,
}


def class_numbers(classes: str) -> dict[str, int]:
    """Returns a mapping from the name of each chosen class's folder to the label of the class.

    Args:
      classes: choice. `all` has 62 classes: digits, upper case, lower case. `digits` has 10. `letters` has 52, upper
        case first. `merged` has 47: a lower-case letter that looks like its upper-case letter shares the upper-case
        letter's class (as in EMNIST, 2017).
    """
    numbers = {character: number for number, character in enumerate(_CHOICES[classes])}
    if classes == "merged":
        numbers |= {letter: numbers[letter.upper()] for letter in string.ascii_lowercase if letter not in numbers}
    return {f"{ord(character):x}": number for character, number in numbers.items()}


def num_nist_classes(classes: str) -> int:
    """Returns the number of classes in a choice, such as `merged`."""
    return 1 + max(class_numbers(classes).values())


def _class_folders(folder: Path) -> list[str]:
    known = class_numbers("all")
    places = []
    for path in _folders(folder / BY_CLASS):
        if path.name not in known:
            raise DataError(f"{path}: not a folder of a class; NIST SD19 has the folders 30 to 39, 41 to 5a, 61 to 7a")
        # The folders called train_<class> hold copies.
        places += [f"{BY_CLASS}/{path.name}/{part.name}" for part in _folders(path) if part.name.startswith("hsf_")]
    return places


def _writer_folders(folder: Path) -> list[str]:
    parts = _folders(folder / BY_WRITE)
    return [f"{BY_WRITE}/{part.name}/{writer.name}" for part in parts for writer in _folders(part)]


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; the input must be the folder of NIST SD19's by_class and by_write")
    return sorted(one for one in path.iterdir() if one.is_dir())


def _images_by_folder(folder: Path, places: list[str]) -> dict[str, list[str]]:
    listed = tqdm(places, desc="list images", unit="folder")
    return {place: _images_in(folder, place) for place in listed}


def _tasks(images: dict[str, list[str]]) -> _Tasks:
    """Divides folders of images into tasks."""
    tasks, count = [[]], 0
    for place, names in images.items():
        if count >= _IMAGES_PER_TASK:
            tasks.append([])
            count = 0
        tasks[-1].append(place)
        count += len(names)
    return tuple(map(tuple, tasks))


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
# By table of hashed images: the columns, and the part of the folder's name that is the class or the writer.
_HASHED = {_CLASS_IMAGES: (("hash", "class"), 1), _WRITER_IMAGES: (("hash", "writer", "name"), 2)}
_MOST_PARTITIONS = 64
# Largest number of classes or writers that a dead letter names.
_NAMED = 5


def nist_stages(
    folder: Path,
    classes: str,
    shape: tuple[int, ...],
    tasks: tuple[_Tasks, _Tasks],
    rules: ClientRules,
) -> tuple[Stage, ...]:
    """Builds the stages that read users; the last stage yields the table of users.

    Args:
      folder: folder that contains `by_class` and `by_write`; every worker must see the folder under this name.
      classes: choice of classes; see `class_numbers`.
      shape: height, width and 1. As in LEAF, images are scaled by Lanczos resampling.
      tasks: folders of each task: first the tasks that hash class images, then the tasks that hash writer images.
      rules: rules of the job.
    """
    class_tasks, writer_tasks = tasks
    partitions = min(_MOST_PARTITIONS, max(map(len, tasks)))
    hash_classes, hash_writers = (
        functools.partial(_hash_images, folder, partitions, table) for table in (_CLASS_IMAGES, _WRITER_IMAGES)
    )
    join = functools.partial(_join_images, class_numbers(classes), partitions)
    read = functools.partial(_read_writers, folder, shape, rules)
    return (
        Stage("hash_class_images", class_tasks, hash_classes, gives=(_CLASS_IMAGES,)),
        Stage("hash_writer_images", writer_tasks, hash_writers, gives=(_WRITER_IMAGES,)),
        partition_stage("join_images", partitions, join, (_CLASS_IMAGES, _WRITER_IMAGES), gives=(_LABELLED,)),
        partition_stage("read_writers", partitions, read, (_LABELLED,), gives=(USERS,)),
    )


def _hash_images(
    folder: Path, partitions: int, table: str, task: tuple[str, ...], context: TaskContext
) -> Iterator[Piece]:
    """Hashes folders of images; gives (hash, class) or (hash, writer, name of the file) to the hash's partition."""
    columns, part = _HASHED[table]
    rows = [
        (_content_hash(folder, name), place.split("/")[part], name)[: len(columns)]
        for place in task
        for name in _images_in(folder, place)
    ]
    if table == _CLASS_IMAGES:
        context.count(_CLASS_IMAGES, READ, len(rows))
    yield from _pieces(table, columns, rows, lambda row: row[0][0] % partitions)


def _join_images(numbers: dict[str, int], partitions: int, task: int, context: TaskContext) -> Iterator[Piece]:
    """Joins images with equal hashes; gives (writer, name, label or fault) to the writer's partition."""
    classes: dict[bytes, list[str]] = {}
    for content, name in _rows(context, _CLASS_IMAGES):
        classes.setdefault(content, []).append(name)
    writers: dict[bytes, set[str]] = {}
    for content, writer, _ in _rows(context, _WRITER_IMAGES):
        writers.setdefault(content, set()).add(writer)
    rows = []
    for content, writer, name in _rows(context, _WRITER_IMAGES):
        label, problem = _label(numbers, set(classes.get(content, ())), writers[content])
        if label is None and problem is None:
            context.count(EXAMPLES, READ)
            context.count(EXAMPLES, Reason.CLASS_NOT_CHOSEN)
        else:
            rows.append((writer, name, label, *((problem.reason, problem.found) if problem else (None, None))))
    for content, copies in classes.items():
        context.count(_CLASS_IMAGES, KEPT if content in writers else Reason.IMAGE_WITHOUT_USER, len(copies))
    columns = ("writer", "name", "label", "reason", "found")
    yield from _pieces(_LABELLED, columns, rows, lambda row: keyed_hash(0, "writer", row[0].encode()) % partitions)


def _label(numbers: dict[str, int], classes: set[str], writers: set[str]) -> tuple[int | None, Unusable | None]:
    """Returns an image's label, or the reason for a dead letter, or neither for a class that is not chosen."""
    labels = {numbers.get(name) for name in classes}
    if not labels:
        return None, Unusable(Reason.IMAGE_WITHOUT_CLASS, "no image in by_class has this content")
    if len(labels) > 1:
        return None, Unusable(Reason.IMAGE_OF_SEVERAL_CLASSES, f"in classes {_listed(classes)}")
    (label,) = labels
    if label is not None and len(writers) > 1:
        return None, Unusable(Reason.IMAGE_OF_SEVERAL_USERS, f"by {_listed(writers)}")
    return label, None


def _read_writers(
    folder: Path, shape: tuple[int, ...], rules: ClientRules, task: int, context: TaskContext
) -> Iterator[Piece]:
    """Makes users of the writers of one partition, from all images of each writer."""
    return user_pieces(_users(folder, shape, context), rules, context)


def _users(folder: Path, shape: tuple[int, ...], context: TaskContext) -> Iterator[UserRecord]:
    # As Pillow's `thumbnail`, which LEAF calls, once resized square images; newer versions of Pillow take a short cut.
    read = functools.partial(
        read_image, folder, file_format="PNG", shape=shape, resampling="LANCZOS", must_be_square=True
    )
    rows = sorted(_rows(context, _LABELLED), key=lambda row: row[:2])
    for writer, images in itertools.groupby(rows, key=lambda row: row[0]):
        x, y = [], []
        for _, name, label, reason, found in images:
            x.append(Unusable(Reason(reason), f"{name}: {found}") if reason else read(name))
            y.append(label)
        yield UserRecord(writer, BY_WRITE, x, y, len(x))


def _images_in(folder: Path, place: str) -> list[str]:
    """Lists the PNG files below `folder / place`, sorted, as paths relative to `folder`."""
    names = []
    for parent, _, files in os.walk(folder / place):
        inside = Path(parent).relative_to(folder).as_posix()
        names += [f"{inside}/{file}" for file in files if file.lower().endswith(".png")]
    return sorted(names)


def _content_hash(folder: Path, name: str) -> bytes:
    try:
        return hashlib.blake2b((folder / name).read_bytes(), digest_size=16).digest()
    except OSError as error:
        raise DataError(f"{folder / name}: cannot be read: {error.strerror}") from error


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


class NistSd19(SourceSettings):
    """Groups NIST Special Database 19, the raw data of FEMNIST, by writer (Grother, 1995; LEAF, 2018).

    `input` is the folder of `by_class` and `by_write`. Users are the writers `f0000_14`, ... Images are scaled to
    `input_shape`, with 1 channel, as in LEAF. The background is 1, ink is 0. A writer's image becomes a dead letter if
    the image is damaged, has no class, or has the same content as an image of another class or writer. Images of
    classes that are not chosen, and images in `by_class` without a writer, are counted and left out.

    Attributes:
      classes: classes to use: `all` (62), `digits` (10), `letters` (52), or `merged` (47, as in EMNIST's By_Merge).
    """

    classes: Literal["all", "digits", "letters", "merged"] = "all"

    def build(self, workspace: Path) -> RawData:
        """Describes the folder as raw data; errors as in `SourceSettings.build`."""
        shape, folder = self.input_shape, Path(self.input)
        self.check_features(shape, num_nist_classes(self.classes))
        if len(shape) != 3 or shape[2] != 1:
            raise ConfigError(f"data.input_shape is {list(shape)}; NIST's images need [height, width, 1]")
        class_images = _images_by_folder(folder, _class_folders(folder))
        writer_images = _images_by_folder(folder, _writer_folders(folder))
        for part, images in ((BY_CLASS, class_images), (BY_WRITE, writer_images)):
            if not any(images.values()):
                raise DataError(
                    f"{folder / part}: no .png file in NIST SD19's folders; data.input needs by_class and by_write"
                )
        names = itertools.chain.from_iterable([*class_images.values(), *writer_images.values()])
        return RawData(
            source="nist_sd19",
            folder=folder,
            # The files are too many to be listed.
            files=(),
            read_users=None,
            are_images=True,
            user_stages=functools.partial(
                nist_stages, folder, self.classes, shape, (_tasks(class_images), _tasks(writer_images))
            ),
            parameters={"classes": self.classes, "images_sha256": hash_images(folder, names)},
        )
