"""Stores clients' states as files that workers write and read for themselves, by fsspec; the head keeps an index.

A part of a round's clients is one file, which never changes. So several processes and machines can write at once, and a
file that is written twice, by two workers, has the same content. The index has the file and the row of each client's
newest state. Indexes are saved with checkpoints; files that no saved index needs are deleted.
"""

import dataclasses
import hashlib
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec.core
import numpy as np
import tensorflow as tf

from tff_pdp.digests import read_json, write_json
from tff_pdp.engines.client_values import ClientGroup, ClientValues
from tff_pdp.engines.far_values import FarValues, ResultValues
from tff_pdp.errors import DataError
from tff_pdp.files import remove_attempts, replacing, sync, write_atomically
from tff_pdp.training.client_store.layout import StateLayout, with_client_axis
from tff_pdp.training.client_store.shard import checksum

FORMAT_VERSION = 1
CONTENTS_FILE = "states.json"
_INDEX = re.compile(r"index_([0-9]{6})\.bin")
_FILE = re.compile(r"round_([0-9]{6})_([0-9]{3})_([0-9]{5})\.states")
_CHECKSUM_BYTES = 4
# A state's place, in one number: round, attempt, part and row. Zero for a client without a state of its own.
_ROUND_BITS, _ATTEMPT_BITS, _PART_BITS, _ROW_BITS = 20, 8, 15, 20
_DIGEST_BYTES = 32


def _place_of(round_number: int, attempt: int, part: int) -> int:
    """Returns the number of the first state in a file.

    Raises:
      DataError: the number of the round, of the attempt or of the part is too large for the name of a file.
    """
    if round_number >= 1 << _ROUND_BITS or attempt >= 1 << _ATTEMPT_BITS or part >= 1 << _PART_BITS:
        raise DataError(
            f"states of round {round_number}, attempt {attempt}, part {part} have no place in files: files have up to "
            f"{1 << _PART_BITS} parts in a round, so raise training.clients_per_call"
        )
    return ((round_number << _ATTEMPT_BITS | attempt) << _PART_BITS | part) << _ROW_BITS


def _file_name(place: int) -> str:
    """Returns the name of the file with a state."""
    file = place >> _ROW_BITS
    round_number, attempt = file >> (_PART_BITS + _ATTEMPT_BITS), file >> _PART_BITS & (1 << _ATTEMPT_BITS) - 1
    return f"round_{round_number:06d}_{attempt:03d}_{file & (1 << _PART_BITS) - 1:05d}.states"


