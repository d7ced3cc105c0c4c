"""Removes a client from a finished client dataset: the dataset is then as if the client had never been in the input."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from beam_pipelines.dataset.staging import Extent, publish, shard_name, staging_folder, write_index, write_shard
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import DEAD_LETTER_FOLDER, INDEX_FILE, SPLITS, FileRecord, Manifest, Tally
from tff_pdp.errors import DataError
from tff_pdp.files import read_at, write_atomically

_ORDER = [("client_id", "ascending"), ("split", "ascending"), ("offset", "ascending")]


def remove_client(output: Path, client_id: str) -> Manifest:
    """Writes a client dataset anew without one client, and without the client's dead letters; replaces the old dataset.

    A killed call leaves the old dataset or the new one; the next call, or the next job, completes the replacement.
    The hash of the dataset's sources and options stays, so that a job with the same input skips the dataset.

    Args:
      output: folder of the dataset.
      client_id: id of the client; if the dataset does not have the client, only dead letters are removed.

    Returns:
      The manifest of the new dataset.

    Raises:
      DataError: the folder is a link or has no finished dataset, a file is damaged, no other client is in the dataset,
        or another process is writing the dataset.
    """
    if output.is_symlink():
        raise DataError(f"{output} is a link to {output.resolve()}: remove the client where the dataset itself is")
    with staging_folder(output, "") as staging:
        old = ClientDataset.open(output, verify=True).manifest
        if client_id in old.clients and len(old.clients) == 1:
            raise DataError(f"{output}: {client_id!r} is the only client; remove the folder itself")
        letters = _copy_letters(output, staging, client_id)
        if client_id not in old.clients and not letters:
            return old
        index = pyarrow.parquet.read_table(output / INDEX_FILE).sort_by(_ORDER).to_pylist()
        for shard, record in enumerate(old.shards):
            rows = [row for row in index if row["shard"] == shard and row["client_id"] != client_id]
            write_shard(staging, shard, len(old.shards), _extents(output / record.name, rows))
        write_index(staging, len(old.shards))
        new = _manifest(old, staging, client_id, letters)
        new.save(staging)
        publish(staging, output)
    return new


def remove_letters(folder: Path, client_id: str) -> int:
    """Removes a client's dead letters from a folder of `.jsonl` files; returns the number of removed letters."""
    removed = 0
    for path in sorted(folder.glob("*.jsonl")):
        kept, own = _divided(path, client_id)
        if own:
            write_atomically(path, kept)
            removed += len(own)
    return removed


def _copy_letters(output: Path, staging: Path, client_id: str) -> list[Mapping[str, Any]]:
    """Copies dead letters of all other clients to the new dataset, and returns the client's letters."""
    removed = []
    for path in sorted((output / DEAD_LETTER_FOLDER).glob("*")):
        kept, own = _divided(path, client_id)
        write_atomically(staging / DEAD_LETTER_FOLDER / path.name, kept)
        removed += own
    return removed


def _divided(path: Path, client_id: str) -> tuple[list[bytes], list[Mapping[str, Any]]]:
    """Returns the lines of a file that are not about a client, and the letters about the client."""
    kept, own = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        letter: Any = None
        with contextlib.suppress(ValueError):
            letter = json.loads(line)
        if isinstance(letter, dict) and letter.get("client") == client_id:
            own.append(letter)
        else:
            kept.append(line)
    return kept, own


def _extents(shard: Path, rows: list[Mapping[str, Any]]) -> Iterator[Extent]:
    with open(shard, "rb") as file:
        for row in rows:
            records = read_at(file.fileno(), row["offset"], row["nbytes"])
            yield Extent(row["client_id"], row["split"], records, row["num_examples"])


def _manifest(old: Manifest, staging: Path, client_id: str, letters: list[Mapping[str, Any]]) -> Manifest:
    counts = old.clients.get(client_id, {})
    examples = sum(counts.values())
    dropped = dict(old.dropped)
    for letter in letters:
        tally = dropped.get(letter["reason"], Tally())
        users, lost = int(letter["example"] is None), int(letter["num_examples"])
        dropped[letter["reason"]] = Tally(tally.users - users, tally.examples - lost)
    dropped = {reason: tally for reason, tally in dropped.items() if tally.users > 0 or tally.examples > 0}
    kept = Tally(old.kept.users - bool(counts), old.kept.examples - examples)
    parts = [kept, *dropped.values()]
    return dataclasses.replace(
        old,
        clients={one: splits for one, splits in old.clients.items() if one != client_id},
        num_examples={split: old.num_examples[split] - counts.get(split, 0) for split in SPLITS},
        kept=kept,
        dropped=dropped,
        read=Tally(sum(part.users for part in parts), sum(part.examples for part in parts)),
        shards=tuple(FileRecord.of(staging, shard_name(shard, len(old.shards))) for shard in range(len(old.shards))),
        index=FileRecord.of(staging, INDEX_FILE),
    )
