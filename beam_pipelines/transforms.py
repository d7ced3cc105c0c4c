"""The steps of a client-dataset job, in the order of the pipeline: read, resolve duplicates, validate, split, encode.

Every step counts what it reads, keeps and drops in Beam metrics; `beam_pipelines.accounting` adds them up.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import TaggedOutput

from beam_pipelines import accounting, leaf
from beam_pipelines.io.staging import report_source
from beam_pipelines.schema import ClientSplit, DeadLetter, Example, Reason, UserRecord, raw_excerpt
from tff_pdp.data import tfrecord
from tff_pdp.data.manifest import SPLITS
from tff_pdp.errors import DataError

DEAD_LETTERS = "dead_letters"


def keyed_hash(seed: int, purpose: str, content: bytes) -> int:
    """A uniform 64-bit number that depends on the arguments alone: not on order, other records or the runner."""
    digest = hashlib.blake2b(content, digest_size=8, key=str(seed).encode(), person=purpose.encode())
    return int.from_bytes(digest.digest(), "big")


def shard_of(client: str, num_shards: int, seed: int) -> int:
    """The shard that holds a client."""
    return keyed_hash(seed, "shard", client.encode()) % num_shards


class ReadUsers(beam.DoFn):
    """Source name -> `(client, UserRecord)` for every copy of every user in the file.

    A file that is not LEAF JSON yields nothing and leaves its error in the staging folder, where the job finds it;
    raised here, it would reach the user buried under the runner's stack traces.
    """

    def __init__(self, folder: Path, staging: Path):
        self._folder = folder
        self._staging = staging

    def process(self, element: str) -> Iterator[tuple[str, UserRecord]]:
        """Reads one file."""
        try:
            users = leaf.read_users(self._folder / element)
        except DataError as error:
            report_source(self._staging, element, str(error))
            return
        for user in users:
            accounting.count_read(user.num_examples)
            yield user.client, user
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

    def __init__(self, num_pixels: int, num_classes: int):
        self._num_pixels = num_pixels
        self._num_classes = num_classes

    def process(self, element: UserRecord) -> Iterator[Any]:
        """Judges one user and its examples."""
        reason, raw = _user_problem(element)
        if reason is not None:
            yield from _reject_user(element, reason, raw)
            return
        examples = []
        for position, (x, y) in enumerate(zip(element.x, element.y, strict=True)):
            reason, raw = self._example_problem(x, y)
            if reason is None:
                examples.append(Example(_example_id(x, int(y)), x, int(y)))
            else:
                accounting.count_dropped(reason, users=0, examples=1)
                letter = DeadLetter(element.source, element.client, position, reason, raw_excerpt(raw))
                yield TaggedOutput(DEAD_LETTERS, letter)
        yield element.client, examples

    def _example_problem(self, x: Any, y: Any) -> tuple[Reason | None, Any]:
        if not isinstance(x, np.ndarray):
            return Reason.PIXELS_NOT_NUMBERS, x
        if x.size != self._num_pixels:
            return Reason.PIXEL_COUNT, x
        if not np.isfinite(x).all():
            return Reason.PIXEL_NOT_FINITE, x[~np.isfinite(x)]
        if x.min() < 0 or x.max() > 1:
            return Reason.PIXEL_RANGE, x[(x < 0) | (x > 1)]
        if type(y) not in (int, float) or y != y or y in (float("inf"), float("-inf")) or y != int(y):
            return Reason.LABEL_NOT_INTEGER, y
        if not 0 <= y < self._num_classes:
            return Reason.LABEL_RANGE, y
        return None, None


class SplitAndEncode(beam.DoFn):
    """`(client, [Example])` -> `(shard, [ClientSplit])`, unless the client is too small to be used.

    An example's split depends on the seed and its own content alone, so adding or removing others never moves it,
    and identical images never lie on both sides.
    """

    def __init__(self, test_fraction: float, validation_fraction: float, min_examples: int, num_shards: int, seed: int):
        self._test_fraction = test_fraction
        self._validation_fraction = validation_fraction
        self._min_examples = min_examples
        self._num_shards = num_shards
        self._seed = seed

    def process(self, element: tuple[str, list[Example]]) -> Iterator[tuple[int, list[ClientSplit]]]:
        """Splits and encodes one client."""
        client, examples = element
        if len(examples) < self._min_examples:
            accounting.count_dropped(Reason.TOO_FEW_EXAMPLES, users=1, examples=len(examples))
            return
        by_split: dict[str, list[Example]] = {split: [] for split in SPLITS}
        for example in sorted(examples, key=lambda example: example.example_id):
            by_split[self._split_of(example)].append(example)
        if not by_split["train"]:
            accounting.count_dropped(Reason.EMPTY_TRAIN_SPLIT, users=1, examples=len(examples))
            return
        accounting.count_kept(len(examples))
        splits = [
            ClientSplit(client, split, b"".join(map(_encode, members)), len(members))
            for split, members in sorted(by_split.items())
            if members
        ]
        yield shard_of(client, self._num_shards, self._seed), splits

    def _split_of(self, example: Example) -> str:
        position = keyed_hash(self._seed, "split", example.example_id) / 2**64
        if position < self._test_fraction:
            return "test"
        return "validation" if position < self._test_fraction + self._validation_fraction else "train"


def _user_problem(user: UserRecord) -> tuple[Reason | None, Any]:
    if user.x is None and user.y is None:
        return Reason.MISSING_USER_DATA, user.num_samples
    if user.repeated_key:
        return Reason.REPEATED_KEY, None
    if not isinstance(user.x, list) or not isinstance(user.y, list):
        return Reason.MALFORMED_USER, user.y if isinstance(user.x, list) else user.x
    if len(user.x) != len(user.y):
        return Reason.LENGTH_MISMATCH, {"x": len(user.x), "y": len(user.y)}
    if user.num_samples is None:
        return Reason.UNLISTED_USER, len(user.x)
    if type(user.num_samples) is not int or user.num_samples != len(user.x):
        return Reason.NUM_SAMPLES_MISMATCH, {"num_samples": user.num_samples, "x": len(user.x)}
    return None, None


def _reject_user(user: UserRecord, reason: Reason, raw: Any) -> Iterator[TaggedOutput]:
    accounting.count_dropped(reason, users=1, examples=user.num_examples)
    letter = DeadLetter(user.source, user.client, None, reason, raw_excerpt(raw), user.num_examples)
    yield TaggedOutput(DEAD_LETTERS, letter)


def _example_id(x: np.ndarray, y: int) -> bytes:
    return hashlib.blake2b(x.tobytes() + y.to_bytes(8, "little"), digest_size=16).hexdigest().encode()


def _encode(example: Example) -> bytes:
    # Imported late: TensorFlow is slow to start, and the job's options and inputs are checked before.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=example.x)),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[example.y])),
        "example_id": tf.train.Feature(bytes_list=tf.train.BytesList(value=[example.example_id])),
    }
    message = tf.train.Example(features=tf.train.Features(feature=features))
    return tfrecord.frame(message.SerializeToString(deterministic=True))
