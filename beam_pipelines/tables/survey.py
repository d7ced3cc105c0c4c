"""Completes the schema of tables: what a schema does not declare is taken from the values of all clients, and named."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
from msgspec.structs import replace

from beam_pipelines.tables.columns import (
    Category,
    Classes,
    Column,
    Number,
    Tokens,
    as_texts,
    floats,
    is_list,
    is_text,
    sequences,
)
from beam_pipelines.tables.files import read_batches, read_header
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.settings import did_you_mean

# pyarrow.compute makes its functions at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

# A column with more categories than this is hardly one of categories: the schema must list them.
MOST_CATEGORIES, MOST_CLASSES, MOST_WORDS = 100, 1000, 100_000
# Number of columns that a text names.
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Roles:
    """The columns that settings name.

    Attributes:
      label: column of labels; None if only columns are described.
      client: column of clients; None if each file has the examples of one client.
      split: column with `train`, `validation` or `test`; None if the job divides the examples.
      features: columns of the features; None: all other columns.
    """

    label: str | None
    client: str | None = None
    split: str | None = None
    features: tuple[str, ...] | None = None

    @property
    def others(self) -> dict[str, str]:
        """Maps each setting that names a column without features to this column."""
        named = {"label_column": self.label, "client_column": self.client, "split_column": self.split}
        return {f"data.{setting}": column for setting, column in named.items() if column is not None}


@dataclasses.dataclass(frozen=True)
class TableSchema:
    """The complete schema of tables.

    Attributes:
      roles: columns that settings name.
      features: name and kind of each column of features, in the order of the values in an example.
      label: kind of the label's column: `Classes`, or for a regression `Number` or `Integer`; None without labels.
      treated_as_public: constants that were taken from the data, in words.
    """

    roles: Roles
    features: tuple[tuple[str, Column], ...]
    label: Column | None
    treated_as_public: tuple[str, ...] = ()

    @property
    def num_values(self) -> int:
        """Number of values in an example."""
        return sum(column.width for _, column in self.features)

    @property
    def value_names(self) -> tuple[str, ...]:
        """Name of each value in an example, such as `sport=run`."""
        return tuple(name for column, kind in self.features for name in kind.names(column))

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes; None for a regression."""
        classes = self.label.classes if isinstance(self.label, Classes) else None
        return None if classes is None else tuple(map(str, classes))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.roles.others.values(), *(name for name, _ in self.features))


class Seen:
    """Summary of the values of one column.

    Attributes:
      low: smallest number; infinite if there is none.
      high: largest number; minus infinity if there is none.
      numbers: number of values that are numbers.
      others: number of values that are no numbers.
      missing: number of missing values.
      texts: number of occurrences of each text; only so many texts that the column may be one of categories.
      has_more_texts: whether there are more texts than `texts` has.
      longest: number of values in the longest sequence.
      words: number of occurrences of each word in a sequence of words.
    """

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.numbers = self.others = self.missing = self.longest = 0
        self.texts: Counter[str] = Counter()
        self.words: Counter[str] = Counter()
        self.has_more_texts = self.has_lists = False
        self._has_texts = False

    def observe(self, values: pyarrow.Array, declared: Column | None) -> None:
        """Looks at the values of a batch; `declared` is the kind that the schema declares, if any."""
        self.has_lists |= is_list(values.type)
        if self.has_lists or isinstance(declared, Tokens):
            self._observe_sequences(values)
            return
        found, is_missing, is_wrong = floats(values)
        self._observe_numbers(found)
        self.numbers += int(np.isfinite(found).sum())
        self.missing += int(is_missing.sum())
        self.others += int(is_wrong.sum())
        self._has_texts |= is_text(values.type)
        if (self._has_texts or isinstance(declared, Category | Classes)) and not self.has_more_texts:
            _count(self.texts, as_texts(values))
            self.has_more_texts = len(self.texts) > MOST_CLASSES

    def kind(self) -> Column:
        """Returns the kind of column that suits what has been seen, as far as it is known from the values."""
        if self.has_lists:
            return Tokens()
        # Some texts among numbers are mistakes, which are reported row by row.
        return Number() if self.numbers >= self.others else Category()

    def classes(self) -> tuple[str, ...]:
        """Returns the texts in order: by number if all are whole numbers, otherwise by letter."""
        are_whole = all(text.lstrip("+-").isdecimal() for text in self.texts)
        return tuple(sorted(self.texts, key=lambda text: (int(text) if are_whole else 0, text)))

    def _observe_numbers(self, found: np.ndarray) -> None:
        finite = found[np.isfinite(found)]
        if len(finite):
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))

    def _observe_sequences(self, values: pyarrow.Array) -> None:
        lengths, flat = sequences(values)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        found, _, is_wrong = floats(flat)
        self._observe_numbers(found)
        self.numbers += int(np.isfinite(found).sum())
        self.others += int(is_wrong.sum())
        if is_text(flat.type):
            _count(self.words, as_texts(flat))