@dataclasses.dataclass(frozen=True)
class StatesRecipe:
    """Makes states from their places: reads the files of a store.

    Attributes:
      store: random name of the store, which no other store has.
      root: folder or fsspec URL of the files.
      layout: layout of a state, as text.
      default: a state before its first write, as bytes.
    """

    store: str
    root: str
    layout: str
    default: bytes
    is_lasting = False

    def load(self, host: Any, rows: np.ndarray, member_type: Any) -> ClientValues:
        """Reads the states at some places, int64 `[clients]`.

        Raises:
          DataError: a file is missing or damaged.
        """
        del host
        columns = self.read(rows)
        if not tf.nest.flatten(columns):
            return ClientValues(member_type, [ClientGroup(np.arange(len(rows)), (), True)])
        return ClientValues.from_columns(member_type, columns)

    def read(self, rows: np.ndarray) -> Any:
        """Reads the states at some places, as columns: a nest of arrays `[places, ...]`.

        Raises:
          DataError: a file is missing or damaged.
        """
        layout = StateLayout.from_json(self.layout)
        states = np.repeat(np.frombuffer(self.default, np.uint8)[np.newaxis], len(rows), axis=0)
        places = np.asarray(rows, np.int64)
        size = _CHECKSUM_BYTES + layout.row_bytes
        for file in np.unique(places >> _ROW_BITS):
            if not file:
                continue
            positions = np.flatnonzero(places >> _ROW_BITS == file)
            numbers = places[positions] & (1 << _ROW_BITS) - 1
            content = self._read_file(_file_name(int(file) << _ROW_BITS), numbers, size)
            for position, row in zip(positions, content, strict=True):
                label = str(int(places[position])).encode()
                if checksum(row[_CHECKSUM_BYTES:], label) != int.from_bytes(row[:_CHECKSUM_BYTES], "little"):
                    raise DataError(
                        f"{self.root}/{_file_name(int(places[position]))}: the state in row "
                        f"{int(places[position]) & (1 << _ROW_BITS) - 1} is damaged: restore the file from a copy"
                    )
                states[position] = np.frombuffer(row, np.uint8, offset=_CHECKSUM_BYTES)
        return layout.to_columns(states)

    def key_of(self, rows: np.ndarray) -> tuple[Any, ...] | None:
        """Returns the key of a file, if `rows` are the places of its first states, in order."""
        if not len(rows) or not rows[0] or rows[0] & (1 << _ROW_BITS) - 1:
            return None
        first = int(rows[0])
        return _key(self.store, first) if np.array_equal(rows, np.arange(first, first + len(rows))) else None

    def _read_file(self, name: str, numbers: np.ndarray, size: int) -> list[bytes]:
        system, root = fsspec.core.url_to_fs(self.root)
        path = f"{root}/{name}"
        try:
            if len(numbers) * 8 > int(numbers.max()):
                content = system.cat_file(path, int(numbers.min()) * size, (int(numbers.max()) + 1) * size)
                begins = ((numbers - numbers.min()) * size).tolist()
                rows = [content[begin : begin + size] for begin in begins]
            else:
                starts = (numbers * size).tolist()
                rows = system.cat_ranges([path] * len(starts), starts, [start + size for start in starts])
        except (OSError, ValueError) as error:
            raise DataError(f"{self.root}/{name}: states cannot be read ({error}): restore the file") from error
        if any(len(row) != size for row in rows):
            raise DataError(f"{self.root}/{name} is too short: restore the file from a copy")
        return list(rows)


def _key(store: str, place: int) -> tuple[Any, ...]:
    file = place >> _ROW_BITS
    return store, file >> _PART_BITS, file & (1 << _PART_BITS) - 1


@dataclasses.dataclass(frozen=True)
class StateWriter:
    """Writes the states of one round's parts.

    Attributes:
      store: random name of the store.
      root: folder or fsspec URL of the files.
      layout: layout of a state, as text.
      round_number: the round.
      attempt: number of times that rounds were drawn anew.
    """

    store: str
    root: str
    layout: str
    round_number: int
    attempt: int

    def write(self, part: int, leaves: Sequence[np.ndarray]) -> None:
        """Writes the states of one part's clients: an array `[clients, ...]` for each leaf of a state, in order.

        The file is whole or absent.

        Raises:
          OSError: the file cannot be written.
        """
        layout = StateLayout.from_json(self.layout)
        self.write_rows(part, layout.to_rows(layout.to_nest(leaves), len(leaves[0])))

    def write_rows(self, part: int, rows: np.ndarray) -> None:
        """Writes the states of one part's clients as rows of bytes, uint8 `[clients, row_bytes]`; see `write`."""
        first = _place_of(self.round_number, self.attempt, part)
        content = []
        for number, row in enumerate(rows):
            state = row.tobytes()
            content += [checksum(state, str(first + number).encode()).to_bytes(_CHECKSUM_BYTES, "little"), state]
        write_whole(f"{self.root}/{_file_name(first)}", b"".join(content))

    def key(self, part: int) -> tuple[Any, ...]:
        """Returns the key by which a worker finds the states again."""
        return _key(self.store, _place_of(self.round_number, self.attempt, part))


