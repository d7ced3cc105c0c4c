"""Small client datasets, written without the preparing job."""

import numpy as np
import pyarrow
import pyarrow.parquet

from tff_pdp.data.example_codec import encode_examples
from tff_pdp.data.manifest import INDEX_FILE, SHARD_FOLDER, SPLITS, FileRecord, Manifest, Tally, mark_finished

COLUMNS = ("client_id", "split", "shard", "offset", "nbytes", "num_examples")


def as_stored(features, x):
    """Values that were read, in the form that they are stored in."""
    return x if features.x_dtype == "float32" else np.rint(x * 255).astype(features.x_dtype)


def write_clients(folder, features, extents, num_shards=1, change_rows=lambda rows: rows, class_names=None):
    """Writes a dataset whose index has one row for each `(client, split, shard, x, y)`, in this order.

    Args:
      folder: where.
      features: shape and types of an example; `x` is `[n, d]` here.
      extents: the examples.
      num_shards: how many files there are.
      change_rows: what is done to the index, a list of dicts, before it is written.
      class_names: names of the classes.
    """
    (folder / SHARD_FOLDER).mkdir(parents=True)
    names = [f"{SHARD_FOLDER}/{number}.tfrecord" for number in range(num_shards)]
    contents = [b"" for _ in names]
    rows = []
    clients = {client: {str(split): 0 for split in SPLITS} for client, *_ in extents}
    for client, split, shard, x, y in extents:
        ids = np.array([b"%032x" % number for number in range(len(y))], "S32")
        records = encode_examples(features, x, y, ids)
        rows.append((client, split, shard, len(contents[shard]), len(records), len(y)))
        contents[shard] += records
        clients[client][split] += len(y)
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    table = pyarrow.Table.from_pylist(change_rows([dict(zip(COLUMNS, row, strict=True)) for row in rows]))
    pyarrow.parquet.write_table(table, folder / INDEX_FILE)
    total = Tally(len(clients), sum(row[-1] for row in rows))
    Manifest(
        features=features,
        seed=0,
        parameters={},
        sources=(),
        config_hash="",
        read=total,
        kept=total,
        dropped={},
        num_examples={split: sum(counts[split] for counts in clients.values()) for split in SPLITS},
        clients=clients,
        shards=tuple(FileRecord.of(folder, name) for name in names),
        index=FileRecord.of(folder, INDEX_FILE),
        class_names=class_names,
    ).save(folder)
    mark_finished(folder)
    return folder
