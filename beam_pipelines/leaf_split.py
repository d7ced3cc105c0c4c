"""LEAF's split form: folders `train` and `test`, whose files say which of a user's examples are test examples.

Source: `data/utils/split_data.py` of Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Where it divided
each user's examples (`-t sample`), `<file>_train_<share>.json` and `<file>_test_<share>.json` have the same users.
Where it divided users (`-t user`), each user is in one of the folders, and has no examples in the other.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from beam_pipelines.records import Unusable, UserRecord, raw_excerpt
from beam_pipelines.validation import user_problem

TRAIN, TEST = "train", "test"
SIDES = (TRAIN, TEST)


def pair_files(train: Sequence[str], test: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Finds the files of both folders that have the same users.

    Args:
      train: names of files in `train`.
      test: names of files in `test`.

    Returns:
      What to read at a time: the files of `train`, then those of `test` that belong to none of them; and by file of
      `train` the one of `test` that belongs to it. Their names differ in the folder's own word only, unless each folder
      has one file.
    """
    by_key = {_key(name, TEST): f"{TEST}/{name}" for name in test}
    partners = {f"{TRAIN}/{name}": by_key[_key(name, TRAIN)] for name in train if _key(name, TRAIN) in by_key}
    if len(train) == len(test) == 1:
        partners = {f"{TRAIN}/{train[0]}": f"{TEST}/{test[0]}"}
    paired = set(partners.values())
    alone = [path for path in (f"{TEST}/{name}" for name in test) if path not in paired]
    return (*(f"{TRAIN}/{name}" for name in train), *alone), partners


@dataclasses.dataclass(frozen=True)
class SplitReader:
    """Reads a file of one folder and the one of the other that belongs to it: path -> users of both, not judged.

    An example's place in its user's list, as dead letters give it, counts the file of `train` first.

    Attributes:
      read_users: reads one file.
      partners: by file of `train`, the one of `test`; both with their folder.
    """

    read_users: Callable[[Path], Iterable[UserRecord]]
    partners: Mapping[str, str]

    def __call__(self, path: Path) -> Iterator[UserRecord]:
        """Reads the users; raises DataError as `read_users` does."""
        side, folder = path.parent.name, path.parent.parent
        files = {side: path}
        if partner := self.partners.get(f"{side}/{path.name}"):
            files[TEST] = folder / partner
        copies: dict[str, dict[str, list[UserRecord]]] = {}
        for name, file in files.items():
            for user in self.read_users(file):
                copies.setdefault(user.client, {}).setdefault(name, []).append(user)
        for client in list(copies):
            found = copies.pop(client)
            # A user may be there twice on one side and once on the other; each copy stands for one record.
            for place in range(max(map(len, found.values()))):
                yield _joined({name: ones[min(place, len(ones) - 1)] for name, ones in found.items()})


def _joined(sides: Mapping[str, UserRecord]) -> UserRecord:
    """One user's examples of both folders as one record."""
    client = next(iter(sides.values())).client
    source = ", ".join(f"{side}/{record.source}" for side, record in sides.items())
    for side, record in sides.items():
        reason, raw = user_problem(record)
        if reason is not None:
            # Each side is judged by itself: joined, too many examples here could go with too few labels there.
            size = sum(record.num_examples for record in sides.values())
            found = f"{side}: {raw_excerpt(raw)}"
            return UserRecord(client, source, [None] * size, [], size, problem=Unusable(reason, found))
    x = [example for record in sides.values() for example in record.x]
    y = [label for record in sides.values() for label in record.y]
    is_test = [side == TEST for side, record in sides.items() for _ in record.y]
    return UserRecord(client, source, x, y, len(y), is_test=is_test)


def _key(name: str, side: str) -> tuple[str, str]:
    before, _, after = name.removesuffix(".gz").rpartition(side)
    return before, after
