"""Reads LEAF's JSON format, whole or split into `train` and `test`.

A file is `{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}`.

In the split form, folders `train` and `test` decide which of a user's examples are for test. If LEAF divided each
user's examples (`-t sample`), `<file>_train_<share>.json` and `<file>_test_<share>.json` have the same users. If LEAF
divided users (`-t user`), each user is in one folder only.

Source: `data/utils/split_data.py` of Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018.
"""

import functools
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beam_pipelines.options import RawData, SourceSettings, files_in
from beam_pipelines.records import Unusable, UserRecord, raw_excerpt
from beam_pipelines.rules import user_problem
from tff_pdp.errors import DataError

_SUFFIXES = (".json", ".json.gz")
_TOP_LEVEL_KEYS = ("users", "num_samples", "user_data")


class Leaf(SourceSettings):
    """Reads LEAF JSON of images.

    `input` is a folder of `.json` or `.json.gz` files, or a folder that contains LEAF's folders `train` and `test`.
    These two folders decide which examples are test examples; `test_fraction` is then not used.
    """

    def build(self, workspace: Path) -> RawData:
        """Describes the folder as raw data; raises DataError as `list_sources` does."""
        return leaf_raw_data("leaf", Path(self.input), read_users)


def leaf_raw_data(source: str, folder: Path, read: Callable[[Path], Iterable[UserRecord]]) -> RawData:
    """Describes LEAF files, which `read` reads one by one, as raw data; raises DataError as `list_sources` does."""
    files = list_sources(folder)
    train, test = ([name.partition("/")[2] for name in files if name.startswith(f"{side}/")] for side in SIDES)
    if not train:
        return RawData(source, folder, files, read, are_images=True)
    units, partners = pair_files(train, test)
    both = functools.partial(_read_split, read, partners)
    return RawData(source, folder, files, both, are_images=True, has_test_examples=True, parts=units)


def list_sources(folder: Path) -> tuple[str, ...]:
    """Lists the sorted names of the LEAF files in a folder, or in its subfolders `train` and `test`.

    Raises:
      DataError: the folder is missing, has no `.json` or `.json.gz` file, has files both in itself and in a subfolder,
        or has files in only one of the two subfolders.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --input must be the folder of LEAF's all_data_*.json files")
    names = _names(folder)
    split = {side: _names(folder / side) for side in SIDES if (folder / side).is_dir()}
    if not names and not any(split.values()):
        raise DataError(
            f"{folder}: no .json or .json.gz file in it; --input must be LEAF's all_data folder, or the folder "
            "that contains LEAF's folders train and test"
        )
    if names and any(split.values()):
        raise DataError(
            f"{folder}: has LEAF files in itself and in its folders train or test; keep one of the two and move "
            "the other away"
        )
    if names:
        return tuple(names)
    if not all(split.get(side) for side in SIDES):
        (present,) = (side for side in SIDES if split.get(side))
        raise DataError(
            f"{folder}: only {present} of LEAF's folders train and test has files; add the other's files, or set the "
            f"input to {folder / present}, whose examples are then divided"
        )
    return tuple(f"{side}/{name}" for side in SIDES for name in split[side])


def read_users(path: Path) -> list[UserRecord]:
    """Reads every copy of every user in a file, unchecked.

    Examples are packed as float32 while the file is parsed; Python floats would need ten times the memory.

    Raises:
      DataError: the file cannot be read or is not LEAF JSON; the message names the file and, if known, the position.
    """
    leaf = _load_json(path)
    if not isinstance(leaf, _JsonObject):
        raise DataError(f"{path}: not LEAF JSON: the top level is {_kind(leaf)}, not an object")
    missing = [key for key in _TOP_LEVEL_KEYS if key not in leaf]
    if missing:
        raise DataError(f"{path}: not LEAF JSON: no top-level key {', '.join(map(repr, missing))}")
    if leaf.repeats:
        raise DataError(f"{path}: top-level key {leaf.repeats[0][0]!r} occurs more than once")
    users, num_samples, user_data = (leaf[key] for key in _TOP_LEVEL_KEYS)
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise DataError(f"{path}: 'users' must be a list of strings")
    if not isinstance(num_samples, list) or len(num_samples) != len(users):
        raise DataError(f"{path}: 'num_samples' must be a list with one entry for each of the {len(users)} users")
    if not isinstance(user_data, _JsonObject):
        raise DataError(f"{path}: 'user_data' must be an object, not {_kind(user_data)}")
    return _pair_users(path.name, users, num_samples, user_data)


def _names(folder: Path) -> list[str]:
    return [path.name for path in files_in(folder) if path.name.endswith(_SUFFIXES)]


class _JsonObject(dict[str, Any]):
    """JSON object that remembers repeated keys; a plain dict silently keeps only the last value."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__()
        self.repeats: list[tuple[str, Any]] = []
        for key, value in pairs:
            if key in self:
                self.repeats.append((key, value))
            else:
                self[key] = value


