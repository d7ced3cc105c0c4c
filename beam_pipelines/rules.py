"""Which of a client's examples are for training, validation and test."""

import dataclasses
import fractions
import hashlib
import math

import numpy as np

from tff_pdp.data.manifest import SPLITS


def keyed_hash(seed: int, purpose: str, content: bytes) -> int:
    """A uniform 64-bit number that depends on the arguments alone: not on order, other records or the runner."""
    digest = hashlib.blake2b(content, digest_size=8, key=str(seed).encode(), person=purpose.encode())
    return int.from_bytes(digest.digest(), "big")


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """How a client's examples are divided. Nothing depends on other clients.

    By hash, an example's split depends on the seed and its own content alone: adding or removing others never moves
    it, and identical examples never lie on both sides.

    Exact shares are made by rank: the examples with the smallest hashes are for test, the next ones for validation.
    Then one example more or less may move up to two others between the splits, and identical examples may lie on both
    sides. A privacy guarantee for the training examples is then one for the training examples as they were divided.

    By user, all of a client's examples are in one split, which depends on the seed and the client's name alone: the
    test examples are those of people who no training example is of.

    Attributes:
      test_fraction: share for test; not used for a client whose source says which examples are for test.
      validation_fraction: share for validation: of all examples, or of those that the source says are not for test; not
        used where the source says which examples are for validation.
      exact: make every client's shares exact, rounded up to whole examples, instead of expected.
      seed: keys the hash.
      by_user: the shares are of clients.
    """

    test_fraction: float
    validation_fraction: float
    exact: bool
    seed: int
    by_user: bool = False

    def divide(
        self,
        client: str,
        ids: np.ndarray,
        is_test: np.ndarray | None = None,
        is_validation: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the places of each split's examples, in the order of their ids: int64 by split.

        Args:
          client: whose examples.
          ids: bytes `[n]`, the examples' names.
          is_test: bool `[n]`, where the source says so.
          is_validation: bool `[n]`, where the source says so; what is then neither is for training.
        """
        everyone = np.argsort(ids, kind="stable")
        if self.by_user:
            nobody = everyone[:0]
            own = self._split_at(keyed_hash(self.seed, "split", client.encode()), self._fractions())
            return {split: everyone if split == own else nobody for split in SPLITS}
        names = np.full(len(ids), "", "<U10")
        for split, stated in (("validation", is_validation), ("test", is_test)):
            if stated is not None:
                names[stated] = split
        rest = everyone[names[everyone] == ""]
        hashes = [keyed_hash(self.seed, "split", name) for name in ids[rest].tolist()]
        shares = self._fractions(is_test is not None, is_validation is not None)
        names[rest] = (
            self._names_by_rank(hashes, shares) if self.exact else [self._split_at(number, shares) for number in hashes]
        )
        return {split: everyone[names[everyone] == split] for split in SPLITS}

    def _fractions(self, states_test: bool = False, states_validation: bool = False) -> tuple[float, float]:
        """Shares for test and validation of what the source does not state."""
        return 0.0 if states_test else self.test_fraction, 0.0 if states_validation else self.validation_fraction

    def _split_at(self, number: int, shares: tuple[float, float]) -> str:
        position = number / 2**64
        if position < shares[0]:
            return "test"
        return "validation" if position < sum(shares) else "train"

    def _names_by_rank(self, hashes: list[int], shares: tuple[float, float]) -> list[str]:
        """The split of each example, by the rank of its hash; `hashes` are in the order of the ids, which ends ties."""
        first = _share_of(shares[0], len(hashes))
        second = first + _share_of(shares[1], len(hashes))
        names = ["train"] * len(hashes)
        for rank, place in enumerate(sorted(range(len(hashes)), key=lambda place: (hashes[place], place))):
            if rank < second:
                names[place] = "test" if rank < first else "validation"
        return names


def _share_of(fraction: float, count: int) -> int:
    # As decimals: in binary, 0.07 * 100 is a little more than 7, and would be rounded up to 8.
    return math.ceil(fractions.Fraction(str(fraction)) * count)
