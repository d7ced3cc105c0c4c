"""Which of a client's examples are for training, validation and test."""

import dataclasses
import fractions
import hashlib
import math

from beam_pipelines.schema import Example


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

    Attributes:
      test_fraction: share for test; not used for a client whose source says which examples are for test.
      validation_fraction: share for validation: of all examples, or of those that the source says are not for test.
      exact: make every client's shares exact, rounded up to whole examples, instead of expected.
      seed: keys the hash.
    """

    test_fraction: float
    validation_fraction: float
    exact: bool
    seed: int

    def divide(self, examples: list[Example]) -> dict[str, list[Example]]:
        """Returns the examples of each split, in the order of their ids."""
        is_stated = any(example.is_test is not None for example in examples)
        test_fraction = 0.0 if is_stated else self.test_fraction
        splits = {"train": [], "validation": [], "test": [example for example in examples if example.is_test]}
        rest = [example for example in examples if not example.is_test]
        divide = self._by_rank if self.exact else self._by_hash
        for split, members in divide(rest, test_fraction).items():
            splits[split] += members
        return {split: sorted(members, key=lambda example: example.example_id) for split, members in splits.items()}

    def _by_hash(self, examples: list[Example], test_fraction: float) -> dict[str, list[Example]]:
        splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
        for example in examples:
            position = self._hash(example) / 2**64
            if position < test_fraction:
                splits["test"].append(example)
            else:
                is_validation = position < test_fraction + self.validation_fraction
                splits["validation" if is_validation else "train"].append(example)
        return splits

    def _by_rank(self, examples: list[Example], test_fraction: float) -> dict[str, list[Example]]:
        ranked = sorted(examples, key=lambda example: (self._hash(example), example.example_id))
        first = _share_of(test_fraction, len(ranked))
        second = first + _share_of(self.validation_fraction, len(ranked))
        return {"test": ranked[:first], "validation": ranked[first:second], "train": ranked[second:]}

    def _hash(self, example: Example) -> int:
        return keyed_hash(self.seed, "split", example.example_id)


def _share_of(fraction: float, count: int) -> int:
    # As decimals: in binary, 0.07 * 100 is a little more than 7, and would be rounded up to 8.
    return math.ceil(fractions.Fraction(str(fraction)) * count)
