"""Epochs over everyone's examples: each once, in an order that is uniform, with little memory."""

import collections
import itertools
import tracemalloc

import numpy as np
import pytest

from tests.data.written_clients import write_clients
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.example_codec import record_lengths
from tff_pdp.data.manifest import FeatureSpec
from tff_pdp.errors import ConfigError, DataError

FEATURES = FeatureSpec.of((1, 2), 1000)


def write_numbered(folder, features=FEATURES, first=120, sizes=(3, 1, 9, 0, 4)):
    """Clients in two shards, whose examples count up through the index: across 128, where records become longer."""
    stops = first + np.cumsum(sizes)
    extents = []
    for client, (start, stop) in enumerate(zip([first, *stops], stops, strict=False)):
        y = np.arange(start, stop)
        x = np.stack([y % 256, np.full(len(y), 7)], axis=1).astype(features.x_dtype)
        extents.append((f"client_{client}", "train", client % 2, x, y.astype(features.y_dtype)))
    return write_clients(folder, features, extents, num_shards=2)


@pytest.mark.parametrize("first", [0, 120, 300])
@pytest.mark.parametrize("kind", [(1000, "float32"), (1000, "uint8"), (0, "float32")])
def test_every_example_once_in_the_order_of_the_permutation(tmp_path, first, kind):
    features = FeatureSpec.of((1, 2), *kind)
    dataset = ClientDataset.open(write_numbered(tmp_path / "clients", features, first))
    batches = list(dataset.epoch("train", batch_size=5, seed=3))
    assert [len(y) for _, y in batches] == [5, 5, 5, 2]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert x.shape == (17, 1, 2) and x.dtype == np.float32 and y.dtype == features.y_dtype
    assert y.tolist() == (first + np.random.default_rng(3).permutation(17)).tolist()
    scale = 255 if features.x_dtype == "uint8" else 1
    expected = np.stack([y % 256, np.full(17, 7)], axis=1).astype(np.float32) / np.float32(scale)
    np.testing.assert_array_equal(x[:, 0], expected)


def test_order_is_the_seeds(tmp_path):
    dataset = ClientDataset.open(write_numbered(tmp_path / "clients"))

    def order(seed, batch_size=4):
        return [label for _, y in dataset.epoch("train", batch_size, seed) for label in y.tolist()]

    assert order(0) == order(0) == order(0, batch_size=100)
    assert order(0) != order(1) and sorted(order(0)) == sorted(order(1)) == list(range(120, 137))


def test_orders_are_uniform(tmp_path):
    dataset = ClientDataset.open(write_numbered(tmp_path / "clients", sizes=(2, 1)))
    orders = collections.Counter(tuple(next(dataset.epoch("train", 3, seed))[1].tolist()) for seed in range(1200))
    assert set(orders) == set(itertools.permutations((120, 121, 122)))
    # Six orders, 200 expected of each: the statistic has five degrees of freedom and exceeds 20.5 once in a thousand.
    assert sum((count - 200) ** 2 / 200 for count in orders.values()) < 20.5


def test_wrong_arguments_and_an_empty_split(tmp_path):
    dataset = ClientDataset.open(write_numbered(tmp_path / "clients"))
    with pytest.raises(ConfigError, match="batch_size must be at least 1, not 0"):
        dataset.epoch("train", 0, seed=0)
    with pytest.raises(DataError, match="no split 'dev'"):
        dataset.epoch("dev", 1, seed=0)
    assert list(dataset.epoch("test", 1, seed=0)) == []


@pytest.mark.parametrize("first", [0, 120])
@pytest.mark.parametrize("kind", ["flipped", "cut in a record", "cut between records", "emptied"])
def test_damage_is_located(tmp_path, first, kind):
    folder = write_numbered(tmp_path / "clients", first=first, sizes=(3, 3))
    dataset = ClientDataset.open(folder)
    shard = folder / "shards" / "1.tfrecord"
    lengths = record_lengths(FEATURES, np.arange(first + 3, first + 6))
    content = bytearray(shard.read_bytes())
    content[-6] ^= 1
    damaged = {
        "flipped": content,
        "cut in a record": content[:-1],
        "cut between records": content[: -lengths[2]],
        "emptied": b"",
    }
    shard.write_bytes(damaged[kind])
    start = 0 if kind == "emptied" else lengths[:2].sum()
    with pytest.raises(
        DataError, match=rf"1\.tfrecord: (corrupt TFRecord at|0 whole records in the .* bytes at) byte {start}\b"
    ):
        list(dataset.epoch("train", 6, seed=0))


def test_memory_is_a_batchs(tmp_path):
    features = FeatureSpec.of((1000,), 10)
    extents = [
        (f"client_{client}", "train", 0, np.zeros((20, 1000), np.float32), np.zeros(20, np.int64))
        for client in range(100)
    ]
    dataset = ClientDataset.open(write_clients(tmp_path / "clients", features, extents))
    # The examples are 8 MB, and a batch of them 40 kB.
    tracemalloc.start()
    try:
        assert sum(len(y) for _, y in dataset.epoch("train", 10, seed=0)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 600_000
    finally:
        tracemalloc.stop()
