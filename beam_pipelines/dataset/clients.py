"""Runs the job that makes a client dataset (see `tff_pdp.data.manifest`) from users' raw data."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from tqdm.auto import tqdm

from beam_pipelines.dataset.accounting import KEPT, READ, USERS, count_users
from beam_pipelines.dataset.job import DatasetJob, run_dataset_job
from beam_pipelines.dataset.staging import Extent, write_shard
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.options import ClientDatasetOptions, ClientRules, RawData, Summary
from beam_pipelines.records import DeadLetter, Reason, UserRecord, raw_excerpt
from beam_pipelines.rules import ExampleRule, SplitRule, keyed_hash, user_problem
from tff_pdp.data.example_codec import encode_examples, record_lengths
from tff_pdp.data.manifest import FeatureSpec, FileRecord
from tff_pdp.errors import DataError

# Number of bytes of examples that a task collects before it sends them to the next stage.
_PIECE_BYTES = 64 << 20
# Smallest number of tasks that read small files, and largest size of the files that one task reads together.
_FEWEST_TASKS, _TASK_BYTES = 64, 4 << 20
# Number of bytes of examples that are encoded in one call.
_ENCODED_BYTES = 1 << 20

_ROWS = pyarrow.schema(
    [
        ("client", pyarrow.string()),
        ("source", pyarrow.string()),
        ("fingerprint", pyarrow.binary(32)),
        ("num_examples", pyarrow.int64()),
        # JSON. A dead letter of the user as a whole is the only letter, and the row then has no examples.
        ("letters", pyarrow.string()),
        # Valid examples in the order of the source: float32 [n, values], int64 or float32 [n], twice bool [n] or null.
        ("x", pyarrow.large_binary()),
        ("y", pyarrow.large_binary()),
        ("is_test", pyarrow.large_binary()),
        ("is_validation", pyarrow.large_binary()),
    ]
)


class _UserRow(NamedTuple):
    """Checked copy of a user: valid examples, and dead letters of the other examples or of the user as a whole.

    Attributes:
      client: name of the user.
      source: name of the file.
      fingerprint: hash that is equal for copies with the same content.
      num_examples: number of examples read.
      letters: dead letters.
      x: float32 `[n, values]`.
      y: int64 `[n]`; float32 for a regression.
      is_test: bool `[n]`, examples that the source keeps for test; None if the source does not say.
      is_validation: bool `[n]`, the same for validation.
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
        """Tells whether the user as a whole can be used."""
        return not any(letter.example is None for letter in self.letters)

    @property
    def is_held_out(self) -> bool:
        """Tells whether the source keeps all examples out of training, as it does if whole users are kept for test."""
        stated = [one for one in (self.is_test, self.is_validation) if one is not None]
        return bool(stated) and bool(np.logical_or.reduce(stated).all())


def _judge_user(user: UserRecord, rule: ExampleRule) -> _UserRow:
    """Divides one copy of a user into valid examples and dead letters."""
    reason, raw = user_problem(user)
    y_dtype = np.int64 if rule.num_classes else np.float32
    letters: list[DeadLetter] = []
    x, y, valid = np.zeros((0, rule.num_values), np.float32), np.zeros(0, y_dtype), np.zeros(0, np.int64)
    if reason is not None:
        allowed = user.problem.allowed if user.problem else ""
        letters = [DeadLetter(user.source, user.client, None, reason, raw_excerpt(raw), user.num_examples, allowed)]
    else:
        problems = rule.problems(user.x, user.y)
        valid = np.array([place for place in range(len(user.x)) if place not in problems], np.int64)
        for place, (why, found) in problems.items():
            allowed = rule.allowed(why, user.x[place], user.y[place])
            letters.append(DeadLetter(user.source, user.client, place, why, raw_excerpt(found), allowed=allowed))
        if len(valid):
            x = np.array([user.x[place] for place in valid])
            y = np.array([user.y[place] for place in valid], y_dtype)
    stated = (
        None if one is None or reason is not None else np.array(one, bool)[valid]
        for one in (user.is_test, user.is_validation)
    )
    return _UserRow(user.client, user.source, user.fingerprint(), user.num_examples, letters, x, y, *stated)


def _packed(row: _UserRow) -> dict[str, Any]:
    """Packs a row as values of `_ROWS`."""
    letters = json.dumps([dataclasses.asdict(letter) for letter in row.letters])
    arrays = {name: getattr(row, name) for name in _ROWS.names[5:]}
    packed = {name: None if array is None else array.tobytes() for name, array in arrays.items()}
    return row._asdict() | packed | {"letters": letters}


def _rows_of(batch: pyarrow.RecordBatch, rule: ExampleRule) -> Iterator[_UserRow]:
    """Yields the rows of a batch, without copies of their examples."""
    y_dtype = np.int64 if rule.num_classes else np.float32
    columns = [batch.column(name) for name in _ROWS.names]
    for place in range(len(batch)):
        client, source, fingerprint, size, letters = (column[place].as_py() for column in columns[:5])
        x, y, *stated = (column[place].as_buffer() for column in columns[5:])
        yield _UserRow(
            client,
            source,
            fingerprint,
            size,
            [DeadLetter(**{**letter, "reason": Reason(letter["reason"])}) for letter in json.loads(letters)],
            np.frombuffer(x, np.float32).reshape(-1, rule.num_values),
            np.frombuffer(y, y_dtype),
            *(None if one is None else np.frombuffer(one, bool) for one in stated),
        )


