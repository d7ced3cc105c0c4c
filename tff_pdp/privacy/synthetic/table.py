"""Turns tables with public columns into arrays for a generator, and synthetic arrays into tables.

A numeric column becomes one feature between -1/2 and 1/2. A categorical column of L categories becomes L - 1 features:
the centred one-hot vector, in coordinates of the space that such vectors span.
"""

import csv
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from tff_pdp.errors import DataError
from tff_pdp.privacy.synthetic.base import Bound, SyntheticExamples
from tff_pdp.settings import Name, Settings

# A synthetic number of a column that is not whole is rounded to a part in 10**_DIGITS of the column's width.
_DIGITS = 4
_GOLDEN = (math.sqrt(5) - 1) / 2
# Steps by which the frequencies of categories approach their probabilities.
_STEPS = 200


class Numeric(Settings, tag_field="kind", tag="numeric"):
    """A column of numbers.

    Attributes:
      low: public lower bound; a lower number in the table is refused.
      high: public upper bound.
      whole: whether all numbers are whole.
      bins: number of bins of equal width. With bins, the column's distribution may have any form, up to the width of a
        bin: a synthetic number lies evenly in a bin. Without bins, numbers of a class have a bell curve, cut off at the
        bounds. Bins make more features, and so more noise.
    """

    low: Bound
    high: Bound
    whole: bool = False
    bins: Annotated[int, Meta(ge=2, le=100)] | None = None

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; low must be below high")
        if self.whole and math.ceil(self.low) > math.floor(self.high):
            raise ValueError(f"there is no whole number between {self.low:g} and {self.high:g}")
        if self.bins and self.whole and self.bins > self._end - self._start:
            raise ValueError(f"bins is {self.bins}; there are only {self._end - self._start:g} whole numbers")

    @property
    def size(self) -> int:
        """Number of features."""
        return self.bins - 1 if self.bins else 1

    @property
    def most(self) -> float:
        """The largest squared norm of the features."""
        return self.size / self.bins if self.bins else 0.25

    @property
    def _start(self) -> float:
        return math.ceil(self.low) if self.whole else self.low

    @property
    def _end(self) -> float:
        return math.floor(self.high) + 1 if self.whole else self.high

    def encode(self, text: str) -> float | np.ndarray:
        """Returns the features of a cell, a number or, with bins, float64 `[size]`.

        Raises:
          ValueError: the cell is not allowed; the message says what is allowed, without the cell's text.
        """
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high:
            raise ValueError(f"is not a number between {self.low:g} and {self.high:g}")
        if self.whole and value != math.floor(value):
            raise ValueError("is not a whole number")
        if self.bins:
            place = int((value - self._start) * self.bins / (self._end - self._start))
            return _coordinates(self.bins)[:, min(place, self.bins - 1)]
        # Halves first: the width of large bounds has a rounding error.
        return (value - self.low) / (self.high - self.low) - 0.5

    def decode(self, features: np.ndarray, groups: np.ndarray) -> list[str]:
        """Returns cells for features, float64 `[n, size]`; with bins, bins are chosen as `Categorical.decode` does."""
        if self.bins:
            # Multiples of the golden ratio lie evenly between 0 and 1.
            evenly = np.arange(1, len(features) + 1) * _GOLDEN % 1
            edges = self._start + np.arange(self.bins + 1) * (self._end - self._start) / self.bins
            # The first whole number of a bin is not below its edge.
            edges = np.ceil(edges) if self.whole else edges
            places = _choose_in_groups(features, groups, self.bins)
            values = edges[places] * (1 - evenly) + edges[places + 1] * evenly
            values = np.floor(values) if self.whole else values
        else:
            values = self.low + (np.clip(features[:, 0], -0.5, 0.5) + 0.5) * (self.high - self.low)
        if self.whole:
            whole = np.clip(np.rint(values), math.ceil(self.low), math.floor(self.high))
            return [str(int(value)) for value in whole.tolist()]
        digits = _DIGITS - math.floor(math.log10(self.high - self.low))
        rounded = (min(max(round(value, digits), self.low), self.high) for value in values.tolist())
        return [repr(value).removesuffix(".0") for value in rounded]


