"""Reads CelebA by the person in the picture, with one attribute as the label.

Source: Liu et al., "Deep Learning Face Attributes in the Wild", ICCV 2015; grouped by person as in Caldas et al.,
"LEAF: A Benchmark for Federated Settings", 2018. There are two forms. The original form has text files, whose lines
end in CRLF or LF: `identity_CelebA.txt` (name of an image, number of the person), `list_attr_celeba.txt` (the number of
images, the names of the attributes, then for each image its name and -1 or 1 for each attribute) and
`list_eval_partition.txt` (name of an image; 0 for training, 1 for validation, 2 for test). In the other form, LEAF's
JSON, users are numbers of people, examples are names of images, and label 1 means Smiling. Both forms need the JPEGs
`img_align_celeba/*.jpg`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from beam_pipelines.options import RawData, SourceSettings, part_names, split_part
from beam_pipelines.records import UserRecord
from beam_pipelines.sources.images import hash_images, read_image
from beam_pipelines.sources.leaf import SIDES, leaf_raw_data, read_users
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import Count, CountOrZero, Name

IDENTITY_FILE = "identity_CelebA.txt"
ATTRIBUTE_FILE = "list_attr_celeba.txt"
PARTITION_FILE = "list_eval_partition.txt"
_LABELS = {"-1": 0, "1": 1}
_PARTITIONS = {"0": "train", "1": "validation", "2": "test"}


def read_people(folder: Path, attribute: str) -> dict[str, list[tuple[str, int]]]:
    """Reads each person's `(image, label)` pairs, sorted; the label is 1 for images with the attribute, otherwise 0.

    Raises:
      ConfigError: there is no such attribute.
      DataError: a file is missing or damaged (the message names the line), or the two files name different images.
    """
    labels = _read_labels(folder / ATTRIBUTE_FILE, attribute)
    people: dict[str, list[tuple[str, int]]] = {}
    path, named = folder / IDENTITY_FILE, set()
    for number, line in _lines(path):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal():
            raise DataError(f"{path}: line {number}: must be the name of an image and the number of a person: {line!r}")
        image, person = fields
        if image not in labels:
            raise DataError(f"{path}: line {number}: {image} is not in {ATTRIBUTE_FILE}; download both files again")
        if image in named:
            raise DataError(f"{path}: line {number}: {image} occurs a second time")
        named.add(image)
        people.setdefault(f"identity_{int(person):05d}", []).append((image, labels[image]))
    if len(named) != len(labels):
        unnamed = next(image for image in labels if image not in named)
        raise DataError(f"{path}: lacks image {unnamed} of {ATTRIBUTE_FILE}; download both files again")
    return {person: sorted(people[person]) for person in sorted(people)}


def read_partitions(path: Path, people: Mapping[str, Iterable[tuple[str, int]]]) -> dict[str, str]:
    """Reads the split of each image, `train`, `validation` or `test`, by the image's name.

    Args:
      path: `list_eval_partition.txt`.
      people: `(image, label)` pairs by person, as `read_people` returns.

    Raises:
      DataError: the file is missing or damaged (the message names the line), or lacks an image of `people`.
    """
    partitions: dict[str, str] = {}
    for number, line in _lines(path):
        fields = line.split()
        if len(fields) != 2 or fields[1] not in _PARTITIONS:
            raise DataError(f"{path}: line {number}: must be the name of an image and 0, 1 or 2: {line!r}")
        if fields[0] in partitions:
            raise DataError(f"{path}: line {number}: {fields[0]} occurs a second time")
        partitions[fields[0]] = _PARTITIONS[fields[1]]
    for images in people.values():
        for image, _ in images:
            if image not in partitions:
                raise DataError(f"{path}: lacks image {image} of {IDENTITY_FILE}; download both files again")
    return partitions


def _read_labels(path: Path, attribute: str) -> dict[str, int]:
    lines = _lines(path)
    count, names = (next(lines, (0, ""))[1] for _ in range(2))
    attributes = names.split()
    if not count.isdecimal() or not attributes:
        raise DataError(f"{path}: lines 1 and 2 must be the number of images and the names of the attributes")
    if attribute not in attributes:
        raise ConfigError(f"data.attribute: {path} has no attribute {attribute!r}; known: {', '.join(attributes)}")
    labels, column = {}, 1 + attributes.index(attribute)
    for number, line in lines:
        fields = line.split()
        if len(fields) != 1 + len(attributes) or fields[column] not in _LABELS or Path(fields[0]).name != fields[0]:
            raise DataError(
                f"{path}: line {number}: must be the name of an image and {len(attributes)} attributes, each -1 or 1: "
                f"{line[:60]!r}"
            )
        labels[fields[0]] = _LABELS[fields[column]]
    if len(labels) != int(count):
        raise DataError(f"{path}: {len(labels)} images, but the first line states {count}; download the file again")
    return labels


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text file that are not blank, with their numbers."""
    try:
        with open(path, encoding="ascii") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; data.input must be CelebA's folder, with {path.name} in it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error


