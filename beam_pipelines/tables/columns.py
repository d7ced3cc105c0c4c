"""Defines the kinds of columns in a table, and turns a column's values into numbers.

| kind | values | numbers of an example |
|---|---|---|
| `number` | numbers | one |
| `integer` | whole numbers of at most 2**24, which float32 holds exactly | one |
| `category` | texts | one for each category: 1 for the value's category, 0 for the others |
| `tokens` | a list of ids or words, or a text of ids or words between spaces | `sequence_length` ids |
| `class` | texts or numbers, for the label only | one: the number of the class |

Ids of tokens are whole numbers. The id 0 is padding: a sequence that is shorter than `sequence_length` ends with zeros,
and a model treats positions with the id 0 as absent. With a `vocabulary`, the first word has the id 1, and all words
that are not in the vocabulary share the id after the last word's.
"""

from collections import Counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as compute
from msgspec import Meta
from msgspec.structs import force_setattr

from beam_pipelines.records import Reason
from tff_pdp.settings import Count, Finite, Settings

# pyarrow.compute makes its functions at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

# Larger whole numbers are not exact in float32, the type of all features.
LARGEST_INTEGER = 2**24
_LARGEST = float(np.finfo(np.float32).max)
# Number of allowed values that a message lists.
_SHOWN = 12
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_INFINITE = r"(?i)^[+-]?inf(inity)?$"
_MISSING = r"(?i)^(na|nan|n/a|null|none)?$"

Values = tuple[str | int | float | bool, ...]


class Fault(NamedTuple):
    """Value of a column that cannot be used: the row in the batch, the reason, and the value's text."""

    row: int
    reason: Reason
    found: str


# Numbers float32 [n, width], and the values that cannot be used.
Numbers = tuple[np.ndarray, list[Fault]]


class Number(Settings, tag_field="kind", tag="number"):
    """Holds numbers.

    Attributes:
      low: smallest allowed value; none: any.
      high: largest allowed value; none: any.
      missing: value that replaces a missing value; none: a row with a missing value cannot be used.
    """

    low: Finite | None = None
    high: Finite | None = None
    missing: Finite | None = None

    @property
    def words(self) -> str:
        """The allowed values, in words."""
        return f"a number{_range(self.low, self.high)}"

    @property
    def width(self) -> int:
        """Number of values in an example."""
        return 1

    def names(self, column: str) -> tuple[str, ...]:
        """Returns the names of the values in an example."""
        return (column,)

    def numbers(self, values: pyarrow.Array) -> Numbers:
        """Returns a batch's values as float32 `[n, 1]`, and the values that cannot be used."""
        return _bounded(values, self.low, self.high, self.missing, is_whole=False)


class Integer(Settings, tag_field="kind", tag="integer"):
    """Holds whole numbers of at most 2**24 in size.

    Attributes:
      low: smallest allowed value; none: any.
      high: largest allowed value; none: any.
      missing: value that replaces a missing value; none: a row with a missing value cannot be used.
    """

    low: int | None = None
    high: int | None = None
    missing: int | None = None

    def __post_init__(self):
        for name in ("low", "high", "missing"):
            if abs(getattr(self, name) or 0) > LARGEST_INTEGER:
                raise ValueError(f"{name} must be at most 2**24 in size: float32 holds no larger number exactly")

    @property
    def words(self) -> str:
        """The allowed values, in words."""
        return f"a whole number{_range(self.low, self.high) or f' of at most {LARGEST_INTEGER} in size'}"

    @property
    def width(self) -> int:
        """Number of values in an example."""
        return 1

    def names(self, column: str) -> tuple[str, ...]:
        """Returns the names of the values in an example."""
        return (column,)

    def numbers(self, values: pyarrow.Array) -> Numbers:
        """Returns a batch's values as float32 `[n, 1]`, and the values that cannot be used."""
        low, high = (
            bound if stated is None else stated
            for bound, stated in ((-LARGEST_INTEGER, self.low), (LARGEST_INTEGER, self.high))
        )
        return _bounded(values, low, high, self.missing, is_whole=True)


class Category(Settings, tag_field="kind", tag="category"):
    """Holds one of several categories.

    Attributes:
      categories: all categories, in the order of their values in an example; none: the sorted values in the data.
    """

    categories: Values | None = None

    def __post_init__(self):
        force_setattr(self, "categories", _texts_of(self.categories, "categories"))

    @property
    def words(self) -> str:
        """The allowed values, in words."""
        return _one_of(self.categories or ())

    @property
    def width(self) -> int:
        """Number of values in an example."""
        return len(self.categories or ())

    def names(self, column: str) -> tuple[str, ...]:
        """Returns the names of the values in an example."""
        return tuple(f"{column}={category}" for category in self.categories or ())

    def numbers(self, values: pyarrow.Array) -> Numbers:
        """Returns a batch's values as float32 `[n, categories]` of 0 and 1, and the values that cannot be used."""
        places, faults = _places(values, self.categories or ())
        return (places[:, np.newaxis] == np.arange(self.width)).astype(np.float32), faults


