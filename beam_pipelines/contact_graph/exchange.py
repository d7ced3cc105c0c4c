"""Arrays to pieces and back."""

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow

from beam_pipelines.keyed_hash import keyed_uint64
from beam_pipelines.stages import Piece, TaskContext

Columns = Mapping[str, np.ndarray]


def partition_of(ids: np.ndarray, num_partitions: int) -> np.ndarray:
    """The partition of each id, spread evenly: int64 `[n]`."""
    return (keyed_uint64(0, "partition", ids) % np.uint64(num_partitions)).astype(np.int64)


def scatter(table: str, partitions: np.ndarray, num_partitions: int, columns: Columns) -> Iterator[Piece]:
    """Gives each row to its partition: partitions int64 `[n]`, columns `[n]` each."""
    # Small integers are sorted by counting.
    order = np.argsort(partitions.astype(np.uint16 if num_partitions <= 2**16 else np.int64), kind="stable")
    ends = np.cumsum(np.bincount(partitions, minlength=num_partitions))
    arrays = {name: pyarrow.array(values[order]) for name, values in columns.items()}
    whole = pyarrow.RecordBatch.from_pydict(arrays)
    start = 0
    for partition, end in enumerate(ends.tolist()):
        if end > start:
            yield Piece(table, partition, whole.slice(start, end - start))
        start = end


def gather(context: TaskContext, table: str, like: Mapping[str, type | str]) -> dict[str, np.ndarray]:
    """A table of the task as arrays, one piece after the other; empty arrays of these types where there is none."""
    batches = context.tables.get(table)
    if not batches:
        return {name: np.zeros(0, dtype) for name, dtype in like.items()}
    whole = pyarrow.Table.from_batches(batches)
    return {name: whole[name].to_numpy() for name in like}