class Categorical(Settings, tag_field="kind", tag="categorical"):
    """A column of categories.

    Attributes:
      categories: all public categories, as they are written in the table; any other cell is refused.
    """

    categories: Annotated[tuple[str | int, ...], Meta(min_length=2)]

    def __post_init__(self):
        if len(set(self.names)) < len(self.names):
            raise ValueError("categories has a category twice")

    @property
    def names(self) -> tuple[str, ...]:
        """The categories as text."""
        return tuple(map(str, self.categories))

    @property
    def size(self) -> int:
        """Number of features."""
        return len(self.categories) - 1

    @property
    def most(self) -> float:
        """The squared norm of the features, which is the same for all categories."""
        return self.size / len(self.categories)

    def index(self, text: str) -> int:
        """Returns a category's place; raises a ValueError, as in `Numeric.encode`."""
        if text not in self.names:
            raise ValueError(f"is none of the {len(self.names)} public categories")
        return self.names.index(text)

    def encode(self, text: str) -> np.ndarray:
        """Returns the features of a cell, float64 `[size]`; raises a ValueError, as in `Numeric.encode`."""
        return _coordinates(len(self.names))[:, self.index(text)]

    def decode(self, features: np.ndarray, groups: np.ndarray) -> list[str]:
        """Returns cells for features, float64 `[n, size]`.

        A row gets the category with the largest score, after an offset is added to each category's scores. The offsets
        make the frequency of each category among the rows of a group agree with the mean of the category's scores.
        Without offsets, rare categories would become rarer still, because a Gaussian cannot represent a probability
        near 0.
        """
        return [self.names[place] for place in _choose_in_groups(features, groups, len(self.names)).tolist()]


Column = Numeric | Categorical


class TableSchema(Settings):
    """The public description of a table. Nothing in it may be read off the records.

    Attributes:
      columns: all columns of the table, by name.
      label: name of a categorical column that divides the rows into classes, each with means of its own. Without a
        label, all rows are one class.
    """

    columns: Annotated[dict[Name, Column], Meta(min_length=1)]
    label: Name | None = None

    def __post_init__(self):
        if self.label is not None and not isinstance(self.columns.get(self.label), Categorical):
            raise ValueError(f"label is {self.label!r}; it must be the name of a categorical column")
        if not self.features:
            raise ValueError("columns has no column beside the label")

    @property
    def classes(self) -> tuple[str, ...]:
        """Categories of the label; a single category, the empty text, where there is no label."""
        column = self.columns[self.label] if self.label is not None else None
        return column.names if isinstance(column, Categorical) else ("",)

    @property
    def features(self) -> Mapping[str, Column]:
        """The columns other than the label."""
        return {name: column for name, column in self.columns.items() if name != self.label}

    @property
    def radius(self) -> float:
        """The largest norm that a row's features can have, so that a clip to this norm changes no row."""
        # Rounding may make a norm a little larger.
        return math.sqrt(sum(column.most for column in self.features.values())) * (1 + 1e-12)


class Table(NamedTuple):
    """The rows of a table.

    Attributes:
      header: names of columns, in the order of the file.
      cells: cells by row.
      x: features, float64 `[rows, features]`.
      y: place of each row's label in `TableSchema.classes`, int64 `[rows]`; 0 without a label.
    """

    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    x: np.ndarray
    y: np.ndarray