class Tokens(Settings, tag_field="kind", tag="tokens"):
    """Holds a sequence of token ids or words.

    Attributes:
      vocabulary: the words; the first word has the id 1, all other words share the id after the last word's. None: the
        values are ids.
      vocabulary_size: number of ids, 0 included; without a vocabulary, ids are below this number. None: the number that
        the vocabulary needs or, without a vocabulary, one more than the largest id in the data.
      sequence_length: number of ids of an example; none: that of the longest sequence in the data.
      cut: keep the beginning of a longer sequence; without this, a row with a longer sequence cannot be used.
    """

    vocabulary: tuple[str, ...] | None = None
    vocabulary_size: Annotated[int, Meta(ge=2)] | None = None
    sequence_length: Count | None = None
    cut: bool = False

    def __post_init__(self):
        force_setattr(self, "vocabulary", _texts_of(self.vocabulary, "vocabulary"))
        if (self.size or 0) > LARGEST_INTEGER:
            raise ValueError("vocabulary_size must be at most 2**24: float32 holds no larger id exactly")
        if self.vocabulary is not None and self.vocabulary_size not in (None, len(self.vocabulary) + 2):
            raise ValueError(
                f"vocabulary_size must be {len(self.vocabulary) + 2} for a vocabulary of {len(self.vocabulary)} words: "
                "one id for each word, 0 for padding, and one for other words"
            )

    @property
    def size(self) -> int | None:
        """Number of ids, 0 included; None if it follows from the data."""
        return self.vocabulary_size if self.vocabulary is None else len(self.vocabulary) + 2

    @property
    def words(self) -> str:
        """The allowed values, in words."""
        of = "words" if self.vocabulary is not None else f"ids from 0 to {(self.size or 1) - 1}"
        return f"{'any number of' if self.cut else f'at most {self.sequence_length}'} {of}"

    @property
    def width(self) -> int:
        """Number of values in an example."""
        return self.sequence_length or 0

    def names(self, column: str) -> tuple[str, ...]:
        """Returns the names of the values in an example."""
        return tuple(f"{column}[{place}]" for place in range(self.width))

    def numbers(self, values: pyarrow.Array) -> Numbers:
        """Returns a batch's ids as float32 `[n, sequence_length]`, and the values that cannot be used."""
        lengths, flat = sequences(values)
        rows = np.repeat(np.arange(len(values)), lengths)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        faults = {int(row): Fault(int(row), Reason.VALUE_MISSING, "") for row in np.flatnonzero(nulls(values))}
        if self.vocabulary is None:
            ids, is_missing, is_wrong = floats(flat)
            is_wrong |= is_missing | (ids != np.floor(ids))
            kinds = ((is_wrong, Reason.VALUE_TYPE), ((ids < 0) | (ids >= (self.size or 1)), Reason.VALUE_RANGE))
            for is_at_fault, reason in kinds:
                for place in np.flatnonzero(is_at_fault):
                    row = int(rows[place])
                    faults.setdefault(row, Fault(row, reason, f"{text_at(flat, place)} at position {places[place]}"))
        else:
            found = compute.index_in(as_texts(flat), pyarrow.array(self.vocabulary, pyarrow.string()))
            ids = compute.fill_null(found, len(self.vocabulary)).to_numpy(zero_copy_only=False) + 1.0
        if not self.cut:
            for row in np.flatnonzero(lengths > self.width).tolist():
                faults.setdefault(row, Fault(row, Reason.VALUE_RANGE, f"a sequence of {lengths[row]}"))
        padded = np.zeros((len(values), self.width), np.float32)
        is_kept = places < self.width
        padded[rows[is_kept], places[is_kept]] = ids[is_kept]
        return padded, [faults[row] for row in sorted(faults)]


class Classes(Settings, tag_field="kind", tag="class"):
    """Holds the class of an example: the column of labels.

    Attributes:
      classes: names of all classes, in the order of their numbers; none: the sorted labels in the data.
    """

    classes: Values | None = None

    def __post_init__(self):
        force_setattr(self, "classes", _texts_of(self.classes, "classes"))

    @property
    def words(self) -> str:
        """The allowed values, in words."""
        return f"{_one_of(self.classes or ())} (the classes of data.schema or data.num_classes)"

    @property
    def width(self) -> int:
        """Number of values in an example."""
        return 1

    def names(self, column: str) -> tuple[str, ...]:
        """Returns the names of the values in an example."""
        return (column,)

    def numbers(self, values: pyarrow.Array) -> Numbers:
        """Returns a batch's numbers of classes as float32 `[n, 1]`, and the values that cannot be used."""
        places, faults = _places(values, self.classes or ())
        return np.maximum(places, 0)[:, np.newaxis].astype(np.float32), faults


Column = Number | Integer | Category | Tokens | Classes


