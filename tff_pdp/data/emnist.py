"""Reads a split of EMNIST (Cohen et al., "EMNIST: an extension of MNIST to handwritten letters", 2017)."""

import dataclasses
import re
from pathlib import Path

from beam_pipelines.sources.mnist import read_labelled_images
from tff_pdp.data.images import ImageDataset, Images
from tff_pdp.data.manifest import FileRecord
from tff_pdp.errors import DataError

# The number of classes of each split, and its first label in the files.
_SPLITS = {
    "byclass": (62, 0),
    "bymerge": (47, 0),
    "balanced": (47, 0),
    "letters": (26, 1),
    "digits": (10, 0),
    "mnist": (10, 0),
}
_TRAIN_IMAGES = re.compile(rf"emnist-({'|'.join(_SPLITS)})-train-images-idx3-ubyte\.gz")


def read_emnist(path: Path) -> ImageDataset:
    """Reads one split: images uint8 `[n, 28, 28, 1]`, upright, ink bright (255) on black (0).

    Args:
      path: a folder with the four files of one split, `emnist-<split>-{train,test}-{images-idx3,labels-idx1}-ubyte.gz`;
        or, where a folder has those of several, the train images of one.

    Raises:
      DataError: a file is missing or damaged, the folder holds no split or several, or a label is out of range.
    """
    folder, split = _find_split(path)
    num_classes, first_label = _SPLITS[split]
    sides: list[Images] = []
    origin = []
    for side in ("train", "test"):
        names = (f"emnist-{split}-{side}-images-idx3-ubyte.gz", f"emnist-{split}-{side}-labels-idx1-ubyte.gz")
        stored = read_labelled_images(folder, *names, num_classes, first_label)
        # EMNIST's files have columns where MNIST's have rows.
        sides.append(Images(stored.x.swapaxes(1, 2), stored.y))
        origin += [dataclasses.asdict(FileRecord.of(folder, name)) for name in names]
    train, test = sides
    return ImageDataset(train, test, num_classes, origin)


def _find_split(path: Path) -> tuple[Path, str]:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; data.input takes the folder of EMNIST's .gz files")
    candidates = path.iterdir() if path.is_dir() else [path]
    splits = sorted(match[1] for file in candidates if (match := _TRAIN_IMAGES.fullmatch(file.name)))
    if not splits:
        raise DataError(
            f"{path}: no emnist-<split>-train-images-idx3-ubyte.gz, where <split> is one of: {', '.join(_SPLITS)}"
        )
    if len(splits) > 1:
        raise DataError(
            f"{path}: several splits of EMNIST: {', '.join(splits)}; data.input takes the train images of one, such as "
            f"{path / f'emnist-{splits[0]}-train-images-idx3-ubyte.gz'}"
        )
    return (path if path.is_dir() else path.parent), splits[0]
