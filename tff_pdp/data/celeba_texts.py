"""CelebA's text files: who is in which image, what the images have, and which are for training."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tff_pdp.errors import ConfigError, DataError

IDENTITY_FILE = "identity_CelebA.txt"
ATTRIBUTE_FILE = "list_attr_celeba.txt"
PARTITION_FILE = "list_eval_partition.txt"
_LABELS = {"-1": 0, "1": 1}
_PARTITIONS = {"0": "train", "1": "validation", "2": "test"}


def read_people(folder: Path, attribute: str) -> dict[str, list[tuple[str, int]]]:
    """Reads which images show whom: for each person the names of the images with their labels, sorted.

    Args:
      folder: has both text files.
      attribute: the label is 1 where an image has it, otherwise 0.

    Raises:
      ConfigError: there is no such attribute.
      DataError: a file is missing or damaged (names the line), or the two files name different images.
    """
    labels = _read_labels(folder / ATTRIBUTE_FILE, attribute)
    people: dict[str, list[tuple[str, int]]] = {}
    path, named = folder / IDENTITY_FILE, set()
    for number, line in _lines(path):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal():
            raise DataError(f"{path}: line {number}: needs the name of an image and the number of a person: {line!r}")
        image, person = fields
        if image not in labels:
            raise DataError(f"{path}: line {number}: {image} is not in {ATTRIBUTE_FILE}; get both files again")
        if image in named:
            raise DataError(f"{path}: line {number}: {image} occurs a second time")
        named.add(image)
        people.setdefault(f"identity_{int(person):05d}", []).append((image, labels[image]))
    if len(named) != len(labels):
        unnamed = next(image for image in labels if image not in named)
        raise DataError(f"{path}: {unnamed} of {ATTRIBUTE_FILE} is not in it; get both files again")
    return {person: sorted(people[person]) for person in sorted(people)}


def read_partitions(path: Path, people: Mapping[str, Iterable[tuple[str, int]]]) -> dict[str, str]:
    """Reads which images are for training, validation and test, by name: `train`, `validation` or `test`.

    Args:
      path: `list_eval_partition.txt`.
      people: as `read_people` gives them.

    Raises:
      DataError: the file is missing or damaged (names the line), or says nothing of an image of these people.
    """
    partitions: dict[str, str] = {}
    for number, line in _lines(path):
        fields = line.split()
        if len(fields) != 2 or fields[1] not in _PARTITIONS:
            raise DataError(f"{path}: line {number}: needs the name of an image and 0, 1 or 2: {line!r}")
        if fields[0] in partitions:
            raise DataError(f"{path}: line {number}: {fields[0]} occurs a second time")
        partitions[fields[0]] = _PARTITIONS[fields[1]]
    for images in people.values():
        for image, _ in images:
            if image not in partitions:
                raise DataError(f"{path}: {image} of {IDENTITY_FILE} is not in it; get both files again")
    return partitions


def _read_labels(path: Path, attribute: str) -> dict[str, int]:
    lines = _lines(path)
    count, names = (next(lines, (0, ""))[1] for _ in range(2))
    attributes = names.split()
    if not count.isdecimal() or not attributes:
        raise DataError(f"{path}: lines 1 and 2 must be the number of images and the names of the attributes")
    if attribute not in attributes:
        raise ConfigError(
            f"data.arguments.attribute: {path} has no attribute {attribute!r}; known: {', '.join(attributes)}"
        )
    labels, column = {}, 1 + attributes.index(attribute)
    for number, line in lines:
        fields = line.split()
        if len(fields) != 1 + len(attributes) or fields[column] not in _LABELS or Path(fields[0]).name != fields[0]:
            raise DataError(
                f"{path}: line {number}: needs the name of an image and {len(attributes)} attributes, each -1 or 1: "
                f"{line[:60]!r}"
            )
        labels[fields[0]] = _LABELS[fields[column]]
    if len(labels) != int(count):
        raise DataError(f"{path}: {len(labels)} images, where its first line says {count}; get the file again")
    return labels


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """A text file's lines that are not blank, with their numbers."""
    try:
        with open(path, encoding="ascii") as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; data.input takes CelebA's folder, with {path.name} in it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error
