"""Decides which users and examples are usable, and which examples are for training, validation and test."""

import dataclasses
import fractions
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from beam_pipelines.records import Reason, Unusable, UserRecord
from tff_pdp.data.manifest import SPLITS


def keyed_hash(seed: int, purpose: str, content: bytes) -> int:
    """Returns a uniform 64-bit hash that depends only on the arguments, not on other records or the runner."""
    return int(_keyed_hashes(seed, purpose, [content])[0])


def _keyed_hashes(seed: int, purpose: str, contents: Iterable[bytes]) -> np.ndarray:
    """Returns the `keyed_hash` of each of `n` contents: uint64 `[n]`."""
    key, person = str(seed).encode(), purpose.encode()
    digests = [hashlib.blake2b(content, digest_size=8, key=key, person=person).digest() for content in contents]
    return np.array(digests, "S8").view(">u8").astype(np.uint64)


# In the order of the line from 0 to 1 that the hashes of examples fall on.
_BY_POSITION = np.array(["test", "validation", "train"])


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """Rule that divides a client's examples among the splits, independently of other clients.

    By hash (the default), an example's split depends on the seed and the example's content alone. Adding or removing
    other examples never moves an example, and identical examples are always in the same split.

    With `exact`, examples are ranked by hash: the first ones are for test, the next ones for validation. Adding or
    removing one example may then move up to three others between splits, and identical examples may be in different
    splits. A privacy guarantee for the training examples then treats the division as fixed.

    With `by_user`, all of a client's examples are in one split, which depends on the seed and the client's name alone.
    No client has both training and test examples.

    Attributes:
      test_fraction: share of examples for test; not used if the source states which examples are for test.
      validation_fraction: share of examples for validation; not used if the source states which examples are for
        validation. If the source states only the test examples, the fraction is a share of the remaining examples.
      exact: whether shares are exact for each client, rounded up to whole examples; otherwise, shares are exact in
        expectation.
      seed: seed of the hash.
      by_user: whether each client as a whole is in one split; the fractions are then shares of clients.
    """

    test_fraction: float
    validation_fraction: float
    exact: bool
    seed: int
    by_user: bool = False

    def divide(
        self, client: str, ids: np.ndarray, is_test: np.ndarray | None = None, is_validation: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Returns a mapping from split to the positions of the split's examples, int64, sorted by the examples' ids.

        Args:
          client: name of the client.
          ids: ids of the examples, bytes `[n]`.
          is_test: whether the source reserves each example for test, bool `[n]`; None if the source does not say.
          is_validation: whether the source reserves each example for validation, bool `[n]`; None if the source does
            not say. If both arrays are given, all other examples are for training.
        """
        everyone = np.argsort(ids, kind="stable")
        if self.by_user:
            nobody = everyone[:0]
            shares = (self.test_fraction, self.validation_fraction)
            (own,) = self._splits_at(_keyed_hashes(self.seed, "split", [client.encode()]), shares)
            return {split: everyone if split == own else nobody for split in SPLITS}
        names = np.full(len(ids), "", "<U10")
        for split, stated in (("validation", is_validation), ("test", is_test)):
            if stated is not None:
                names[stated] = split
        rest = everyone[names[everyone] == ""]
        hashes = _keyed_hashes(self.seed, "split", ids[rest].tolist())
        shares = (
            self.test_fraction if is_test is None else 0.0,
            self.validation_fraction if is_validation is None else 0.0,
        )
        names[rest] = self._names_by_rank(hashes.tolist(), shares) if self.exact else self._splits_at(hashes, shares)
        return {split: everyone[names[everyone] == split] for split in SPLITS}

    def _splits_at(self, hashes: np.ndarray, shares: tuple[float, float]) -> np.ndarray:
        """Returns the split that each 64-bit hash, uint64 `[n]`, falls into: `<U10` `[n]`."""
        positions = hashes.astype(np.float64) / 2**64
        bounds = np.array([shares[0], sum(shares)])
        return _BY_POSITION[np.searchsorted(bounds, positions, side="right")]

    def _names_by_rank(self, hashes: list[int], shares: tuple[float, float]) -> list[str]:
        """Returns the split of each example by the rank of the example's hash; the order of the ids breaks ties."""
        # As decimals: in binary, 0.07 * 100 is a little more than 7, and would be rounded up to 8.
        first, more = (math.ceil(fractions.Fraction(str(share)) * len(hashes)) for share in shares)
        names = ["train"] * len(hashes)
        for rank, place in enumerate(sorted(range(len(hashes)), key=lambda place: (hashes[place], place))):
            if rank < first + more:
                names[place] = "test" if rank < first else "validation"
        return names


_LARGEST = float(np.finfo(np.float32).max)


def user_problem(user: UserRecord) -> tuple[Reason | None, Any]:
    """Checks a user as a whole; returns `(reason, value to quote)`, or `(None, None)` for a valid user."""
    if user.problem is not None:
        return user.problem.reason, user.problem.found
    if user.x is None and user.y is None:
        return Reason.MISSING_USER_DATA, user.num_samples
    if user.repeated_key:
        return Reason.REPEATED_KEY, None
    if not isinstance(user.x, list) or not isinstance(user.y, list):
        return Reason.MALFORMED_USER, user.y if isinstance(user.x, list) else user.x
    if len(user.x) != len(user.y):
        return Reason.LENGTH_MISMATCH, {"x": len(user.x), "y": len(user.y)}
    for name in ("is_test", "is_validation"):
        stated = getattr(user, name)
        if stated is not None and len(stated) != len(user.x):
            return Reason.LENGTH_MISMATCH, {"x": len(user.x), name: len(stated)}
    if user.num_samples is None:
        return Reason.UNLISTED_USER, len(user.x)
    if type(user.num_samples) is not int or user.num_samples != len(user.x):
        return Reason.NUM_SAMPLES_MISMATCH, {"num_samples": user.num_samples, "x": len(user.x)}
    return None, None


@dataclasses.dataclass(frozen=True)
class ExampleRule:
    """Rule that decides which examples are valid.

    Attributes:
      num_values: number of values in `x`.
      num_classes: number of classes, with labels in `[0, num_classes)`; 0 for a regression, with any finite labels.
      are_images: whether the values in `x` are pixels in [0, 1]; otherwise any finite numbers are valid.
    """

    num_values: int
    num_classes: int
    are_images: bool

    def problems(self, x: list[Any], y: list[Any]) -> dict[int, tuple[Reason, Any]]:
        """Checks a user's examples; maps the position of each invalid example to `(reason, value to quote)`."""
        if self._are_all_sound(x, y):
            return {}
        judged = {place: self.problem(*example) for place, example in enumerate(zip(x, y, strict=True))}
        return {place: (reason, raw) for place, (reason, raw) in judged.items() if reason is not None}

    def problem(self, x: Any, y: Any) -> tuple[Reason | None, Any]:
        """Checks one example; returns `(reason, value to quote)`, or `(None, None)` for a valid example."""
        if isinstance(x, Unusable):
            return x.reason, x.found
        reason, raw = self._value_problem(x)
        return (reason, raw) if reason else self._label_problem(y)

    def allowed(self, reason: Reason, x: Any, y: Any) -> str:
        """Describes the values that are allowed where an example has a problem; empty if the reason says enough.

        >>> ExampleRule(50, 6, are_images=False).allowed(Reason.LABEL_RANGE, None, 6)
        'a whole number from 0 to 5 (data.num_classes is 6); where labels begin at 1, subtract 1'
        """
        if isinstance(x, Unusable):
            return x.allowed
        if reason in (Reason.FEATURE_COUNT, Reason.PIXEL_COUNT):
            return f"{self.num_values} values (the product of data.input_shape); this example has {np.size(x)}"
        if reason in (Reason.LABEL_RANGE, Reason.LABEL_NOT_INTEGER):
            words = f"a whole number from 0 to {self.num_classes - 1} (data.num_classes is {self.num_classes})"
            if isinstance(y, str):
                return f"{words}; number the names of classes, or read a table with data.kind table, which keeps names"
            return f"{words}; where labels begin at 1, subtract 1" if y == self.num_classes else words
        if reason in (Reason.LABEL_NOT_FINITE, Reason.FEATURE_NOT_FINITE):
            return "finite numbers within the range of float32"
        return "numbers from 0 to 1" if reason == Reason.PIXEL_RANGE else ""

    def _are_all_sound(self, x: list[Any], y: list[Any]) -> bool:
        """Tells whether all examples are valid, in one check that is far faster than one check for each example."""
        if not x or not all(isinstance(row, np.ndarray) and row.size == self.num_values for row in x):
            return False
        # For short rows, 20 times as fast as `np.stack`.
        values = np.array(x)
        is_sound = np.isfinite(values).all()
        if self.are_images:
            is_sound = is_sound and values.min() >= 0 and values.max() <= 1
        if not is_sound:
            return False
        if self.num_classes and set(map(type, y)) == {int}:
            return min(y) >= 0 and max(y) < self.num_classes
        return all(self._label_problem(label)[0] is None for label in y)

    def _value_problem(self, x: Any) -> tuple[Reason | None, Any]:
        images = self.are_images
        if not isinstance(x, np.ndarray):
            return Reason.PIXELS_NOT_NUMBERS if images else Reason.FEATURES_NOT_NUMBERS, x
        if x.size != self.num_values:
            return Reason.PIXEL_COUNT if images else Reason.FEATURE_COUNT, x
        if not np.isfinite(x).all():
            return Reason.PIXEL_NOT_FINITE if images else Reason.FEATURE_NOT_FINITE, x[~np.isfinite(x)]
        if images and (x.min() < 0 or x.max() > 1):
            return Reason.PIXEL_RANGE, x[(x < 0) | (x > 1)]
        return None, None

    def _label_problem(self, y: Any) -> tuple[Reason | None, Any]:
        # False for anything but a number, for NaN, and for integers beyond the range of float32.
        is_finite = type(y) in (int, float) and abs(y) <= _LARGEST
        if not self.num_classes:
            return (None, None) if is_finite else (Reason.LABEL_NOT_FINITE, y)
        if not is_finite or y != int(y):
            return Reason.LABEL_NOT_INTEGER, y
        return (None, None) if 0 <= y < self.num_classes else (Reason.LABEL_RANGE, y)