def read_table(path: Path, schema: TableSchema) -> Table:
    """Reads a CSV file whose first line has the names of all columns of the schema, in any order.

    Raises:
      DataError: the file cannot be read, has other columns, or a cell is missing or not allowed. The message names the
        file, the row (1 is the first after the header) and the column, but not the cell's text, which is private.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    except OSError as error:
        raise DataError(f"{path}: cannot read the file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise DataError(f"{path}: not CSV ({error})") from None
    except ValueError:
        raise DataError(f"{path}: no header") from None
    if sorted(header) != sorted(schema.columns):
        strange = sorted(set(header) ^ set(schema.columns)) or ["a name twice"]
        raise DataError(
            f"{path}: the header must have each column of the schema once, and no other; look at {strange[0]!r}"
        )
    while rows and not rows[-1]:
        rows.pop()
    x = np.zeros((len(rows), sum(column.size for column in schema.features.values())))
    y, places = np.zeros(len(rows), np.int64), _places(schema)
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number + 1} has {len(row)} cells; the header has {len(header)}")
        for name, text in zip(header, row, strict=True):
            column = schema.columns[name]
            try:
                if name == schema.label and isinstance(column, Categorical):
                    y[number] = column.index(text)
                else:
                    x[number, places[name]] = column.encode(text)
            except ValueError as error:
                reason = "is missing" if not text.strip() else str(error)
                raise DataError(f"{path}: row {number + 1}, column {name!r}: the value {reason}") from None
    return Table(tuple(header), rows, x, y)


def row_digests(table: Table) -> np.ndarray:
    """Returns a digest of each row as numbers, float32 `[rows, 32]`, from which the registry makes keyed digests.

    Rows with equal cells have equal digests, in whatever order their columns are.
    """
    order = sorted(range(len(table.header)), key=lambda place: table.header[place])
    texts = [repr([row[place].strip() for place in order]).encode() for row in table.cells]
    joined = b"".join(hashlib.sha256(text).digest() for text in texts)
    return np.frombuffer(joined, np.uint8).reshape(len(texts), 32).astype(np.float32)


def rows_of(made: SyntheticExamples, header: Sequence[str], schema: TableSchema) -> list[list[str]]:
    """Returns the rows of a table that is made of synthetic examples, with columns in the order of `header`."""
    places, columns = _places(schema), {}
    for name, column in schema.features.items():
        columns[name] = column.decode(made.x[:, places[name]], made.y)
    if schema.label is not None:
        columns[schema.label] = [schema.classes[place] for place in made.y.tolist()]
    return [list(row) for row in zip(*(columns[name] for name in header), strict=True)]


def csv_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as CSV text, with a header and lines that end with a newline."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return file.getvalue()


def _places(schema: TableSchema) -> dict[str, slice]:
    """Returns the places of each column's features."""
    ends = np.cumsum([0, *(column.size for column in schema.features.values())]).tolist()
    return {name: slice(*ends[place : place + 2]) for place, name in enumerate(schema.features)}


def _coordinates(categories: int) -> np.ndarray:
    """Returns orthonormal coordinates of centred one-hot vectors, float64 `[categories - 1, categories]` (Helmert)."""
    rows = np.tril(np.ones((categories, categories)), -1)[1:]
    sizes = np.arange(1, categories)
    rows[sizes - 1, sizes] = -sizes
    return rows / np.sqrt(sizes * (sizes + 1))[:, None]


def _choose_in_groups(features: np.ndarray, groups: np.ndarray, categories: int) -> np.ndarray:
    """Chooses a category for each row of features `[n, categories - 1]`, as often in a group as its mean scores say."""
    scores = features @ _coordinates(categories) + 1 / categories
    places = np.zeros(len(scores), np.int64)
    for group in np.unique(groups):
        own = groups == group
        places[own] = _choose(scores[own])
    return places


def _choose(scores: np.ndarray) -> np.ndarray:
    """Chooses a category for each row of scores `[n, categories]`, as often as the mean scores say."""
    wanted = np.clip(scores.mean(axis=0), 0, None)
    wanted = wanted / wanted.sum()
    offsets, best, least = np.zeros(len(wanted)), np.zeros(len(scores), np.int64), math.inf
    for step in range(_STEPS):
        chosen = (scores + offsets).argmax(axis=1)
        found = np.bincount(chosen, minlength=len(wanted)) / len(scores)
        error = float(np.abs(found - wanted).sum())
        if error < least:
            best, least = chosen, error
        if least <= 1 / len(scores):
            break
        ratio = np.log((wanted + 0.5 / len(scores)) / (found + 0.5 / len(scores)))
        offsets = offsets + ratio * 0.3 / (1 + step / 20)
    return best
