"""NIST Special Database 19 by the people who wrote it: images of characters with a writer, joined with their classes.

Source: Grother, "NIST Special Database 19", 1995; joined and scaled as in Caldas et al., "LEAF: A Benchmark for
Federated Settings", 2018 (`data/femnist/preprocess`). The second edition has every image twice, as PNG files of
128 x 128 pixels:

    by_class/<class>/hsf_<part>/*.png                   what it shows: 30 is 0, 41 is A, 61 is a, as in ASCII
    by_write/hsf_<part>/f<writer>_<form>/<kind>/*.png   who wrote it

Which two belong together is told by their content alone. Background 1, ink 0.
"""

import itertools
import string
from pathlib import Path

from tqdm import tqdm

from beam_pipelines.raw_data import RawData
from beam_pipelines.sources.images import hash_images
from beam_pipelines.sources.nist import BY_CLASS, BY_WRITE, NistStages, images_in
from tff_pdp.errors import ConfigError, DataError

NIST_SHAPE = (28, 28, 1)
_CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# Lower-case letters that look unlike their upper-case forms; EMNIST's By_Merge counts the others as upper case.
_OWN_LOWER_CASE = "abdefghnqrt"
_CHOICES = {
    "all": _CHARACTERS,
    "digits": string.digits,
    "letters": string.ascii_uppercase + string.ascii_lowercase,
    "merged": string.digits + string.ascii_uppercase + _OWN_LOWER_CASE,
}
CLASS_CHOICES = tuple(_CHOICES)


def class_numbers(classes: str) -> dict[str, int]:
    """The labels of classes, by the name of a class's folder: those that are not chosen are missing.

    Args:
      classes: `all` has 62: digits, upper case, lower case. `digits` has 10; `letters` 52, upper case first. `merged`
        has 47: lower-case letters of which both cases look alike count as upper case (Cohen et al., "EMNIST", 2017).

    Raises:
      ConfigError: there is no such choice.
    """
    if classes not in _CHOICES:
        raise ConfigError(f"classes: {classes!r} is not known; known: {', '.join(CLASS_CHOICES)}")
    numbers = {character: number for number, character in enumerate(_CHOICES[classes])}
    if classes == "merged":
        numbers |= {letter: numbers[letter.upper()] for letter in string.ascii_lowercase if letter not in numbers}
    return {f"{ord(character):x}": number for character, number in numbers.items()}


def num_nist_classes(classes: str) -> int:
    """The number of classes of a choice; raises ConfigError where there is no such choice."""
    return 1 + max(class_numbers(classes).values())


def nist_images(folder: Path, classes: str, shape: tuple[int, ...], images_per_task: int = 2000) -> RawData:
    """The raw data of a folder that holds `by_class` and `by_write`.

    Writers are users. An image of a writer that is damaged, has no class, or has the same content as an image in
    another class or by another writer, becomes a dead letter. Images of classes that are not chosen are counted and
    left out, as are images in `by_class` that no writer has.

    Args:
      folder: every worker must see it under this name.
      classes: see `class_numbers`.
      shape: height, width and 1. As in LEAF, images are scaled by Lanczos resampling.
      images_per_task: of which single tasks read at least so many; decides nothing else.

    Raises:
      ConfigError: no such choice of classes, or not one channel.
      DataError: a folder is missing or has no images, or a folder in `by_class` has another name than a class.
    """
    if len(shape) != 3 or shape[2] != 1:
        raise ConfigError(f"input_shape is {list(shape)}; NIST's images take [height, width, 1]")
    numbers = class_numbers(classes)
    class_images = _images_by_folder(folder, _class_folders(folder))
    writer_images = _images_by_folder(folder, _writer_folders(folder))
    for part, images in ((BY_CLASS, class_images), (BY_WRITE, writer_images)):
        if not any(images.values()):
            raise DataError(f"{folder / part}: no .png file where NIST SD19 has them; the input is the folder of both")
    stages = NistStages(
        folder, _tasks(class_images, images_per_task), _tasks(writer_images, images_per_task), numbers, shape
    )
    names = itertools.chain.from_iterable([*class_images.values(), *writer_images.values()])
    return RawData(
        source="nist_sd19",
        folder=folder,
        # Too many to be named one by one.
        files=(),
        read_users=None,
        are_images=True,
        user_stages=stages,
        parameters={"classes": classes, "images_sha256": hash_images(folder, names)},
    )


def _class_folders(folder: Path) -> list[str]:
    known = class_numbers("all")
    places = []
    for path in _folders(folder / BY_CLASS):
        if path.name not in known:
            raise DataError(f"{path}: not a class of NIST SD19, whose folders are called 30 to 39, 41 to 5a, 61 to 7a")
        # The folders called train_<class> have copies.
        places += [f"{BY_CLASS}/{path.name}/{part.name}" for part in _folders(path) if part.name.startswith("hsf_")]
    return places


def _writer_folders(folder: Path) -> list[str]:
    parts = _folders(folder / BY_WRITE)
    return [f"{BY_WRITE}/{part.name}/{writer.name}" for part in parts for writer in _folders(part)]


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; the input is the folder that holds NIST SD19's by_class and by_write")
    return sorted(one for one in path.iterdir() if one.is_dir())


def _images_by_folder(folder: Path, places: list[str]) -> dict[str, list[str]]:
    listed = tqdm(places, desc="list images", unit="folder")
    return {place: [name for _, name in images_in(folder, [place])] for place in listed}


def _tasks(images: dict[str, list[str]], images_per_task: int) -> tuple[tuple[str, ...], ...]:
    """Divides places into tasks, each with at least so many images where there are enough."""
    tasks, count = [[]], 0
    for place, names in images.items():
        if count >= images_per_task:
            tasks.append([])
            count = 0
        tasks[-1].append(place)
        count += len(names)
    return tuple(map(tuple, tasks))
