"""A source of somebody else: a table for each ward of a hospital, of numbers with the class in the last column."""

import csv
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from beam_pipelines.options import RawData, SourceSettings, files_in
from beam_pipelines.records import UserRecord
from tff_pdp.errors import DataError


class Wards(SourceSettings):
    """Reads `<ward>.csv`, with a line of names at the top.

    Attributes:
      delimiter: between the values of a line.
    """

    delimiter: str = ","

    def build(self, workspace: Path) -> RawData:
        """Describes the tables.

        Raises:
          DataError: the folder has none.
        """
        del workspace
        folder = Path(self.input)
        names = tuple(path.name for path in files_in(folder) if path.suffix == ".csv") if folder.is_dir() else ()
        if not names:
            raise DataError(f"{folder}: not a folder with tables, <ward>.csv")
        read = functools.partial(read_ward, delimiter=self.delimiter)
        return RawData("wards", folder, names, read, are_images=False, parameters={"delimiter": self.delimiter})


def read_ward(path: Path, delimiter: str) -> Iterator[UserRecord]:
    """Reads the one ward of a table; values that are no numbers are left to the job's own checks."""
    with open(path, newline="") as file:
        _, *lines = csv.reader(file, delimiter=delimiter)
    x = [_features(line[:-1]) for line in lines]
    yield UserRecord(path.stem, path.name, x, [_label(line[-1]) for line in lines], len(lines))


def _features(cells: list[str]) -> np.ndarray | list[str]:
    try:
        return np.array(cells, np.float32)
    except ValueError:
        return cells


def _label(cell: str) -> int | str:
    return int(cell) if cell.isdigit() else cell
