"""Runs the job for any raw data: users in, a client dataset out (`tff_pdp.data.manifest` describes its folder).

Its stages read and judge users, then divide and write the clients of each shard.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from beam_pipelines.dataset.accounting import count_dropped, count_kept, count_read
from beam_pipelines.dataset.job import DatasetJob, run_dataset_job
from beam_pipelines.dataset.shards import DeadLetterFile, Extent, write_shard
from beam_pipelines.dataset.user_rows import UserRow, judge_user, rows_of, to_batch
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.options import ClientDatasetOptions, ClientRules, RawData, Summary
from beam_pipelines.records import DeadLetter, Reason, UserRecord
from beam_pipelines.rules import ExampleRule, SplitRule, keyed_hash
from tff_pdp.data.example_codec import encode_examples
from tff_pdp.data.manifest import FeatureSpec, FileRecord
from tff_pdp.errors import DataError

USERS = "users"
# Examples that a task keeps before it hands them on.
_PIECE_BYTES = 64 << 20


def client_stages(raw: RawData, rules: ClientRules) -> tuple[Stage, ...]:
    """Builds the stages of a client-dataset job."""
    if raw.user_stages is not None:
        first = tuple(raw.user_stages(rules))
    elif raw.read_users is not None:
        first = (Stage("read_users", raw.units, _ReadUsers(raw.folder, raw.read_users, rules), gives=(USERS,)),)
    else:
        raise ValueError("raw data need read_users or user_stages")
    return (*first, partition_stage("write_shards", rules.num_shards, _WriteShard(rules), takes=(USERS,)))


def user_pieces(users: Iterable[UserRecord], rules: ClientRules, context: TaskContext) -> Iterator[Piece]:
    """Judges users, counts them as read, and hands them on, each to the shard that it will be in."""
    waiting: dict[int, list[UserRow]] = {}
    size = 0
    for user in users:
        row = judge_user(user, rules.examples)
        count_read(context, users=1, examples=row.num_examples)
        waiting.setdefault(shard_of(row.client, rules.num_shards, rules.splits.seed), []).append(row)
        size += row.x.nbytes
        if size > _PIECE_BYTES:
            yield from _pieces(waiting)
            waiting, size = {}, 0
    yield from _pieces(waiting)


def shard_of(client: str, num_shards: int, seed: int) -> int:
    """The shard that holds a client."""
    return keyed_hash(seed, "shard", client.encode()) % num_shards


@dataclasses.dataclass(frozen=True)
class _ReadUsers:
    """A unit of the raw data -> every copy of every user in it, to the shard that the user will be in."""

    folder: Path
    read_users: Callable[[Path], Iterable[UserRecord]]
    rules: ClientRules

    def __call__(self, task: str, context: TaskContext) -> Iterator[Piece]:
        return user_pieces(self.read_users(self.folder / task), self.rules, context)


@dataclasses.dataclass(frozen=True)
class _WriteShard:
    """All copies of the users of one shard -> its file, and dead letters."""

    rules: ClientRules

    def __call__(self, task: int, context: TaskContext) -> Iterable[Piece]:
        copies: dict[str, list[UserRow]] = {}
        for batch in context.tables.get(USERS, []):
            for row in rows_of(batch, self.rules.examples):
                copies.setdefault(row.client, []).append(row)
        with DeadLetterFile(context.folder, "write_shards", task) as letters:
            extents = self._extents(copies, context, letters)
            write_shard(context.folder, task, self.rules.num_shards, extents)
        return ()

    def _extents(
        self, copies: dict[str, list[UserRow]], context: TaskContext, letters: DeadLetterFile
    ) -> Iterator[Extent]:
        for client in sorted(copies):
            row = _one_copy(copies.pop(client), context, letters)
            if row is None:
                continue
            letters.add_all(row.letters)
            for letter in row.letters:
                is_user = letter.example is None
                count_dropped(context, letter.reason, users=int(is_user), examples=letter.num_examples)
            if row.is_usable:
                yield from self._divide(row, context)

    def _divide(self, row: UserRow, context: TaskContext) -> Iterator[Extent]:
        size = len(row.y)
        if size < self.rules.min_examples:
            count_dropped(context, Reason.TOO_FEW_EXAMPLES, users=1, examples=size)
            return
        ids = _example_ids(row.x, row.y)
        splits = self.rules.splits.divide(row.client, ids, row.is_test, row.is_validation)
        if not len(splits["train"]) and not (self.rules.splits.by_user or row.is_held_out):
            count_dropped(context, Reason.EMPTY_TRAIN_SPLIT, users=1, examples=size)
            return
        count_kept(context, users=1, examples=size)
        for split, chosen in sorted(splits.items()):
            if len(chosen):
                records = encode_examples(self.rules.features, row.x[chosen], row.y[chosen], ids[chosen])
                yield Extent(row.client, split, records, len(chosen))


def _pieces(waiting: dict[int, list[UserRow]]) -> Iterator[Piece]:
    for shard, rows in sorted(waiting.items()):
        yield Piece(USERS, shard, to_batch(rows))


def _one_copy(copies: list[UserRow], context: TaskContext, letters: DeadLetterFile) -> UserRow | None:
    """One of several identical copies of a user; None where they differ, which makes all of them dead letters."""
    # Sorted, so that the copy that is kept does not depend on the order in which files were read.
    first, *others = sorted(copies, key=lambda copy: copy.source)
    if any(copy.fingerprint != first.fingerprint for copy in others):
        sources = str([copy.source for copy in (first, *others)])
        for copy in copies:
            count_dropped(context, Reason.CONFLICTING_USER, users=1, examples=copy.num_examples)
            reason = Reason.CONFLICTING_USER
            letters.add(DeadLetter(copy.source, copy.client, None, reason, sources[:200], copy.num_examples))
        return None
    for copy in others:
        count_dropped(context, Reason.IDENTICAL_USER, users=1, examples=copy.num_examples)
    return first


def _example_ids(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Names of examples, made from their content alone: bytes `[n]` of 32 hexadecimal digits."""
    labels = y.astype("<i8" if y.dtype.kind == "i" else "<f4")
    ids: list[Any] = [
        hashlib.blake2b(x[place].tobytes() + labels[place].tobytes(), digest_size=16).hexdigest().encode()
        for place in range(len(y))
    ]
    return np.array(ids, "S32")


def run_client_dataset_job(raw: RawData, options: ClientDatasetOptions) -> Summary:
    """Prepares a client dataset, or finds that it is already there.

    Raises:
      DataError: a file cannot be read; more than `max_bad_fraction` of the input is unusable
        or no client is left; or the output is in the way. Nothing is written under the output's name then.
    """
    if raw.has_test_examples and options.split_by == "user":
        raise DataError(f"{options.input}: split_by user needs data without test examples of their own")
    features = FeatureSpec.of(tuple(options.input_shape), options.num_classes)
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
        # All that decides the content besides the files: the options, and what the raw data say of themselves.
        parameters={**options.parameters(), **unused, "source": raw.source, **raw.parameters},
        sources=tuple(FileRecord.of(raw.folder, name) for name in tqdm(raw.files, desc="hash sources", unit="file")),
        features=features,
        num_shards=options.num_shards,
        stages=client_stages(raw, rules),
    )
    return run_dataset_job(job, options)