def _load_json(path: Path) -> Any:
    try:
        content = path.read_bytes()
        # Some editors begin a file with a byte-order mark.
        text = (gzip.decompress(content) if path.name.endswith(".gz") else content).decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_pack_examples)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno} (character {error.pos} of {len(text)})"
        raise DataError(f"{path}: invalid or truncated JSON at {position}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file of {len(content)} bytes: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path}: not LEAF JSON: nested too deeply") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _pack_examples(pairs: list[tuple[str, Any]]) -> _JsonObject:
    json_object = _JsonObject(pairs)
    x = json_object.get("x")
    if isinstance(x, list):
        json_object["x"] = _pack_alike(x) or [_pack_example(one) for one in x]
    return json_object


def _pack_alike(x: list[Any]) -> list[np.ndarray] | None:
    """Packs all examples of a user at once, if all are lists of equally many numbers; otherwise returns None."""
    if set(map(type, x)) != {list} or len(set(map(len, x))) > 1:
        return None
    if not set(map(type, itertools.chain.from_iterable(x))) <= {int, float}:
        return None
    size = len(x[0])
    try:
        values = np.fromiter(itertools.chain.from_iterable(x), np.float64, len(x) * size)
    except OverflowError:
        return None
    with np.errstate(over="ignore"):
        return list(values.astype(np.float32).reshape(len(x), size))


def _pack_example(x: Any) -> Any:
    if not isinstance(x, list) or not all(type(value) in (int, float) for value in x):
        return x
    # Numbers too large for float32 become infinite, and validation reports them.
    with np.errstate(over="ignore"):
        try:
            return np.array(x, np.float64).astype(np.float32)
        except OverflowError:
            return x


def _pair_users(source: str, users: list[str], num_samples: list[Any], user_data: _JsonObject) -> list[UserRecord]:
    """Pairs each user's entries in `users` with the user's entries in `user_data`."""
    listed: dict[str, list[Any]] = {}
    for user, count in zip(users, num_samples, strict=True):
        listed.setdefault(user, []).append(count)
    found: dict[str, list[Any]] = {}
    for user, data in itertools.chain(user_data.items(), user_data.repeats):
        found.setdefault(user, []).append(data)
    records = []
    for user in listed | found:
        if not _is_unicode(user):
            raise DataError(f"{source}: the name of user {user!r} is not valid Unicode")
        counts = listed.get(user, [None])
        copies = found.get(user, [None])
        # A user may be listed twice with data once, or once with data twice: each copy becomes one record.
        for position in range(max(len(counts), len(copies))):
            data = copies[min(position, len(copies) - 1)]
            count = counts[min(position, len(counts) - 1)]
            records.append(_user_record(user, source, data, count))
    return records


def _is_unicode(text: str) -> bool:
    # JSON can spell half of a surrogate pair, which no encoding can write.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _user_record(user: str, source: str, data: Any, num_samples: Any) -> UserRecord:
    if not isinstance(data, _JsonObject):
        return UserRecord(user, source, data, None, num_samples)
    return UserRecord(user, source, data.get("x"), data.get("y"), num_samples, bool(data.repeats))


def _kind(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)[:40]


TRAIN, TEST = "train", "test"
SIDES = (TRAIN, TEST)


def pair_files(train: Sequence[str], test: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Pairs each file of `train` with the file of `test` that has the same users, by the files' names.

    Returns:
      A tuple of files, each for one task, and a mapping from a file of `train` to its partner in `test`. The tuple has
      all files of `train`, then the files of `test` without a partner. The names of partners differ only in the words
      `train` and `test`; if each folder has one file, the two files are partners whatever their names.
    """
    by_key = {_key(name, TEST): f"{TEST}/{name}" for name in test}
    partners = {f"{TRAIN}/{name}": by_key[_key(name, TRAIN)] for name in train if _key(name, TRAIN) in by_key}
    if len(train) == len(test) == 1:
        partners = {f"{TRAIN}/{train[0]}": f"{TEST}/{test[0]}"}
    paired = set(partners.values())
    alone = [path for path in (f"{TEST}/{name}" for name in test) if path not in paired]
    return (*(f"{TRAIN}/{name}" for name in train), *alone), partners


def _read_split(
    read: Callable[[Path], Iterable[UserRecord]], partners: Mapping[str, str], path: Path
) -> Iterator[UserRecord]:
    """Reads the users of a file and of its partner in the other folder, unchecked; raises DataError as `read` does.

    The positions of examples in dead letters count the file of `train` first.
    """
    side, folder = path.parent.name, path.parent.parent
    files = {side: path}
    if partner := partners.get(f"{side}/{path.name}"):
        files[TEST] = folder / partner
    copies: dict[str, dict[str, list[UserRecord]]] = {}
    for name, file in files.items():
        for user in read(file):
            copies.setdefault(user.client, {}).setdefault(name, []).append(user)
    for client in list(copies):
        found = copies.pop(client)
        # A user may occur twice on one side and once on the other: each copy becomes one record.
        for place in range(max(map(len, found.values()))):
            yield _joined({name: ones[min(place, len(ones) - 1)] for name, ones in found.items()})


def _joined(sides: Mapping[str, UserRecord]) -> UserRecord:
    """Joins one user's examples from both folders into one record."""
    client = next(iter(sides.values())).client
    source = ", ".join(f"{side}/{record.source}" for side, record in sides.items())
    for side, record in sides.items():
        reason, raw = user_problem(record)
        if reason is not None:
            # Each side is checked alone: joined, extra labels of one side could hide missing labels of the other.
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
