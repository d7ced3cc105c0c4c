"""Federated EMNIST: databases and HDF5 files as TFF distributes them, and files that are damaged or something else."""

import contextlib
import lzma
import sqlite3

import h5py
import numpy as np
import pytest
import tensorflow as tf

from beam_pipelines.records import Reason
from beam_pipelines.sources.fed_emnist import (
    decompress_database,
    find_splits,
    list_h5_files,
    read_database,
    read_h5_users,
)
from tff_pdp.errors import DataError

SCHEMA = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
"""
INDEX = "CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);"
# Client, split, label. Clients are not together, as nothing says that they are.
ROWS = [
    ("f0001_41", "digits_only_train", 7),
    ("f0000_14", "digits_only_train", 1),
    ("f0001_41", "digits_only_test", 3),
    ("f0001_41", "digits_only_train", 2),
    ("f0000_14", "digits_only_test", 0),
    ("f0001_41", "all_train", 61),
    ("f0001_41", "all_test", 10),
]


def pixels(number):
    """An image as the database has them, mostly background, that tells its number."""
    image = np.ones((28, 28), np.float32)
    image[0, 0] = np.float32(number / 100)
    return image


def example(image, label):
    features = {
        "pixels": tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(image))),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=np.atleast_1d(label))),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_database(path, rows=ROWS, schema=SCHEMA, change=""):
    """Row i has image `pixels(i)`."""
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executescript(schema)
        for number, (client, split, label) in enumerate(rows):
            content = label if isinstance(label, bytes) else example(pixels(number), label)
            database.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, content))
        database.executescript(
            "INSERT INTO client_metadata SELECT client_id, split_name, COUNT(*) FROM examples "
            f"GROUP BY client_id, split_name; {change}"
        )
    return path


@pytest.mark.parametrize("schema", [SCHEMA, SCHEMA + INDEX], ids=["no index", "index"])
def test_each_writer_has_his_own_train_and_test_images(tmp_path, schema):
    path = write_database(tmp_path / "emnist_all.sqlite", schema=schema)
    assert find_splits(path, 62) == ("all_train", "all_test")
    splits = find_splits(path, 10)
    assert splits == ("digits_only_train", "digits_only_test")
    first, second = read_database(*splits, path)
    assert (first.client, first.y, first.is_test, first.num_samples) == ("f0000_14", [1, 0], [False, True], 2)
    assert (second.client, second.y, second.is_test) == ("f0001_41", [7, 3, 2], [False, True, False])
    assert second.source == "emnist_all.sqlite" and second.num_samples == 3
    assert all(x.shape == (784,) and x.dtype == np.float32 for x in second.x)
    for x, number in zip(second.x, (0, 2, 3), strict=True):
        np.testing.assert_array_equal(x, pixels(number).ravel())
    (alone,) = read_database("all_train", "all_test", path)
    assert (alone.client, alone.y, alone.is_test) == ("f0001_41", [61, 10], [False, True])


def test_a_database_of_one_kind(tmp_path):
    path = write_database(tmp_path / "a.sqlite", [("a", "train", 1), ("a", "test", 2)])
    assert find_splits(path, 10) == find_splits(path, 62) == ("train", "test")
    with pytest.raises(DataError, match=r"a\.sqlite: no splits all_train and all_test.* 62; it has holdout, train"):
        find_splits(write_database(path, [("a", "train", 1), ("a", "holdout", 2)]), 62)


def test_writers_are_read_one_at_a_time(tmp_path):
    rows = [(f"{client:04d}", "train", 1) for client in range(50)] + [("0049", "test", b"damaged")]
    users = read_database("train", "test", write_database(tmp_path / "a.sqlite", rows))
    # The last writer's damaged example has not been looked at.
    assert next(users).client == "0000"


def test_counts_that_differ_are_left_to_validation(tmp_path):
    change = (
        "UPDATE client_metadata SET num_examples = 5 WHERE client_id = 'f0000_14' AND split_name = 'digits_only_train';"
        "DELETE FROM client_metadata WHERE client_id = 'f0001_41';"
        "INSERT INTO client_metadata VALUES ('nobody', 'digits_only_train', 4);"
    )
    path = write_database(tmp_path / "a.sqlite", change=change)
    users = list(read_database("digits_only_train", "digits_only_test", path))
    assert [(user.client, user.num_samples) for user in users] == [("f0000_14", 6), ("f0001_41", None), ("nobody", 4)]
    assert users[2].x is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 20, "not a tf.train.Example"),
        (b"", "a tf.train.Example with nothing; it needs floats under 'pixels'"),
        (example([], 1), "a tf.train.Example with label, pixels; it needs floats"),
        (example(np.ones(784), [1, 2]), "and one integer under 'label'"),
        (example(np.ones(784), []), "and one integer under 'label'"),
    ],
)
def test_examples_of_another_form(tmp_path, content, message):
    path = write_database(tmp_path / "a.sqlite", [("a", "train", 1), ("b", "train", content), ("b", "test", 1)])
    with pytest.raises(DataError, match=rf"a\.sqlite: client 'b', row 2 of 'examples': .*{message}"):
        list(read_database("train", "test", path))


def test_an_example_that_is_no_blob(tmp_path):
    change = "UPDATE examples SET serialized_example_proto = 'text';"
    path = write_database(tmp_path / "a.sqlite", [("a", "train", 1), ("a", "test", 1)], change=change)
    with pytest.raises(DataError, match=r"client 'a', row 1 of 'examples': needs a serialized .*, not str"):
        list(read_database("train", "test", path))


def test_files_that_are_damaged_or_something_else(tmp_path):
    with pytest.raises(DataError, match=r"a\.sqlite: no such file; data\.input must be TFF's emnist_all\.sqlite"):
        find_splits(tmp_path / "a.sqlite", 10)
    other = write_database(tmp_path / "a.sqlite", [], change="ALTER TABLE examples RENAME client_id TO person;")
    with pytest.raises(DataError, match="table 'examples' has person, serialized_example_proto, split_name instead of"):
        find_splits(other, 10)
    other = write_database(tmp_path / "a.sqlite", [], change="DROP TABLE client_metadata;")
    with pytest.raises(DataError, match="table 'client_metadata' has no columns instead of"):
        find_splits(other, 10)
    other.write_bytes(b"not a database" * 100)
    with pytest.raises(DataError, match=r"a\.sqlite: not an SQLite database, or damaged"):
        find_splits(other, 10)
    rows = [(f"{client:04d}", "train", 1) for client in range(50)] + [("0000", "test", 1)]
    path = write_database(tmp_path / "a.sqlite", rows, schema=SCHEMA + INDEX)
    content = path.read_bytes()
    path.write_bytes(content[: 100 * 1024])
    with pytest.raises(DataError, match=r"a\.sqlite: not an SQLite database, or damaged: .*malformed"):
        list(read_database("train", "test", path))
    path.write_bytes(content[: 50 * 1024] + bytes(50 * 1024) + content[100 * 1024 :])
    with pytest.raises(DataError, match=r"a\.sqlite: after client '00..': .*the file is damaged, get it again"):
        list(read_database("train", "test", path))


def test_compressed(tmp_path):
    path = write_database(tmp_path / "emnist_all.sqlite")
    compressed = tmp_path / "emnist_all.sqlite.lzma"
    compressed.write_bytes(lzma.compress(path.read_bytes(), format=lzma.FORMAT_ALONE))
    database = decompress_database(compressed, tmp_path / "workspace")
    assert database == tmp_path / "workspace" / "emnist_all.sqlite"
    assert database.read_bytes() == path.read_bytes()
    compressed.write_bytes(compressed.read_bytes()[:-500])
    database.unlink()
    with pytest.raises(DataError, match=r"emnist_all\.sqlite\.lzma: cannot be decompressed: .*get the file again"):
        decompress_database(compressed, tmp_path / "workspace")
    assert not list((tmp_path / "workspace").iterdir())


def write_h5(path, clients):
    with h5py.File(path, "w") as file:
        for client, (x, y) in clients.items():
            group = file.create_group(f"examples/{client}")
            group["pixels"], group["label"] = x, y
    return path


def test_the_older_form(tmp_path):
    x = np.stack([pixels(number) for number in range(4)])
    labels = np.array([3, 1, 4, 1], np.int32)
    train = write_h5(tmp_path / "fed_emnist_digitsonly_train.h5", {"b": (x[:2], labels[:2]), "a": (x[2:], labels[2:])})
    test = write_h5(tmp_path / "fed_emnist_digitsonly_test.h5", {"b": (x[3:], labels[3:]), "c": (x[:1], labels[:1])})
    assert list_h5_files(tmp_path) == (train.name, test.name)
    users = [user for name in list_h5_files(tmp_path) for user in read_h5_users(tmp_path / name)]
    assert [(user.client, user.y, user.is_test) for user in users] == [
        ("a", [4, 1], [False, False]),
        ("b", [3, 1, 1], [False, False, True]),
        ("c", [3], [True]),
    ]
    np.testing.assert_array_equal(users[1].x[2], pixels(3).ravel())
    assert users[1].num_samples == 3 and users[1].x[0].dtype == np.float32


def test_h5_files_that_are_damaged_or_something_else(tmp_path):
    good = (pixels(0)[np.newaxis], [1])
    with pytest.raises(
        DataError, match=r"or a folder with one \*_train\.h5 and its \*_test\.h5; this folder has no \*_train"
    ):
        list_h5_files(tmp_path)
    train, test = (write_h5(tmp_path / f"a_{side}.h5", {"w": good}) for side in ("train", "test"))
    write_h5(test, {"v": good, "w": (pixels(0)[np.newaxis], [1, 2])})
    with pytest.raises(DataError, match=r"a_test\.h5: client 'w': pixels of shape \(1, 28, 28\) do not match"):
        list(read_h5_users(train))
    with h5py.File(test, "a") as file:
        del file["examples/v/label"]
    with pytest.raises(DataError, match=r"a_test\.h5: client 'v': lacks pixels or label, or is damaged"):
        list(read_h5_users(train))
    with h5py.File(test, "w") as file:
        file["others"] = [1]
    with pytest.raises(DataError, match=r"a_test\.h5: not TFF's HDF5 format, truncated or damaged"):
        list(read_h5_users(train))
    train.write_bytes(train.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"a_train\.h5: not TFF's HDF5 format, truncated or damaged"):
        list(read_h5_users(train))
    write_h5(tmp_path / "b_train.h5", {"w": good})
    with pytest.raises(DataError, match=r"this folder has a_train\.h5, b_train\.h5"):
        list_h5_files(tmp_path)


def test_a_database_becomes_a_client_dataset(prepare, tmp_path):
    """Validation finds what a reader leaves to it: a label out of range, an image of another size."""
    rows = [(client, split, label) for client in "ab" for split, label in (("train", 1), ("train", 2), ("test", 3))]
    rows += [("a", "train", example(np.ones(100), 1)), ("a", "train", 62)]
    path = write_database(tmp_path / "emnist_all.sqlite", rows)
    compressed = tmp_path / "raw.sqlite.lzma"
    compressed.write_bytes(lzma.compress(path.read_bytes()))
    options = {"validation_fraction": 0.0, "min_examples_per_client": 1, "max_bad_fraction": 0.5}
    for source in (path, compressed):
        dataset = prepare(kind="fed_emnist", input=str(source), num_classes=62, input_shape=[28, 28, 1], **options)
        assert dataset.manifest.clients == {client: {"train": 2, "validation": 0, "test": 1} for client in "ab"}
        assert set(dataset.manifest.dropped) == {Reason.PIXEL_COUNT, Reason.LABEL_RANGE}
        examples = dataset.load("b", "test")
        assert examples.y.tolist() == [3] and examples.x.shape == (1, 28, 28, 1)
        np.testing.assert_array_equal(examples.x[0, ..., 0], pixels(5))
        assert dataset.manifest.parameters["splits"] == ["train", "test"]
        assert dataset.manifest.parameters["test_fraction"] is None