def complete_schema(
    folder: Path,
    names: Sequence[str],
    roles: Roles,
    declared: Mapping[str, Column],
    num_classes: int | None = None,
) -> tuple[TableSchema, dict[str, Seen]]:
    """Completes a schema: kinds, lists of values and lengths that are not declared are taken from the data.

    The values of columns that are declared in full are not read.

    Args:
      folder: folder of the tables.
      names: names of the tables.
      roles: columns that settings name.
      declared: kinds of columns that the schema declares, by column.
      num_classes: 0 for a regression; a number of classes if labels are whole numbers from 0; None for classes that
        the schema or the data name.

    Returns:
      The schema, and what was seen of the columns that were read.

    Raises:
      ConfigError: a setting names a column that most tables do not have, or a kind that its place does not allow.
      DataError: a table cannot be read, or a column has too many different texts, or values of no known kind.
    """
    headers = {name: header for name in names if (header := _header_or_none(folder / name))}
    if not headers:
        read_header(folder / names[0])
    header, _ = Counter(headers.values()).most_common(1)[0]
    features = _feature_columns(folder, header, roles, declared)
    kinds: dict[str, Column | None] = {name: declared.get(name) for name in features}
    if roles.label is not None:
        kinds[roles.label] = _label_kind(declared.get(roles.label), roles.label, num_classes)
    unknown = [name for name, kind in kinds.items() if kind is None or not _is_complete(kind)]
    seen = look_at(folder, [name for name, own in headers.items() if set(unknown) <= set(own)], unknown, kinds)
    taken: list[str] = []
    if roles.features is None and not set(features) <= set(declared):
        taken.append(f"which columns an example has ({len(features)})")
    guessed = [name for name in features if kinds[name] is None]
    if guessed:
        taken.append(f"kinds of {_listed(guessed)}")
    for name in unknown:
        kinds[name] = _completed(folder, name, kinds[name] or seen[name].kind(), seen[name], taken)
    complete = TableSchema(
        roles,
        tuple((name, _known(kinds[name])) for name in features),
        None if roles.label is None else kinds[roles.label],
        tuple(taken),
    )
    return complete, seen


def look_at(
    folder: Path, names: Sequence[str], columns: Sequence[str], kinds: Mapping[str, Column | None]
) -> dict[str, Seen]:
    """Reads columns of all tables, and returns what was seen of each; raises DataError as `complete_schema` does."""
    seen = {column: Seen() for column in columns}
    for name in names if columns else ():
        for batch in read_batches(folder / name, columns):
            for column in columns:
                try:
                    seen[column].observe(batch[column], kinds.get(column))
                except (pyarrow.ArrowException, NotImplementedError) as error:
                    kind = batch[column].type
                    raise DataError(
                        f"{folder / name}: the column {column!r} has values of the type {kind}, which are neither "
                        "numbers, texts nor lists of these: leave it out of data.feature_columns, or convert it"
                    ) from error
    return seen


def _header_or_none(path: Path) -> tuple[str, ...]:
    """Returns a table's header; nothing for an unreadable table, which is reported when its rows are read."""
    try:
        return read_header(path)
    except DataError:
        return ()


def _feature_columns(
    folder: Path, header: Sequence[str], roles: Roles, declared: Mapping[str, Column]
) -> tuple[str, ...]:
    named = {**roles.others, **{f"data.feature_columns[{n}]": one for n, one in enumerate(roles.features or ())}}
    named |= {f"data.schema.{name}": name for name in declared}
    for setting, column in named.items():
        if column not in header:
            raise ConfigError(
                f"{setting}: {column!r} is not a column of the tables in {folder}; {did_you_mean(column, header)}"
            )
    others = list(roles.others.values())
    if len(set(others)) < len(others):
        raise ConfigError(f"{', '.join(roles.others)} must name different columns, not {', '.join(others)}")
    if both := sorted(set(others) & set(roles.features or ())):
        raise ConfigError(f"data.feature_columns: {both[0]!r} is the column of labels, clients or splits as well")
    features = roles.features or tuple(name for name in header if name not in others)
    if not features:
        raise ConfigError(f"{folder}: no column of features is left beside {', '.join(others)}")
    for name in features:
        if isinstance(declared.get(name), Classes):
            raise ConfigError(f"data.schema.{name}: kind class is for labels; write kind category")
    return features


