"""Groups the rows of tables by client: at once if a file has one client, otherwise in two stages of a job.

| stage | tasks | output |
|---|---|---|
| `read_tables` | some files each | checked rows, sent to the task of the row's client |
| `group_rows` | one for each shard | users with examples |
"""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow

from beam_pipelines.dataset.accounting import USERS
from beam_pipelines.dataset.clients import user_pieces
from beam_pipelines.engine.stages import Piece, Stage, TaskContext, partition_stage
from beam_pipelines.options import ClientRules
from beam_pipelines.records import Reason, Unusable, UserRecord
from beam_pipelines.rules import keyed_hash
from beam_pipelines.tables.files import client_of
from beam_pipelines.tables.rows import Rows, missing_columns, read_rows
from beam_pipelines.tables.survey import TableSchema
from tff_pdp.data.manifest import SPLITS

# Rows whose client is not known belong to this client, which has no example that can be used.
NOBODY = "(no client)"
_ROWS = "table_rows"
_SCHEMA = pyarrow.schema(
    [
        ("client", pyarrow.string()),
        ("source", pyarrow.string()),
        ("number", pyarrow.int64()),
        ("x", pyarrow.large_binary()),
        ("y", pyarrow.float64()),
        ("split", pyarrow.int64()),
        # JSON of an `Unusable`; null for a row that can be used.
        ("problem", pyarrow.string()),
    ]
)


def read_client(schema: TableSchema, path: Path) -> Iterator[UserRecord]:
    """Reads a file with the examples of one client; a file without the schema's columns is a user with a problem.

    Raises:
      DataError: the file cannot be read.
    """
    client = client_of(path)
    if problem := missing_columns(path, schema):
        yield UserRecord(client, path.name, [], [], 0, problem=problem)
        return
    parts = list(read_rows(path, schema))
    x = [one for part in parts for one in _examples(part.x, part.problems)]
    y = np.concatenate([np.zeros(0), *(part.y for part in parts)])
    splits = [part.splits for part in parts if part.splits is not None]
    yield _user(client, path.name, x, y, np.concatenate(splits) if splits else None, schema)


def table_stages(folder: Path, names: Sequence[str], schema: TableSchema, rules: ClientRules) -> tuple[Stage, ...]:
    """Builds the stages that read users from tables with a column of clients; the last yields the table of users."""
    read = functools.partial(_read_tables, folder, schema, rules)
    group = functools.partial(_group_rows, schema, rules)
    return (
        Stage("read_tables", tuple((name,) for name in names), read, gives=(_ROWS,)),
        partition_stage("group_rows", rules.num_shards, group, (_ROWS,), gives=(USERS,)),
    )


def _read_tables(
    folder: Path, schema: TableSchema, rules: ClientRules, names: tuple[str, ...], context: TaskContext
) -> Iterator[Piece]:
    """Reads tables, and sends each row to the task of the row's client; raises DataError as `read_rows` does."""
    for name in names:
        first = 0
        for rows in read_rows(folder / name, schema):
            yield from _pieces(name, first, rows, rules)
            first += len(rows)


def _pieces(source: str, first: int, rows: Rows, rules: ClientRules) -> Iterator[Piece]:
    clients = [client or NOBODY for client in rows.clients or ()]
    shards = {
        client: keyed_hash(rules.splits.seed, "table", client.encode()) % rules.num_shards for client in set(clients)
    }
    of_rows = np.array([shards[client] for client in clients], np.int64)
    names = pyarrow.array(clients, pyarrow.string())
    for shard in np.unique(of_rows).tolist():
        places = np.flatnonzero(of_rows == shard)
        problems = [rows.problems.get(place) for place in places.tolist()]
        columns = [
            names.take(pyarrow.array(places)),
            pyarrow.array([source] * len(places), pyarrow.string()),
            pyarrow.array(first + places),
            _as_binary(rows.x[places]),
            pyarrow.array(rows.y[places]),
            pyarrow.array(np.zeros(len(places), np.int64) if rows.splits is None else rows.splits[places]),
            pyarrow.array([one and json.dumps(one) for one in problems], pyarrow.string()),
        ]
        yield Piece(_ROWS, shard, pyarrow.RecordBatch.from_arrays(columns, schema=_SCHEMA))


def _group_rows(schema: TableSchema, rules: ClientRules, task: int, context: TaskContext) -> Iterable[Piece]:
    """Groups rows by client, and sends users to the task of the user's shard."""
    batches = context.tables.get(_ROWS, [])
    return user_pieces(_grouped(batches, schema), rules, context)


def _grouped(batches: Sequence[pyarrow.RecordBatch], schema: TableSchema) -> Iterator[UserRecord]:
    """Yields each client's rows as one user, in the order of files and rows."""
    table = pyarrow.Table.from_batches(batches, _SCHEMA).sort_by(
        [("client", "ascending"), ("source", "ascending"), ("number", "ascending")]
    )
    clients = table["client"].to_pylist()
    start = 0
    for client, members in itertools.groupby(clients):
        stop = start + sum(1 for _ in members)
        part = table.slice(start, stop - start)
        x = np.frombuffer(b"".join(part["x"].to_pylist()), np.float32).reshape(len(part), schema.num_values)
        found = {
            place: Unusable(Reason(one[0]), *one[1:])
            for place, text in enumerate(part["problem"].to_pylist())
            if text and (one := json.loads(text))
        }
        splits = None if schema.roles.split is None else part["split"].to_numpy()
        sources = ", ".join(dict.fromkeys(part["source"].to_pylist()))
        yield _user(client, sources, _examples(x, found), part["y"].to_numpy(), splits, schema)
        start = stop


def _examples(x: np.ndarray, problems: dict[int, Unusable]) -> list:
    examples: list = list(x)
    for place, problem in problems.items():
        examples[place] = problem
    return examples


def _user(
    client: str, source: str, x: list, y: np.ndarray, splits: np.ndarray | None, schema: TableSchema
) -> UserRecord:
    labels = y.astype(np.int64).tolist() if schema.class_names is not None else y.tolist()
    is_in = {split: None if splits is None else (splits == SPLITS.index(split)).tolist() for split in SPLITS}
    return UserRecord(client, source, x, labels, len(x), is_test=is_in["test"], is_validation=is_in["validation"])


def _as_binary(x: np.ndarray) -> pyarrow.Array:
    """Returns each row's bytes, as one value of a column."""
    size = x.shape[1] * x.itemsize
    offsets = np.arange(len(x) + 1, dtype=np.int64) * size
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(np.ascontiguousarray(x))]
    return pyarrow.Array.from_buffers(pyarrow.large_binary(), len(x), buffers)
