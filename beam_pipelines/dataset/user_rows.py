"""Users as rows of Arrow batches, judged where they were read: what travels to the task that writes a shard."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow

from beam_pipelines.records import DeadLetter, Reason, UserRecord, raw_excerpt
from beam_pipelines.rules import ExampleRule, user_problem

SCHEMA = pyarrow.schema(
    [
        ("client", pyarrow.string()),
        ("source", pyarrow.string()),
        ("fingerprint", pyarrow.binary(32)),
        # Of this copy as it was read.
        ("num_examples", pyarrow.int64()),
        # Dead letters as JSON. Where the user as a whole cannot be used, the only one, and there are no examples.
        ("letters", pyarrow.string()),
        # float32 [n, values], int64 or float32 [n], twice bool [n] or null: valid examples in the order of the source.
        ("x", pyarrow.large_binary()),
        ("y", pyarrow.large_binary()),
        ("is_test", pyarrow.large_binary()),
        ("is_validation", pyarrow.large_binary()),
    ]
)


class UserRow(NamedTuple):
    """One copy of a user: its valid examples, and what is wrong with the others, or with all of it.

    Attributes:
      client: the user's name.
      source: name of the file.
      fingerprint: equal for copies with the same content.
      num_examples: that were read.
      letters: of examples, or one of the user as a whole.
      x: float32 `[n, values]`.
      y: int64 `[n]`, float32 of a regression.
      is_test: bool `[n]`, where the source says which examples are for test.
      is_validation: bool `[n]`, where it says which are for validation.
    """

    client: str
    source: str
    fingerprint: bytes
    num_examples: int
    letters: list[DeadLetter]
    x: np.ndarray
    y: np.ndarray
    is_test: np.ndarray | None
    is_validation: np.ndarray | None

    @property
    def is_usable(self) -> bool:
        """Whether the user as a whole can be used."""
        return not any(letter.example is None for letter in self.letters)

    @property
    def is_held_out(self) -> bool:
        """Whether the source says that no example is for training, as where it divides users instead of examples."""
        stated = [one for one in (self.is_test, self.is_validation) if one is not None]
        return bool(stated) and bool(np.logical_or.reduce(stated).all())


def judge_user(user: UserRecord, rule: ExampleRule) -> UserRow:
    """Divides one copy of a user into what is valid and what is not."""
    reason, raw = user_problem(user)
    y_dtype = np.int64 if rule.num_classes else np.float32
    letters: list[DeadLetter] = []
    x, y, valid = np.zeros((0, rule.num_values), np.float32), np.zeros(0, y_dtype), np.zeros(0, np.int64)
    if reason is not None:
        letters = [DeadLetter(user.source, user.client, None, reason, raw_excerpt(raw), user.num_examples)]
    else:
        problems = rule.problems(user.x, user.y)
        valid = np.array([place for place in range(len(user.x)) if place not in problems], np.int64)
        for place, (why, found) in problems.items():
            letters.append(DeadLetter(user.source, user.client, place, why, raw_excerpt(found)))
        if len(valid):
            x = np.stack([user.x[place] for place in valid])
            y = np.array([user.y[place] for place in valid], y_dtype)
    stated = (
        None if one is None or reason is not None else np.array(one, bool)[valid]
        for one in (user.is_test, user.is_validation)
    )
    return UserRow(user.client, user.source, user.fingerprint(), user.num_examples, letters, x, y, *stated)


def to_batch(rows: list[UserRow]) -> pyarrow.RecordBatch:
    """Rows as a batch of `SCHEMA`."""
    columns = zip(*map(_values, rows), strict=True)
    return pyarrow.record_batch(
        [pyarrow.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def rows_of(batch: pyarrow.RecordBatch, rule: ExampleRule) -> Iterator[UserRow]:
    """The rows of a batch, whose examples stay where they are."""
    y_dtype = np.int64 if rule.num_classes else np.float32
    columns = [batch.column(name) for name in SCHEMA.names]
    for place in range(len(batch)):
        client, source, fingerprint, size, letters = (column[place].as_py() for column in columns[:5])
        x, y, *stated = (column[place].as_buffer() for column in columns[5:])
        yield UserRow(
            client,
            source,
            fingerprint,
            size,
            [DeadLetter(**{**letter, "reason": Reason(letter["reason"])}) for letter in json.loads(letters)],
            np.frombuffer(x, np.float32).reshape(-1, rule.num_values),
            np.frombuffer(y, y_dtype),
            *(None if one is None else np.frombuffer(one, bool) for one in stated),
        )


def _values(row: UserRow) -> tuple:
    letters = "[" + ",".join(letter.to_json() for letter in row.letters) + "]"
    stated = (None if one is None else one.tobytes() for one in (row.is_test, row.is_validation))
    fixed = (row.client, row.source, row.fingerprint, row.num_examples, letters)
    return (*fixed, row.x.tobytes(), row.y.tobytes(), *stated)