def _label_kind(declared: Column | None, column: str, num_classes: int | None) -> Column:
    """Returns the kind of the label's column, perhaps without the names of the classes."""
    if isinstance(declared, Category | Tokens):
        raise ConfigError(f"data.schema.{column}: a label is of the kind class or, for a regression, number or integer")
    is_regression = num_classes == 0 if num_classes is not None else declared is not None and not _is_class(declared)
    if declared is not None and is_regression == _is_class(declared):
        raise ConfigError(
            f"data.num_classes is {num_classes}, which does not go with the kind of data.schema.{column}: 0 is for "
            "numbers to be predicted, other numbers are for classes"
        )
    if is_regression:
        return declared or Number()
    classes = declared or Classes()
    assert isinstance(classes, Classes)
    if num_classes is None:
        return classes
    if classes.classes is None:
        return Classes(classes=tuple(range(num_classes)))
    if len(classes.classes) != num_classes:
        raise ConfigError(
            f"data.num_classes is {num_classes}, but data.schema.{column} has {len(classes.classes)} classes: leave "
            "out data.num_classes"
        )
    return classes


def _is_class(kind: Column) -> bool:
    return isinstance(kind, Classes)


def _is_complete(kind: Column) -> bool:
    match kind:
        case Category():
            return kind.categories is not None
        case Classes():
            return kind.classes is not None
        case Tokens():
            return kind.size is not None and kind.sequence_length is not None
    return True


def _completed(folder: Path, name: str, kind: Column, seen: Seen, taken: list[str]) -> Column:
    """Returns a column's kind with what has been seen, and adds to `taken` what was taken from the data."""
    if _is_complete(kind):
        return kind
    match kind:
        case Classes():
            _check_number(folder, name, seen, MOST_CLASSES, "class")
            taken.append(f"classes of {name!r} ({len(seen.texts)})")
            return Classes(classes=seen.classes())
        case Category():
            _check_number(folder, name, seen, MOST_CATEGORIES, "category")
            taken.append(f"categories of {name!r} ({len(seen.texts)})")
            return Category(categories=seen.classes())
        case Tokens():
            return _completed_tokens(folder, name, kind, seen, taken)
    raise AssertionError(kind)


def _completed_tokens(folder: Path, name: str, kind: Tokens, seen: Seen, taken: list[str]) -> Tokens:
    found: dict[str, Any] = {}
    if kind.sequence_length is None:
        found["sequence_length"] = max(1, seen.longest)
        taken.append(f"longest sequence of {name!r} ({found['sequence_length']})")
    if kind.size is None:
        if seen.others > seen.numbers:
            # In an order that does not depend on the order of rows.
            words = sorted(seen.words, key=lambda word: (-seen.words[word], word))
            if len(words) > MOST_WORDS:
                raise DataError(
                    f"{folder}: the column {name!r} has {len(words)} different words; declare "
                    f"data.schema.{name}.vocabulary with at most {MOST_WORDS}"
                )
            found["vocabulary"] = tuple(words)
            taken.append(f"vocabulary of {name!r} ({len(words)} words)")
        else:
            found["vocabulary_size"] = max(2, int(max(seen.high, 0)) + 1)
            taken.append(f"largest token id of {name!r} ({found['vocabulary_size'] - 1})")
    return replace(kind, **found)


def _check_number(folder: Path, name: str, seen: Seen, most: int, what: str) -> None:
    if not seen.texts:
        raise DataError(f"{folder}: the column {name!r} has no value")
    if len(seen.texts) > most:
        ways = (
            f"For numbers to be predicted, set data.num_classes to 0; else declare data.schema.{name} of kind class"
            if what == "class"
            else f"Declare data.schema.{name}, of kind number, tokens or category; or leave it out of "
            "data.feature_columns"
        )
        raise DataError(
            f"{folder}: the column {name!r} has more than {most} different values, such as "
            f"{', '.join(map(repr, sorted(seen.texts)[:3]))}, too many to be taken for a {what} each. {ways}"
        )


def _count(counter: Counter[str], texts: pyarrow.Array) -> None:
    for entry in compute.value_counts(compute.drop_null(texts)).to_pylist():
        counter[entry["values"]] += entry["counts"]


def _known(kind: Column | None) -> Column:
    assert kind is not None
    return kind


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMED]))
    return f"{shown} and {len(names) - _NAMED} more columns" if len(names) > _NAMED else shown