IMAGE_FOLDER = "img_align_celeba"
CELEBA_CLASSES = 2
CELEBA_ATTRIBUTE = "Smiling"
# The size of LEAF's images.
CELEBA_SHAPE = (84, 84, 3)
# About the number of images that one task decodes; nothing else depends on it.
_IMAGES_PER_TASK = 2000


class Celeba(SourceSettings):
    """Groups CelebA by the person in the picture, with one attribute as the label (Liu et al., 2015; LEAF, 2018).

    `input` is the folder of `identity_CelebA.txt` and `list_attr_celeba.txt`, or a folder of LEAF's JSON for CelebA. In
    the first case, users are called `identity_00001`, ... Both forms need the JPEGs; see `images`. Images are resized
    to `input_shape` (3 channels, or 1 for grey): each pixel is the average of an area. A missing or damaged image
    becomes a dead letter and counts against `max_bad_fraction`. To leave out people with fewer than 5 images, as LEAF
    does, set `min_examples_per_client` to 5.

    Attributes:
      attribute: attribute that images with label 1 have and images with label 0 lack; a name from the second line of
        `list_attr_celeba.txt`. LEAF's JSON has Smiling only.
      split: `random`: the job divides each person's images, or LEAF's folders `train` and `test` decide.
        `by_image_partition`: images are divided as in `list_eval_partition.txt`. That file lists single images, but
        puts all images of a person in one split: 8,192 people for training, 985 for validation, 1,000 for test.
      images: folder of the JPEGs; default: `img_align_celeba` in `input`, in the folder that contains `input`, or in
        a folder `raw` of either.
    """

    input_shape: Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)] = CELEBA_SHAPE
    num_classes: CountOrZero = CELEBA_CLASSES
    attribute: Name = CELEBA_ATTRIBUTE
    split: Literal["random", "by_image_partition"] = "random"
    images: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.input_shape[2] not in (1, 3):
            raise ValueError(f"input_shape must be [height, width, 3 or 1], not {list(self.input_shape)}")

    def build(self, workspace: Path) -> RawData:
        """Describes the folder as raw data; errors as in `SourceSettings.build`."""
        self.check_features(self.input_shape, CELEBA_CLASSES)
        folder = Path(self.input)
        leaf = [*folder.glob("*.json*"), *(folder / side for side in SIDES if (folder / side).is_dir())]
        raw = _leaf_form(folder, self) if leaf and not (folder / IDENTITY_FILE).exists() else _text_form(folder, self)
        assert raw.read_users
        users = [user for unit in raw.units for user in raw.read_users(folder / unit)]
        images = [name for user in users if isinstance(user.x, list) for name in user.x if _is_name(name)]
        jpegs = _image_folder(folder, self.images)
        count = max(1, math.ceil(len(images) / _IMAGES_PER_TASK / len(raw.units)))
        parameters = {
            "attribute": self.attribute,
            "split": self.split,
            # The images decide the content too, but are too many to be listed as files of the job.
            "images_sha256": hash_images(jpegs, sorted(set(images))),
        }
        return dataclasses.replace(
            raw,
            read_users=functools.partial(_read_part, raw.read_users, jpegs, self.input_shape),
            parts=tuple(part for unit in raw.units for part in part_names(unit, count)),
            parameters=parameters,
        )