def client_stages(raw: RawData, rules: ClientRules) -> tuple[Stage, ...]:
    """Builds the stages of a client-dataset job."""
    if raw.user_stages is not None:
        first = tuple(raw.user_stages(rules))
    elif raw.read_users is not None:
        read = functools.partial(_read_users, raw.folder, raw.read_users, rules)
        first = (Stage("read_users", _units_of_tasks(raw), read, gives=(USERS,)),)
    else:
        raise ValueError(f"raw data {raw.source!r} have neither read_users nor user_stages; set one")
    write = functools.partial(_write_shard, rules)
    return (*first, partition_stage("write_shards", rules.num_shards, write, takes=(USERS,)))


def _units_of_tasks(raw: RawData) -> tuple[tuple[str, ...], ...]:
    """Returns the units that each task reads: one or, of many small files, several; a task costs some milliseconds."""
    most = max(1, len(raw.units) // _FEWEST_TASKS)
    tasks: list[list[str]] = []
    nbytes = 0
    for unit in raw.units:
        path = raw.folder / unit
        # A part of a file is not small.
        size = path.stat().st_size if path.is_file() else _TASK_BYTES
        if not tasks or nbytes + size > _TASK_BYTES or len(tasks[-1]) == most:
            tasks.append([])
            nbytes = 0
        tasks[-1].append(unit)
        nbytes += size
    return tuple(map(tuple, tasks))


def user_pieces(users: Iterable[UserRecord], rules: ClientRules, context: TaskContext) -> Iterator[Piece]:
    """Checks users, counts the users as read, and yields pieces for the tasks of the users' shards."""
    waiting: dict[int, list[_UserRow]] = {}
    size = 0
    for user in users:
        row = _judge_user(user, rules.examples)
        count_users(context, READ, users=1, examples=row.num_examples)
        shard = keyed_hash(rules.splits.seed, "shard", row.client.encode()) % rules.num_shards
        waiting.setdefault(shard, []).append(row)
        size += row.x.nbytes
        if size > _PIECE_BYTES:
            yield from _pieces(waiting)
            waiting, size = {}, 0
    yield from _pieces(waiting)


def _read_users(
    folder: Path,
    read: Callable[[Path], Iterable[UserRecord]],
    rules: ClientRules,
    units: tuple[str, ...],
    context: TaskContext,
) -> Iterator[Piece]:
    """Reads units of the raw data; sends every copy of every user to the task of the user's shard."""
    users = itertools.chain.from_iterable(read(folder / unit) for unit in units)
    return user_pieces(users, rules, context)


def _write_shard(rules: ClientRules, task: int, context: TaskContext) -> Iterable[Piece]:
    """Writes a shard's file, and dead letters, from all copies of the shard's users."""
    copies: dict[str, list[_UserRow]] = {}
    for batch in context.tables.get(USERS, []):
        for row in _rows_of(batch, rules.examples):
            copies.setdefault(row.client, []).append(row)
    write_shard(context.folder, task, rules.num_shards, _extents(copies, rules, context))
    return ()


def _extents(copies: dict[str, list[_UserRow]], rules: ClientRules, context: TaskContext) -> Iterator[Extent]:
    """Yields the extents of all clients, sorted by client and split."""
    for part in _parts(_chosen_examples(copies, rules, context), _ENCODED_BYTES):
        clients, splits, *arrays = zip(*part, strict=True)
        x, y, ids = map(np.concatenate, arrays)
        # One call for many clients: a call costs as much as the records of some tens of examples.
        records = encode_examples(rules.features, x, y, ids)
        stops = np.cumsum([len(one.y) for one in part])
        bounds = np.concatenate([[0], np.cumsum(record_lengths(rules.features, y))])[np.concatenate([[0], stops])]
        for place, one in enumerate(part):
            yield Extent(clients[place], splits[place], records[bounds[place] : bounds[place + 1]], len(one.y))


class _Chosen(NamedTuple):
    """The examples of one client in one split; the arrays are as in `encode_examples`."""

    client: str
    split: str
    x: np.ndarray
    y: np.ndarray
    ids: np.ndarray


def _parts(chosen: Iterable[_Chosen], nbytes: int) -> Iterator[list[_Chosen]]:
    """Yields runs of successive items, whose values take about `nbytes`."""
    part, size = [], 0
    for one in chosen:
        part.append(one)
        size += one.x.nbytes
        if size > nbytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _chosen_examples(copies: dict[str, list[_UserRow]], rules: ClientRules, context: TaskContext) -> Iterator[_Chosen]:
    for client in sorted(copies):
        row = _one_copy(copies.pop(client), context)
        if row is None:
            continue
        context.letters.extend(row.letters)
        for letter in row.letters:
            count_users(context, letter.reason, users=int(letter.example is None), examples=letter.num_examples)
        if row.is_usable:
            yield from _divide(row, rules, context)


def _divide(row: _UserRow, rules: ClientRules, context: TaskContext) -> Iterator[_Chosen]:
    size = len(row.y)
    if size < rules.min_examples:
        at_least = f"at least {rules.min_examples} (data.min_examples_per_client)"
        _leave_out(row, Reason.TOO_FEW_EXAMPLES, at_least, context)
        return
    ids = _example_ids(row.x, row.y)
    splits = rules.splits.divide(row.client, ids, row.is_test, row.is_validation)
    if not len(splits["train"]) and not (rules.splits.by_user or row.is_held_out):
        _leave_out(row, Reason.EMPTY_TRAIN_SPLIT, "at least one in the training split", context)
        return
    count_users(context, KEPT, users=1, examples=size)
    for split, chosen in sorted(splits.items()):
        if len(chosen):
            yield _Chosen(row.client, split, row.x[chosen], row.y[chosen], ids[chosen])


def _leave_out(row: _UserRow, reason: Reason, allowed: str, context: TaskContext) -> None:
    """Counts a client that a rule of the job leaves out, and keeps the client's name as a dead letter."""
    size = len(row.y)
    count_users(context, reason, users=1, examples=size)
    found = raw_excerpt(f"{size} valid examples")
    context.letters.append(DeadLetter(row.source, row.client, None, reason, found, size, allowed))


def _pieces(waiting: dict[int, list[_UserRow]]) -> Iterator[Piece]:
    for shard, rows in sorted(waiting.items()):
        yield Piece(USERS, shard, pyarrow.RecordBatch.from_pylist(list(map(_packed, rows)), _ROWS))


def _one_copy(copies: list[_UserRow], context: TaskContext) -> _UserRow | None:
    """Returns one of several identical copies of a user; if copies differ, makes all dead letters and returns None."""
    # Sorted, so that the kept copy does not depend on the order in which files were read.
    first, *others = sorted(copies, key=lambda copy: copy.source)
    if any(copy.fingerprint != first.fingerprint for copy in others):
        sources = str([copy.source for copy in (first, *others)])
        reason = Reason.CONFLICTING_USER
        for copy in copies:
            count_users(context, reason, users=1, examples=copy.num_examples)
            context.letters.append(DeadLetter(copy.source, copy.client, None, reason, sources[:200], copy.num_examples))
        return None
    for copy in others:
        count_users(context, Reason.IDENTICAL_USER, users=1, examples=copy.num_examples)
    return first


def _example_ids(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Makes ids of examples from their content alone: bytes `[n]` of 32 hexadecimal digits."""
    labels = y.astype("<i8" if y.dtype.kind == "i" else "<f4")
    content = np.concatenate([_as_bytes(x), _as_bytes(labels)], axis=1)
    width, everything = content.shape[1], content.tobytes()
    starts = range(0, len(everything), width)
    digests = [hashlib.blake2b(everything[start : start + width], digest_size=16).digest() for start in starts]
    return np.array(list(map(bytes.hex, digests)), "S32")


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of each row: uint8 `[n, bytes of a row]`."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.itemsize * math.prod(array.shape[1:]))


def run_client_dataset_job(raw: RawData, options: ClientDatasetOptions) -> Summary:
    """Makes a client dataset, unless the output already contains the dataset.

    Raises:
      DataError: as in `run_dataset_job`; or `split_by` is `user`, but the source has test examples of its own.
    """
    if raw.has_test_examples and options.split_by == "user":
        raise DataError(f"{options.input}: has test examples of its own, so split_by must be sample, not user")
    features = raw.features or FeatureSpec.of(tuple(options.input_shape), options.num_classes)
    options = dataclasses.replace(options, input_shape=features.shape, num_classes=features.num_classes)
    rules = ClientRules(
        features=features,
        examples=ExampleRule(math.prod(options.input_shape), options.num_classes, raw.are_images),
        splits=SplitRule(
            options.test_fraction,
            options.validation_fraction,
            options.exact_split,
            options.seed,
            by_user=options.split_by == "user",
        ),
        min_examples=options.min_examples_per_client,
        num_shards=options.num_shards,
    )
    unused = {"test_fraction": None} if raw.has_test_examples else {}
    if raw.has_validation_examples:
        unused["validation_fraction"] = None
    job = DatasetJob(
        # Besides the files, the options and the parameters of the raw data decide the content.
        parameters={**options.parameters(), **unused, "source": raw.source, **raw.parameters},
        sources=tuple(FileRecord.of(raw.folder, name) for name in tqdm(raw.files, desc="hash sources", unit="file")),
        features=features,
        num_shards=options.num_shards,
        stages=client_stages(raw, rules),
        class_names=raw.class_names,
        treated_as_public=raw.treated_as_public,
    )
    return run_dataset_job(job, options)