class StateFiles:
    """The states of all clients after a round. The object never changes: `write` returns the next round's states.

    Guarantee: files are whole or absent, and each state has a checksum, which covers the state's place. Files on this
      machine can be read by the owner alone: states are computed from raw data.
    Assumes: workers can write to `root`, and see each other's files there. If `root` is a URL, access is a matter of
      that file system, and so is whether a file is whole or absent, as in stores of objects. Where a file can be seen
      before it is whole, a state that is not whole is refused by its checksum.

    Attributes:
      folder: folder of the indexes, on the head's machine.
      num_clients: number of clients.
      round_number: the round after which clients have these states.
    """

    def __init__(self, folder: Path, recipe: StatesRecipe, where: np.ndarray, round_number: int, attempt: int = 0):
        """Wraps an index; callers use `create` or `open` instead."""
        self.folder, self.round_number = folder, round_number
        self._recipe, self._where, self._attempt = recipe, where, attempt

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self._where)

    @classmethod
    def create(cls, folder: Path, default: Any, num_clients: int, *, root: str = "") -> "StateFiles":
        """Creates a store in which all clients have the state `default`, a nest of arrays.

        Args:
          folder: folder of the new store, which must not exist before.
          default: state that clients have before their first write.
          num_clients: number of clients.
          root: fsspec URL below which the store has a folder of its own; by default, the folder `folder` itself.

        Raises:
          DataError: the folder exists.
        """
        if folder.exists():
            raise DataError(f"{folder} exists already: open the store, or remove the folder to start again")
        layout = StateLayout.of_state(default)
        state = layout.to_rows(with_client_axis(default), 1).tobytes()
        folder.mkdir(mode=0o700, parents=True)
        name = uuid.uuid4().hex
        # Runs that are started again, and methods of one experiment, share a URL.
        own_root = f"{root.rstrip('/')}/{name}" if root else ""
        recipe = StatesRecipe(name, own_root or str(folder.resolve()), layout.to_json(), state)
        if own_root:
            system, path = fsspec.core.url_to_fs(own_root)
            system.makedirs(path, exist_ok=True)
        contents = {
            "format_version": FORMAT_VERSION,
            "store": name,
            "root": own_root,
            "layout": recipe.layout,
            "default": state.hex(),
        }
        store = cls(folder, recipe, np.zeros(num_clients, np.int64), 0)
        store.save()
        write_json(folder / CONTENTS_FILE, contents)
        sync(folder.parent)
        return store

    @classmethod
    def open(cls, folder: Path, round_number: int | None = None, attempt: int = 0) -> "StateFiles":
        """Opens the states of a saved round, by default the newest.

        `attempt` is the number of times that rounds were drawn anew, for further rounds.

        Raises:
          DataError: the store or the round's index is missing or damaged.
        """
        contents = read_json(folder / CONTENTS_FILE)
        if contents["format_version"] != FORMAT_VERSION:
            raise DataError(f"{folder / CONTENTS_FILE} has another format version than {FORMAT_VERSION}")
        saved = _saved_rounds(folder)
        chosen = max(saved, default=None) if round_number is None else round_number
        if chosen not in saved:
            raise DataError(f"{folder}: there are no states of round {chosen}: restore the folder from a copy")
        root = contents["root"] or str(folder.resolve())
        # Left by workers that were killed while they wrote; other workers have ended with their head.
        remove_attempts(folder)
        recipe = StatesRecipe(contents["store"], root, contents["layout"], bytes.fromhex(contents["default"]))
        return cls(folder, recipe, _read_index(_index_path(folder, chosen)), chosen, attempt)

    def read(self, places: Sequence[int] | np.ndarray) -> Any:
        """Reads the states of the clients at `places`: a nest of new arrays `[len(places), ...]`.

        Raises:
          DataError: a file is missing or damaged.
        """
        return self._recipe.read(self._where[np.asarray(places, np.int64)])

    def describe(self, places: Sequence[int] | np.ndarray, state_type: Any) -> FarValues:
        """Describes the states of the clients at `places`, which workers read for themselves."""

        def bring(rows: np.ndarray) -> ClientValues:
            return self._recipe.load(None, rows, state_type)

        return FarValues(state_type, self._recipe, self._where[np.asarray(places, np.int64)], bring)

    def write(self, round_number: int, places: Sequence[int] | np.ndarray, new: Any) -> "StateFiles":
        """Returns the store after a round: the clients at `places` have the states `new`.

        `new` are results that workers keep, or values of this process.
        """
        chosen = np.asarray(places, np.int64)
        if not len(chosen) or not StateLayout.from_json(self._recipe.layout).row_bytes:
            return self._after(round_number, self._where)
        if not isinstance(new, ResultValues):
            return self.write_part(round_number, 0, chosen, new.columns())
        parts, where = new.keep(self._writer(round_number)), self._where.copy()
        for number, positions in enumerate(parts):
            first = _place_of(round_number, self._attempt, number)
            where[chosen[positions]] = np.arange(first, first + len(positions))
        return self._after(round_number, where)

    def write_part(self, round_number: int, part: int, places: np.ndarray, columns: Any) -> "StateFiles":
        """Returns the store with the states `columns`, a nest of arrays `[places, ...]`, of the clients at `places`."""
        where, first = self._where.copy(), _place_of(round_number, self._attempt, part)
        layout = StateLayout.from_json(self._recipe.layout)
        if layout.row_bytes and len(places):
            self._writer(round_number).write_rows(part, layout.to_rows(columns, len(places)))
            where[places] = np.arange(first, first + len(places))
        return self._after(round_number, where)

    def _writer(self, round_number: int) -> StateWriter:
        recipe = self._recipe
        return StateWriter(recipe.store, recipe.root, recipe.layout, round_number, self._attempt)

    def _after(self, round_number: int, where: np.ndarray) -> "StateFiles":
        return StateFiles(self.folder, self._recipe, where, round_number, self._attempt)

    def save(self) -> None:
        """Saves the index, so that the states of this round can be opened again."""
        content = self._where.astype("<i8").tobytes()
        write_atomically(_index_path(self.folder, self.round_number), [hashlib.sha256(content).digest(), content])

    def prune(self, oldest_round: int) -> None:
        """Deletes saved indexes of rounds before `oldest_round`, and files that neither these states nor an index need.

        A file is needed as long as one of its states is some client's newest state.
        """
        saved = _saved_rounds(self.folder)
        for number in saved:
            if number < oldest_round:
                _index_path(self.folder, number).unlink()
        indexes = [_read_index(_index_path(self.folder, number)) for number in saved if number >= oldest_round]
        files = np.unique(np.concatenate([self._where, *indexes]) >> _ROW_BITS)
        used = {_file_name(int(file) << _ROW_BITS) for file in files}
        system, root = fsspec.core.url_to_fs(self._recipe.root)
        # A store of objects has no folder without a file.
        for path in system.ls(root, detail=False) if system.exists(root) else ():
            name = path.rsplit("/", 1)[-1]
            found = _FILE.fullmatch(name)
            if found and name not in used and int(found[1]) <= self.round_number:
                system.rm_file(path)

    def close(self) -> None:
        """Does nothing: no file is open."""