def _read_part(
    read_people: Callable[[Path], Iterable[UserRecord]], images: Path, shape: tuple[int, ...], path: Path
) -> Iterator[UserRecord]:
    """Reads one part of a file, one person at a time, with pixels instead of names of images; raises DataError."""
    read = functools.partial(read_image, images, file_format="JPEG", shape=shape, resampling="BOX")
    file, part, parts = split_part(path)
    for place, user in enumerate(read_people(file)):
        if place % parts == part:
            # Anything but a plain file name is reported as it is, and never opened as a path.
            x = [read(name) if _is_name(name) else name for name in user.x] if isinstance(user.x, list) else user.x
            yield dataclasses.replace(user, x=x)


def _text_form(folder: Path, options: Celeba) -> RawData:
    """Describes the original text files as raw data whose examples are names of images."""
    by_partition = options.split == "by_image_partition"
    files = (IDENTITY_FILE, ATTRIBUTE_FILE, *([PARTITION_FILE] if by_partition else []))
    return RawData(
        "celeba",
        folder,
        files,
        functools.partial(_read_texts, files, options.attribute),
        are_images=True,
        has_test_examples=by_partition,
        has_validation_examples=by_partition,
        parts=(IDENTITY_FILE,),
    )


def _leaf_form(folder: Path, options: Celeba) -> RawData:
    """Describes LEAF's JSON as raw data whose examples are names of images."""
    if (options.attribute, options.split) != (CELEBA_ATTRIBUTE, "random"):
        raise ConfigError(
            f"attribute {options.attribute!r} and split {options.split!r}: {folder} has LEAF's JSON, which allows only "
            f"attribute {CELEBA_ATTRIBUTE!r} and split 'random'; for others, name the folder with {IDENTITY_FILE}"
        )
    return leaf_raw_data("celeba", folder, read_users)


def _read_texts(files: tuple[str, ...], attribute: str, path: Path) -> list[UserRecord]:
    """Reads all people; caches the last folder's, because several tasks read parts of it; raises DataError."""
    found = [path.with_name(name).stat() for name in files if path.with_name(name).exists()]
    return _read_users(path.parent, files, attribute, *((file.st_ino, file.st_mtime_ns) for file in found))


@functools.lru_cache(maxsize=1)
def _read_users(folder: Path, files: tuple[str, ...], attribute: str, *versions: tuple[int, int]) -> list[UserRecord]:
    people = read_people(folder, attribute)
    partitions = read_partitions(folder / PARTITION_FILE, people) if PARTITION_FILE in files else None
    users = []
    for person, images in people.items():
        names, labels = [name for name, _ in images], [label for _, label in images]
        user = UserRecord(person, IDENTITY_FILE, names, labels, num_samples=len(images))
        if partitions is not None:
            sides = [partitions[name] for name in names]
            is_validation = [side == "validation" for side in sides]
            user = dataclasses.replace(user, is_test=[side == "test" for side in sides], is_validation=is_validation)
        users.append(user)
    return users


def _image_folder(folder: Path, stated: str | None) -> Path:
    candidates = [place / raw / IMAGE_FOLDER for place in (folder, folder.parent) for raw in ("", "raw")]
    for path in candidates if stated is None else [Path(stated)]:
        if path.is_dir():
            return path
    if stated is not None:
        raise DataError(f"{stated}: no such folder; `images` must be the folder of CelebA's aligned and cropped images")
    raise DataError(
        f"{folder}: no folder {IMAGE_FOLDER} in it; if the folder of CelebA's aligned and cropped images is elsewhere, "
        "state it in `images`"
    )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name