def as_texts(values: pyarrow.Array) -> pyarrow.Array:
    """Returns a column's values as texts without spaces around them; null where a value is missing or empty."""
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    texts = compute.utf8_trim_whitespace(values.cast(pyarrow.string()))
    return compute.if_else(compute.equal(texts, ""), pyarrow.scalar(None, pyarrow.string()), texts)


def floats(values: pyarrow.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a column's values as float64 `[n]`, and whether each is missing, or no number: bool `[n]` each.

    A value that is missing, or is no number, becomes NaN.
    """
    if not is_text(values.type):
        found = values.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        return found, np.isnan(found), np.zeros(len(found), bool)
    texts = compute.utf8_trim_whitespace(_decoded(values).cast(pyarrow.string()))
    is_missing = _bools(compute.fill_null(compute.match_substring_regex(texts, _MISSING), True))
    is_number = compute.fill_null(compute.match_substring_regex(texts, _NUMBER), False)
    is_infinite = compute.fill_null(compute.match_substring_regex(texts, _INFINITE), False)
    # Arrow reads no plus sign.
    plain = compute.replace_substring_regex(texts, r"^\+", "")
    kept = compute.if_else(compute.or_(is_number, is_infinite), plain, pyarrow.scalar(None, pyarrow.string()))
    found = kept.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    return found, is_missing, ~(is_missing | _bools(is_number) | _bools(is_infinite))


def sequences(values: pyarrow.Array) -> tuple[np.ndarray, pyarrow.Array]:
    """Returns the length of each sequence, int64 `[n]`, and all their values one after another."""
    if not is_list(values.type):
        values = compute.utf8_split_whitespace(as_texts(values))
    lengths = compute.fill_null(compute.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), compute.list_flatten(values)


def nulls(values: pyarrow.Array) -> np.ndarray:
    """Tells of each value whether it is missing: bool `[n]`; an empty text is missing, an empty list is not."""
    return _bools((values if is_list(values.type) else as_texts(values)).is_null())


def is_text(kind: pyarrow.DataType) -> bool:
    """Tells whether values of an Arrow type are texts, or a dictionary of texts."""
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def is_list(kind: pyarrow.DataType) -> bool:
    """Tells whether values of an Arrow type are lists."""
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)


def text_at(values: pyarrow.Array, place: Any) -> str:
    """Returns the value at a place as text, for messages."""
    value = values[int(place)].as_py()
    return "" if value is None else str(value)


def _bounded(values: pyarrow.Array, low: Any, high: Any, missing: float | None, *, is_whole: bool) -> Numbers:
    found, is_missing, is_wrong = floats(values)
    if missing is not None:
        found = np.where(is_missing, missing, found)
        is_missing = np.zeros_like(is_missing)
    with np.errstate(invalid="ignore"):
        if is_whole:
            is_wrong |= ~is_missing & np.isfinite(found) & (found != np.floor(found))
        is_outside = np.abs(found) > _LARGEST
        is_outside |= (found < low) if low is not None else False
        is_outside |= (found > high) if high is not None else False
    faults = []
    kinds = ((is_missing, Reason.VALUE_MISSING), (is_wrong, Reason.VALUE_TYPE), (is_outside, Reason.VALUE_RANGE))
    for is_at_fault, reason in kinds:
        faults += [Fault(int(row), reason, text_at(values, row)) for row in np.flatnonzero(is_at_fault)]
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.where(is_missing | is_wrong | is_outside, 0.0, found).astype(np.float32)
    return numbers[:, np.newaxis], sorted(faults)


def _places(values: pyarrow.Array, allowed: Any) -> tuple[np.ndarray, list[Fault]]:
    """Returns the place of each value among the allowed texts, int64 `[n]`, -1 for others; and the others."""
    texts = as_texts(values)
    found = compute.index_in(texts, pyarrow.array(allowed, pyarrow.string()), skip_nulls=True)
    places = compute.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    faults = []
    for row in np.flatnonzero(places < 0).tolist():
        text = texts[row].as_py()
        faults.append(Fault(row, Reason.VALUE_MISSING if text is None else Reason.VALUE_RANGE, text or ""))
    return places, faults


def _decoded(values: pyarrow.Array) -> pyarrow.Array:
    return values.dictionary_decode() if pyarrow.types.is_dictionary(values.type) else values


def _bools(values: Any) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(bool)


def _texts_of(values: Any, name: str) -> tuple[str, ...] | None:
    """Returns declared values as texts, in the form that texts of a table have.

    Raises:
      ValueError: there is no value, or a value occurs twice.
    """
    if values is None:
        return None
    texts = tuple(str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values)
    if not texts or "" in texts:
        raise ValueError(f"{name} must have at least one value, and no empty one")
    if repeated := [text for text, count in Counter(texts).items() if count > 1]:
        raise ValueError(f"{name} has {repeated[0]!r} more than once")
    return texts


def _one_of(texts: Any) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"one of {', '.join(texts[:_SHOWN])}{more}"


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f" of at least {low:g}" if low is not None else f" of at most {high:g}" if high is not None else ""
