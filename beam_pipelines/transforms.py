"""The steps of a client-dataset job, in the order of the pipeline: read, resolve duplicates, validate, split, encode.

Every step counts what it reads, keeps and drops in Beam metrics; `beam_pipelines.accounting` adds them up.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import TaggedOutput

from beam_pipelines import accounting
from beam_pipelines.io.staging import report_source
from beam_pipelines.raw_data import RawData
from beam_pipelines.schema import ClientSplit, DeadLetter, Example, Reason, UserRecord, raw_excerpt
from beam_pipelines.splits import SplitRule, keyed_hash
from beam_pipelines.validation import ExampleRule, user_problem
from tff_pdp.data import tfrecord
from tff_pdp.errors import DataError

DEAD_LETTERS = "dead_letters"


def shard_of(client: str, num_shards: int, seed: int) -> int:
    """The shard that holds a client."""
    return keyed_hash(seed, "shard", client.encode()) % num_shards


class ReadUsers(beam.DoFn):
    """File name -> `(client, UserRecord)` for every copy of every user in the file.

    The error of a file that cannot be read is left in the staging folder, where the job finds it and fails; raised
    here, it would reach the user buried under the runner's stack traces.
    """

    def __init__(self, raw: RawData, staging: Path):
        self._raw = raw
        self._staging = staging

    def process(self, element: str) -> Iterator[tuple[str, UserRecord]]:
        """Reads one file."""
        try:
            for user in self._raw.read_users(self._raw.folder / element):
                accounting.count_read(user.num_examples)
                yield user.client, user
        except DataError as error:
            report_source(self._staging, element, str(error))
        else:
            report_source(self._staging, element, error="")


class ResolveDuplicates(beam.DoFn):
    """`(client, copies)` -> one `UserRecord`: identical copies become one, conflicting ones are all dead letters."""

    def process(self, element: tuple[str, Iterable[UserRecord]]) -> Iterator[Any]:
        """Judges the copies of one client."""
        # Sorted, so that the copy that is kept does not depend on the order in which files were read.
        copies = sorted(element[1], key=lambda copy: copy.source)
        if len(copies) > 1 and len({copy.fingerprint() for copy in copies}) > 1:
            for copy in copies:
                yield from _reject_user(copy, Reason.CONFLICTING_USER, [other.source for other in copies])
            return
        for copy in copies[1:]:
            accounting.count_dropped(Reason.IDENTICAL_USER, users=1, examples=copy.num_examples)
        yield copies[0]


class ValidateExamples(beam.DoFn):
    """`UserRecord` -> `(client, [Example])`; what is malformed, the user or single examples, becomes dead letters."""

    def __init__(self, rule: ExampleRule):
        self._rule = rule

    def process(self, element: UserRecord) -> Iterator[Any]:
        """Judges one user and its examples."""
        reason, raw = user_problem(element)
        if reason is not None:
            yield from _reject_user(element, reason, raw)
            return
        examples = []
        is_test = element.is_test or itertools.repeat(None, len(element.x))
        for position, (x, y, stated) in enumerate(zip(element.x, element.y, is_test, strict=True)):
            reason, raw = self._rule.problem(x, y)
            if reason is None:
                label = int(y) if self._rule.num_classes else float(y)
                examples.append(Example(_example_id(x, label), x, label, stated))
            else:
                accounting.count_dropped(reason, users=0, examples=1)
                letter = DeadLetter(element.source, element.client, position, reason, raw_excerpt(raw))
                yield TaggedOutput(DEAD_LETTERS, letter)
        yield element.client, examples


class SplitAndEncode(beam.DoFn):
    """`(client, [Example])` -> `(shard, [ClientSplit])`, unless the client is too small to be used."""

    def __init__(self, rule: SplitRule, min_examples: int, num_shards: int):
        self._rule = rule
        self._min_examples = min_examples
        self._num_shards = num_shards

    def process(self, element: tuple[str, list[Example]]) -> Iterator[tuple[int, list[ClientSplit]]]:
        """Splits and encodes one client."""
        client, examples = element
        if len(examples) < self._min_examples:
            accounting.count_dropped(Reason.TOO_FEW_EXAMPLES, users=1, examples=len(examples))
            return
        by_split = self._rule.divide(examples)
        if not by_split["train"]:
            accounting.count_dropped(Reason.EMPTY_TRAIN_SPLIT, users=1, examples=len(examples))
            return
        accounting.count_kept(len(examples))
        splits = [
            ClientSplit(client, split, b"".join(map(_encode, members)), len(members))
            for split, members in sorted(by_split.items())
            if members
        ]
        yield shard_of(client, self._num_shards, self._rule.seed), splits


def _reject_user(user: UserRecord, reason: Reason, raw: Any) -> Iterator[TaggedOutput]:
    accounting.count_dropped(reason, users=1, examples=user.num_examples)
    letter = DeadLetter(user.source, user.client, None, reason, raw_excerpt(raw), user.num_examples)
    yield TaggedOutput(DEAD_LETTERS, letter)


def _example_id(x: np.ndarray, y: int | float) -> bytes:
    label = y.to_bytes(8, "little") if isinstance(y, int) else np.float32(y).tobytes()
    return hashlib.blake2b(x.tobytes() + label, digest_size=16).hexdigest().encode()


def _encode(example: Example) -> bytes:
    # Imported late: TensorFlow is slow to start, and the job's options and inputs are checked before.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    # On the wire, packed floats are the bytes of one string. Handed over one by one, they take most of a job's time.
    packed = tf.train.BytesList(value=[example.x.astype("<f4").tobytes()]).SerializeToString()
    if isinstance(example.y, int):
        label = tf.train.Feature(int64_list=tf.train.Int64List(value=[example.y]))
    else:
        label = tf.train.Feature(float_list=tf.train.FloatList(value=[example.y]))
    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList.FromString(packed)),
        "y": label,
        "example_id": tf.train.Feature(bytes_list=tf.train.BytesList(value=[example.example_id])),
    }
    message = tf.train.Example(features=tf.train.Features(feature=features))
    return tfrecord.frame(message.SerializeToString(deterministic=True))
