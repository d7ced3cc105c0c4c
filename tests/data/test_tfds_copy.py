"""The copy for TensorFlow Datasets: every example with its client's id, whatever the types of the examples."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.data.written_clients import write_clients
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS, FeatureSpec
from tff_pdp.data.tfds_copy import write_tfds_copy
from tff_pdp.errors import DataError


def examples_of(folder, split):
    """The examples of a split by client, in the order of the files."""
    found = {}
    for example in tfds.as_numpy(tfds.builder_from_directory(folder).as_dataset(split=split, shuffle_files=False)):
        found.setdefault(example["client_id"].decode(), []).append(example)
    return found


def assert_copied(clients):
    """Compares the copy with what the reader of the dataset returns: types, ids, counts, values and labels."""
    folder = write_tfds_copy(clients)
    dataset = ClientDataset.open(clients, verify=True)
    builder = tfds.builder_from_directory(folder)
    numbers = {split: builder.info.splits[split].num_examples for split in builder.info.splits}
    assert numbers == {split: number for split, number in dataset.manifest.num_examples.items() if number}
    for split in SPLITS:
        found = examples_of(folder, split) if split in numbers else {}
        expected = {client: dataset.num_examples(client, split) for client in dataset.client_ids}
        assert {client: len(rows) for client, rows in found.items()} == {
            client: number for client, number in expected.items() if number
        }
        for client, rows in found.items():
            own = dataset.load(client, split)
            x = np.stack([row["x"] for row in rows])
            assert x.dtype == dataset.manifest.features.x_dtype
            np.testing.assert_array_equal(x if x.dtype == np.float32 else x / np.float32(255), own.x)
            np.testing.assert_array_equal([row["y"] for row in rows], own.y)
            np.testing.assert_array_equal([row["example_id"] for row in rows], dataset.example_ids(client, split))
    return builder


def extent(client, split, shard, count, x_dtype="float32", y_dtype=np.int64):
    generator = np.random.default_rng([count, shard])
    x = generator.integers(0, 256, (count, 6))
    x = x.astype(np.uint8) if x_dtype == "uint8" else x.astype(np.float32)
    # Labels whose varints have one byte and two.
    return client, split, shard, x, np.resize([0, 1, 299], count).astype(y_dtype)


CLIENTS = (("ümlaut/a", "train", 0, 5), ("ümlaut/a", "test", 0, 2), ("b", "train", 1, 3), ("c", "train", 1, 1))


@pytest.mark.parametrize("x_dtype", ["float32", "uint8"])
@pytest.mark.parametrize("num_classes", [300, 0])
def test_every_example_has_the_id_of_its_client(tmp_path, x_dtype, num_classes):
    features = FeatureSpec.of((2, 3), num_classes, x_dtype)
    extents = [extent(*one, x_dtype, features.y_dtype) for one in CLIENTS]
    builder = assert_copied(write_clients(tmp_path / "clients", features, extents, num_shards=2))
    # As many files as shards, or clients, with half of the sorted clients each: b and c, then ümlaut/a.
    assert {name: split.shard_lengths for name, split in builder.info.splits.items()} == {"train": [4, 5], "test": [2]}
    assert builder.info.full_name == "client_dataset/1.0.0"


def test_names_of_classes(tmp_path):
    names = tuple(f"class {number}" for number in range(300))
    features = FeatureSpec.of((2, 3), 300)
    clients = write_clients(tmp_path / "clients", features, [extent("a", "train", 0, 3)], class_names=names)
    builder = assert_copied(clients)
    assert builder.info.features["y"].names == list(names)
    assert builder.info.supervised_keys == ("x", "y")


def test_a_copy_is_written_once_and_whole(tmp_path):
    features = FeatureSpec.of((2, 3), 300)
    clients = write_clients(tmp_path / "clients", features, [extent("a", "train", 0, 3)])
    # What a killed process left.
    (clients / ".tfds.unfinished").mkdir()
    (clients / ".tfds.unfinished" / "leftover").touch()
    folder = write_tfds_copy(clients)
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["client_dataset-train.tfrecord-00000-of-00001", "dataset_info.json", "features.json"]
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert write_tfds_copy(clients) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert not (clients / ".tfds.unfinished").exists()


def test_a_damaged_record_is_named_and_nothing_is_written(tmp_path):
    features = FeatureSpec.of((2, 3), 300)
    clients = write_clients(tmp_path / "clients", features, [extent("a", "train", 0, 3)])
    shard = clients / "shards" / "0.tfrecord"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"0\.tfrecord: corrupt TFRecord at byte \d+"):
        write_tfds_copy(clients)
    assert not (clients / "tfds").exists()
