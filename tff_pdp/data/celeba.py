"""CelebA by the person in the picture, with one attribute as the label.

Source: Liu et al., "Deep Learning Face Attributes in the Wild", ICCV 2015; by identity as in Caldas et al., "LEAF: A
Benchmark for Federated Settings", 2018. The files are those of the original distribution, with lines that end in CRLF
or LF: `identity_CelebA.txt` (name of an image, number of the person), `list_attr_celeba.txt` (the number of images, the
names of the attributes, then for each image its name and -1 or 1 for each attribute) and `img_align_celeba/*.jpg`.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from beam_pipelines.schema import UserRecord
from tff_pdp.errors import ConfigError, DataError

IDENTITY_FILE = "identity_CelebA.txt"
ATTRIBUTE_FILE = "list_attr_celeba.txt"
IMAGE_FOLDER = "img_align_celeba"
CELEBA_CLASSES = 2
_LABELS = {"-1": 0, "1": 1}


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


def hash_images(folder: Path, images: list[str]) -> str:
    """A digest of the content of these images, and of which are missing, with a progress bar: sha256."""
    digest = hashlib.sha256()
    for image in tqdm(images, desc="hash images", unit="image"):
        path = folder / IMAGE_FOLDER / image
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        digest.update(f"{image} {content}\n".encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class CelebaReader:
    """Reads every person's images, one person at a time: path of `identity_CelebA.txt` -> UserRecords, not judged.

    For `list_attr_celeba.txt`, which says nothing by itself, it gives none. An image that is missing or cannot be
    decoded is replaced by a text that says so, which validation keeps aside as a dead letter.

    Attributes:
      attribute: the label is 1 where an image has it, otherwise 0.
      shape: height, width and channels (3 for colours, 1 for grey) to which images are resized.
    """

    attribute: str
    shape: tuple[int, ...]

    def __call__(self, path: Path) -> Iterator[UserRecord]:
        """Reads the people.

        Raises:
          DataError: a text file is missing or damaged.
        """
        if path.name != IDENTITY_FILE:
            return
        for person, images in read_people(path.parent, self.attribute).items():
            x = [self._pixels(path.parent / IMAGE_FOLDER / image) for image, _ in images]
            yield UserRecord(person, path.name, x, [label for _, label in images], num_samples=len(images))

    def _pixels(self, path: Path) -> np.ndarray | str:
        # Imported late: checking the settings needs no images.
        from PIL import Image, UnidentifiedImageError

        height, width, channels = self.shape
        try:
            with Image.open(path, formats=["JPEG"]) as image:
                # Averages over the area that becomes a pixel.
                resized = image.convert("RGB" if channels == 3 else "L").resize((width, height), Image.Resampling.BOX)
        except FileNotFoundError:
            return f"{path.name}: no such file"
        # Its own text has the folder in it, which may differ between workers; what they write must not.
        except UnidentifiedImageError:
            return f"{path.name}: not a JPEG image"
        # What else Pillow raises for files that are cut short, damaged or forged.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return f"{path.name}: damaged: {error}"
        return np.asarray(resized, np.float32).ravel() / np.float32(255)


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
