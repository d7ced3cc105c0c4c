"""Checks every table, index, state and number in a store of users' states, without changing a byte."""

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tff_pdp.errors import DataError
from tff_pdp.training.client_store.shard import checksum, naming_store, state_label
from tff_pdp.training.client_store.store import STORE_FILE, Contents, Progress, read_numbers, shard_path


class Inspected(NamedTuple):
    """The results of a check of a store.

    Attributes:
      num_clients: number of the store's clients.
      round_number: the store's current round, as in `ClientStore.round_number`.
      oldest_round: the oldest round that `ClientStore.rewind` can return to.
      num_states: number of stored states of all rounds up to the current round.
      num_left: number of further states, which an interrupted round has left.
      was_interrupted: whether a file has an interrupted transaction, which the next `ClientStore.open` undoes.
      is_old: whether the store or a state has the old format, whose checksums do not cover places and rounds.
    """

    num_clients: int
    round_number: int
    oldest_round: int
    num_states: int
    num_left: int
    was_interrupted: bool
    is_old: bool


def inspect_store(folder: Path) -> Inspected:
    """Reads and checks a whole store.

    Raises:
      DataError: a file is missing, damaged, or in use by a process that writes to the file.
    """
    path = folder / STORE_FILE
    with _reading(path) as (store, was_interrupted):
        contents, progress, is_old = read_numbers(store, path)
    num_states, num_left = 0, 0
    for number in range(contents.num_shards):
        with _reading(shard_path(folder, number)) as (shard, was_undone):
            found = _check_states(shard, shard_path(folder, number), number, contents, progress)
        num_states, num_left = num_states + found[0], num_left + found[1]
        is_old, was_interrupted = is_old or found[2], was_interrupted or was_undone
    return Inspected(contents.num_clients, *progress, num_states, num_left, was_interrupted, is_old)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[sqlite3.Connection, bool]]:
    """Opens a file for reading, and yields whether a transaction had to be undone, which is done in a copy."""
    if not path.is_file():
        raise DataError(f"{path} is missing: restore it from a copy")
    undo = path.with_name(f"{path.name}-journal")
    # A journal that is empty or begins with zeros has been used up.
    is_interrupted = undo.is_file() and undo.read_bytes()[:1] not in (b"", b"\0")
    with contextlib.ExitStack() as stack:
        place, mode = path.absolute(), "ro"
        if is_interrupted:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for one in (path, undo):
                shutil.copyfile(one, scratch / one.name)
            place, mode = scratch / path.name, "rw"
        stack.enter_context(naming_store(path))
        connection = sqlite3.connect(f"{place.as_uri()}?mode={mode}", uri=True, timeout=0, isolation_level=None)
        stack.callback(connection.close)
        with open(path, "rb") as file:
            versions = file.read(20)[18:]
        # Versions of the file for writing and for reading: SQLite reads files that it could not write.
        if versions != b"\1\1":
            raise sqlite3.DatabaseError("its header is damaged")
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        yield connection, is_interrupted


def _check_states(
    shard: sqlite3.Connection, path: Path, number: int, contents: Contents, progress: Progress
) -> tuple[int, int, bool]:
    """Checks a shard, and returns how many states count, how many do not, and whether one is of the old format."""
    num_states, num_left, is_old = 0, 0, False
    for place, round_number, state, expected in shard.execute(
        "SELECT place, round_number, state, checksum FROM states"
    ):
        is_here = (
            isinstance(place, int)
            and isinstance(round_number, int)
            and 0 <= place < contents.num_clients
            and place % contents.num_shards == number
        )
        if not is_here or not isinstance(state, bytes) or len(state) != len(contents.default_state):
            raise DataError(f"{path}: client {place}: the row is not a state of this shard")
        if checksum(state, state_label(place, round_number)) != expected:
            if checksum(state) != expected:
                raise DataError(f"{path}: client {place}: the state of round {round_number} is damaged")
            is_old = True
        is_left = round_number > progress.round_number
        num_states, num_left = num_states + (not is_left), num_left + is_left
    return num_states, num_left, is_old
