"""MNIST's training images by the people who wrote them.

Source: C. Yadav and L. Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019. Their QMNIST found the NIST record of
every image of MNIST, and with it the writer: `qmnist-train-labels-idx2-int.gz` has one row for each training image of
MNIST, in its order. 539 people wrote them. Other people wrote MNIST's test images, so those have no part in it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from beam_pipelines.sources.mnist import read_idx
from beam_pipelines.sources.silo_arrays import SiloArrays
from tff_pdp.data.images import Images, shrunk
from tff_pdp.errors import DataError

WRITERS_FILE = "qmnist-train-labels-idx2-int.gz"
_LABEL, _WRITER = 0, 2


def find_writers(folder: Path, named: str | None) -> Path:
    """The file of writers: the one that is named, or `WRITERS_FILE` in MNIST's folder or in `mnist_writers` beside it.

    Raises:
      DataError: there is no such file.
    """
    places = [Path(named)] if named else [folder / WRITERS_FILE, folder.parent / "mnist_writers" / WRITERS_FILE]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"{' and '.join(map(str, places))}: no such file; get QMNIST's {WRITERS_FILE}, and name it in "
        "data.arguments.writers"
    )


def read_writers(path: Path, images: Images) -> np.ndarray:
    """Reads who wrote each of MNIST's training images: int64 `[n]`, the number of the person.

    Raises:
      DataError: the file is damaged or of another form, or its labels are not those of the images (names the row).
    """
    table = read_idx(path)
    if table.ndim != 2 or table.shape[1] <= _WRITER:
        raise DataError(f"{path}: of shape {table.shape}; QMNIST's file has a row of 8 numbers for each image")
    if len(table) != len(images.y):
        raise DataError(f"{path}: {len(table)} rows for {len(images.y)} training images; it goes with all of MNIST's")
    different = np.flatnonzero(table[:, _LABEL] != images.y)
    if different.size:
        row = different[0]
        raise DataError(
            f"{path}: row {row} (the first is 0) has label {table[row, _LABEL]}, but that image of MNIST has label "
            f"{images.y[row]}; data.input must be the original MNIST, in its order"
        )
    return table[:, _WRITER].astype(np.int64)


def mnist_writers(images: Images, writers: np.ndarray, shrink: int) -> Iterator[SiloArrays]:
    """Makes a client of each writer, one at a time: `writer_0000`, ..., with the person's number.

    Args:
      images: MNIST's training images.
      writers: int64 `[n]`, who wrote each.
      shrink: see `tff_pdp.data.images.shrunk`.

    Yields:
      x uint8 `[n, height / shrink, width / shrink, 1]`, y int64 `[n]`, in MNIST's order.
    """
    # Stable, so that a writer's images stay in their order.
    order = np.argsort(writers, kind="stable")
    numbers, starts = np.unique(writers[order], return_index=True)
    for number, part in zip(numbers, np.split(order, starts[1:]), strict=True):
        yield SiloArrays(f"writer_{number:04d}", shrunk(images.x[part], shrink), images.y[part])