def is_state_files(folder: Path) -> bool:
    """Checks if a folder has a store of this kind."""
    return (folder / CONTENTS_FILE).exists()


def remove_far_files(folder: Path) -> None:
    """Removes the files of a store at a URL; the indexes in `folder` stay. Does nothing for files in `folder`."""
    root = read_json(folder / CONTENTS_FILE)["root"] if is_state_files(folder) else ""
    if root:
        system, path = fsspec.core.url_to_fs(root)
        if system.exists(path):
            system.rm(path, recursive=True)


def write_whole(url: str, content: bytes) -> None:
    """Writes a file at an fsspec URL; on this machine's file system the file is whole or absent, and flushed to disk.

    Raises:
      OSError: the file cannot be written.
    """
    system, path = fsspec.core.url_to_fs(url)
    if "file" in system.protocol:
        with replacing(Path(path)) as attempt:
            descriptor = os.open(attempt, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    else:
        system.pipe_file(path, content)


def _index_path(folder: Path, round_number: int) -> Path:
    return folder / f"index_{round_number:06d}.bin"


def _saved_rounds(folder: Path) -> list[int]:
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _INDEX.fullmatch(path.name)))


def _read_index(path: Path) -> np.ndarray:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): restore the file from a copy") from None
    if hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
        raise DataError(f"{path} is damaged: restore the file from a copy")
    return np.frombuffer(content, "<i8", offset=_DIGEST_BYTES).astype(np.int64)
