"""Measures how fast a client dataset is opened and read: clients one by one, and a shuffled epoch over all clients.

Writes a dataset of uniform noise into a temporary folder, 100,000 clients with 8 examples of 784 float32 values each
(2.6 GB), and reads it while it is in the page cache: this measures the package, not a disk. Every figure is a median of
some repeats; the slowest repeat is written too.

  python -m benchmarks.preparing.client_reads [--small]
"""

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from benchmarks.machine import RESULTS, describe_machine
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.example_codec import encode_examples
from tff_pdp.data.manifest import (
    FORMAT_VERSION,
    INDEX_FILE,
    SHARD_FOLDER,
    FeatureSpec,
    FileRecord,
    Manifest,
    Tally,
    mark_finished,
)

OUTPUT = RESULTS / "client_reads.json"
CLIENTS, SMALL_CLIENTS, EXAMPLES, SHARDS = 100_000, 2_000, 8, 8
FEATURES = FeatureSpec.of((28, 28, 1), num_classes=10)
BATCH_SIZE = 256
SEED = 0


def write_dataset(folder: pathlib.Path, num_clients: int) -> float:
    """Writes a dataset whose clients have train examples only; returns the seconds that the encoding took."""
    (folder / SHARD_FOLDER).mkdir(parents=True)
    client_ids = [f"client_{number:07d}" for number in range(num_clients)]
    per_shard = -(-num_clients // SHARDS)
    rows, seconds = [], 0.0
    for shard in range(SHARDS):
        with open(folder / _shard_name(shard), "wb") as file:
            for client_id in client_ids[shard * per_shard : (shard + 1) * per_shard]:
                x, y, example_ids = _examples(client_id)
                started = time.perf_counter()
                records = encode_examples(FEATURES, x, y, example_ids)
                seconds += time.perf_counter() - started
                rows.append((client_id, "train", shard, file.tell(), len(records), len(y)))
                file.write(records)
    columns = ("client_id", "split", "shard", "offset", "nbytes", "num_examples")
    table = pyarrow.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows])
    pyarrow.parquet.write_table(table, folder / INDEX_FILE)
    _manifest(folder, client_ids).save(folder)
    mark_finished(folder)
    return seconds


def measure(folder: pathlib.Path, num_clients: int) -> dict[str, Any]:
    """Returns the dataset's size, and seconds or examples per second of every way to read it."""
    random = np.random.default_rng(SEED)
    encoding = write_dataset(folder, num_clients)
    opening, dataset = _seconds_of(lambda: ClientDataset.open(folder), repeats=5)
    manifest_alone, _ = _seconds_of(lambda: Manifest.load(folder), repeats=5)
    chosen = random.choice(dataset.client_ids, 20_000)
    loading = [_seconds(lambda client_id=client_id: dataset.load(client_id, "train")) for client_id in chosen]
    epochs, num_read = _seconds_of(lambda: _read_epoch(dataset), repeats=3)
    assert num_read == num_clients * EXAMPLES
    return {
        "clients": num_clients,
        "examples": num_read,
        "megabytes": sum(shard.nbytes for shard in dataset.manifest.shards) / 1e6,
        "encode_examples_per_s": num_read / encoding,
        "open_s": {"median": float(np.median(opening)), "slowest": max(opening)},
        "open_manifest_json_s": {"median": float(np.median(manifest_alone)), "slowest": max(manifest_alone)},
        "load_ms": {"p50": _percentile_ms(loading, 50), "p99": _percentile_ms(loading, 99)},
        "epoch_batch_size": BATCH_SIZE,
        "epoch_examples_per_s": {"median": num_read / float(np.median(epochs)), "slowest": num_read / max(epochs)},
    }


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help=f"{SMALL_CLIENTS:,} clients, to try the benchmark out")
    parser.add_argument("--folder", type=pathlib.Path, metavar="FOLDER", help="folder to write; default temporary")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help=f"default {OUTPUT}; none with --small")
    options = parser.parse_args()
    # A load above the number of cores shows that the figures are from a busy machine.
    load_average = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        row = measure(pathlib.Path(folder) / "clients", SMALL_CLIENTS if options.small else CLIENTS)
    text = json.dumps({"machine": describe_machine(), "load_average": load_average, **row}, indent=2)
    print(text)
    output = options.output or (None if options.small else OUTPUT)
    if output:
        output.write_text(text + "\n")


def _examples(client_id: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(int(client_id.removeprefix("client_")))
    x = random.random((EXAMPLES, int(np.prod(FEATURES.shape))), np.float32)
    ids = random.bytes(16 * EXAMPLES).hex().encode()
    return x, random.integers(0, FEATURES.num_classes, EXAMPLES), np.frombuffer(ids, "S32")


def _manifest(folder: pathlib.Path, client_ids: list[str]) -> Manifest:
    everything = Tally(len(client_ids), len(client_ids) * EXAMPLES)
    return Manifest(
        features=FEATURES,
        seed=SEED,
        parameters={},
        sources=(),
        config_hash="",
        read=everything,
        kept=everything,
        dropped={},
        num_examples={"train": everything.examples, "validation": 0, "test": 0},
        clients={client_id: {"train": EXAMPLES, "validation": 0, "test": 0} for client_id in client_ids},
        shards=tuple(FileRecord.of(folder, _shard_name(shard)) for shard in range(SHARDS)),
        index=FileRecord.of(folder, INDEX_FILE),
        format_version=FORMAT_VERSION,
    )


def _shard_name(shard: int) -> str:
    return f"{SHARD_FOLDER}/part-{shard:05d}-of-{SHARDS:05d}.tfrecord"


def _read_epoch(dataset: ClientDataset) -> int:
    return sum(len(y) for _, y in dataset.epoch("train", BATCH_SIZE, SEED))


def _seconds(read: Callable[[], Any]) -> float:
    started = time.perf_counter()
    read()
    return time.perf_counter() - started


def _seconds_of(read: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Returns the seconds of every repeat, and the last result."""
    seconds, result = [], None
    for _ in range(repeats):
        started = time.perf_counter()
        result = read()
        seconds.append(time.perf_counter() - started)
    return seconds, result


def _percentile_ms(seconds: list[float], percent: int) -> float:
    return 1e3 * float(np.percentile(seconds, percent))


if __name__ == "__main__":
    main()
