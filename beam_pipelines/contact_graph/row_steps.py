"""Handles rows of tables: counts and drops rows, makes ids unique, finds people, divides rows among partitions."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow

from beam_pipelines.contact_graph.input_tables import InputRows
from beam_pipelines.dataset.accounting import KEPT, READ
from beam_pipelines.engine.stages import Piece, TaskContext
from beam_pipelines.keyed_hash import keyed_uint64
from beam_pipelines.records import DeadLetter, Reason

Columns = Mapping[str, np.ndarray]


def chosen_rows(columns: Columns, chosen: np.ndarray) -> Columns:
    """Returns the chosen rows; `chosen` has a bool for each row, or the positions of rows."""
    return {name: values[chosen] for name, values in columns.items()}


def scatter_by_id(table: str, key: str, num_partitions: int, columns: Columns) -> Iterator[Piece]:
    """Divides rows into pieces, one for each partition, by the ids in column `key`; ids are spread evenly."""
    partitions = (keyed_uint64(0, "partition", columns[key]) % np.uint64(num_partitions)).astype(np.int64)
    return scatter(table, partitions, num_partitions, columns)


def scatter(table: str, partitions: np.ndarray, num_partitions: int, columns: Columns) -> Iterator[Piece]:
    """Divides rows into pieces, one for each partition; `partitions` has the partition of each row, int64 `[n]`."""
    # NumPy sorts small integers faster.
    order = np.argsort(partitions.astype(np.uint16 if num_partitions <= 2**16 else np.int64), kind="stable")
    ends = np.cumsum(np.bincount(partitions, minlength=num_partitions))
    arrays = {name: pyarrow.array(values[order]) for name, values in columns.items()}
    whole = pyarrow.RecordBatch.from_pydict(arrays)
    start = 0
    for partition, end in enumerate(ends.tolist()):
        if end > start:
            yield Piece(table, partition, whole.slice(start, end - start))
        start = end


def gather(context: TaskContext, table: str, like: Mapping[str, type | str]) -> Columns:
    """Joins the pieces of a task's table into arrays; without pieces, returns empty arrays with the types in `like`."""
    batches = context.tables.get(table)
    if not batches:
        return {name: np.zeros(0, dtype) for name, dtype in like.items()}
    whole = pyarrow.Table.from_batches(batches)
    return {name: whole[name].to_numpy() for name in like}


# Largest number of dead letters for rows that are dropped at once; all dropped rows are counted.
_MOST_LETTERS = 1000


def count_read_rows(context: TaskContext, table: str, rows: InputRows) -> None:
    """Counts rows of a chunk as read, and keeps dead letters for the rows that could not be read."""
    context.count(table, READ, len(rows) + len(rows.letters))
    context.letters.extend(rows.letters)
    for letter in rows.letters:
        context.count(table, letter.reason)


def unique_rows(table: str, key: str, rows: Columns, context: TaskContext) -> Columns:
    """Sorts rows by id and makes ids unique: keeps one of identical rows; drops all rows of an id whose rows differ."""
    ordered = chosen_rows(rows, np.argsort(rows[key], kind="stable"))
    ids = ordered[key]
    is_repeat = np.zeros(len(ids), bool)
    is_repeat[1:] = ids[1:] == ids[:-1]
    if not is_repeat.any():
        return ordered
    differs = np.zeros(len(ids), bool)
    for values in ordered.values():
        differs[1:] |= is_repeat[1:] & (values[1:] != values[:-1])
    conflicting = np.isin(ids, ids[differs])
    drop_rows(table, Reason.CONFLICTING_ROWS, ids[conflicting], context)
    context.count(table, Reason.IDENTICAL_ROW, (is_repeat & ~conflicting).sum())
    return chosen_rows(ordered, ~(conflicting | is_repeat))


def find_places(ids: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each wanted id's position in the sorted `ids`, arbitrary if missing, and whether the id is present."""
    if not len(ids):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return places, ids[places] == wanted


def rows_of_people(
    table: str, rows: Columns, pids: np.ndarray, is_sound: np.ndarray, reason: Reason, context: TaskContext
) -> tuple[Columns, np.ndarray]:
    """Returns the valid rows of known people, and the position of each valid row's person in the sorted `pids`.

    Drops rows of unknown people and, for `reason`, rows whose `is_sound` (bool `[rows]`) is false; counts all rows.
    """
    places, is_known = find_places(pids, rows["pid"])
    used = is_known & is_sound
    drop_rows(table, Reason.UNKNOWN_PERSON, rows["pid"][~is_known], context)
    drop_rows(table, reason, rows["pid"][is_known & ~is_sound], context)
    context.count(table, KEPT, used.sum())
    return chosen_rows(rows, used), places[used]


def drop_rows(table: str, reason: Reason, ids: np.ndarray, context: TaskContext) -> None:
    """Counts the rows with these ids as dropped for a reason, and keeps dead letters for the first 1,000."""
    context.count(table, reason, len(ids))
    first = ids[:_MOST_LETTERS].tolist()
    context.letters.extend(DeadLetter(table, str(identifier), None, reason, "") for identifier in first)


def as_ids(values: np.ndarray) -> tuple[np.ndarray, Columns]:
    """Hashes a column's values; returns each row's hash, int64, and a table of the hashes and the values as text."""
    encoded = pyarrow.array(values).dictionary_encode()
    texts = [str(value) for value in encoded.dictionary.to_pylist()]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    numbers = np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], np.int64)
    names = {"id": numbers, "name": np.array(texts, object)}
    return (numbers[encoded.indices.to_numpy()] if texts else np.zeros(0, np.int64)), names
