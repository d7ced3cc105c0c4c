"""The reader on datasets that are sound, unfinished, foreign or damaged."""

import concurrent.futures
import hashlib
import json
import os
import pickle
import random
import shutil

import numpy as np
import pytest

from beam_pipelines.options import ClientDatasetOptions
from beam_pipelines.sources.partition import write_digits_leaf
from tests.beam_pipelines.conftest import run_leaf
from tests.data.written_clients import write_clients
from tff_pdp.data import shards as shard_files
from tff_pdp.data import tfrecord
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import FORMAT_VERSION, FeatureSpec
from tff_pdp.errors import DataError


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    write_digits_leaf(root / "raw", num_clients=4, concentration=1.0, seed=0)
    options = ClientDatasetOptions(root / "raw", root / "clients", input_shape=(8, 8, 1), num_classes=10, num_shards=2)
    return run_leaf(options).output


@pytest.fixture
def copy(digits, tmp_path):
    return shutil.copytree(digits, tmp_path / "copy")


def test_examples_have_types_and_numbers_of_the_manifest(digits):
    dataset = ClientDataset.open(digits, verify=True)
    assert len(dataset.client_ids) == 4
    for client in dataset.client_ids:
        examples = dataset.load(client, "train")
        count = dataset.num_examples(client, "train")
        assert examples.x.dtype == np.float32 and examples.y.dtype == np.int64
        assert examples.x.shape == (count, 8, 8, 1) and len(examples.y) == count
        assert count == dataset.manifest.clients[client]["train"]


def test_unknown_client_and_split(digits):
    dataset = ClientDataset.open(digits)
    with pytest.raises(DataError, match="no client 'nobody'"):
        dataset.load("nobody", "train")
    with pytest.raises(DataError, match="no split 'dev'; choose one of train, validation, test"):
        dataset.num_examples("silo_00", "dev")


def test_missing_or_unfinished(copy, tmp_path):
    with pytest.raises(DataError, match="no such client dataset"):
        ClientDataset.open(tmp_path / "nowhere")
    (copy / "_SUCCESS").unlink()
    with pytest.raises(DataError, match="not a finished client dataset"):
        ClientDataset.open(copy)


def test_a_changed_byte_of_the_manifest_or_of_its_checksum_is_refused(copy):
    manifest, success = (copy / name for name in ("manifest.json", "_SUCCESS"))
    generator = random.Random(0)
    for path in (manifest, success):
        content = path.read_bytes()
        for _ in range(200):
            changed = bytearray(content)
            changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(DataError, match=r"manifest\.json: does not match the sha256 in _SUCCESS"):
                ClientDataset.open(copy)
        path.write_bytes(content)
    manifest.write_bytes(b"")
    with pytest.raises(DataError, match=r"manifest\.json: does not match the sha256 in _SUCCESS"):
        ClientDataset.open(copy)
    manifest.unlink()
    with pytest.raises(DataError, match=r"manifest\.json: No such file"):
        ClientDataset.open(copy)


def test_the_checksum_is_for_sha256sum_too(copy):
    (line,) = (copy / "_SUCCESS").read_text().splitlines()
    assert line == f"{hashlib.sha256((copy / 'manifest.json').read_bytes()).hexdigest()}  manifest.json"


def test_a_manifest_of_an_earlier_release_is_read_without_a_checksum_and_damage_is_named(copy):
    manifest, success = (copy / name for name in ("manifest.json", "_SUCCESS"))
    success.write_bytes(b"")
    content = manifest.read_bytes()
    assert ClientDataset.open(copy).manifest.config_hash in content.decode()
    generator = random.Random(1)
    refused = 0
    for _ in range(300):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] = generator.randrange(256)
        manifest.write_bytes(changed)
        try:
            ClientDataset.open(copy)
        except DataError as error:
            assert str(copy) in str(error)
            refused += 1
    assert refused > 100


def test_other_version_and_damaged_manifest(copy):
    # As in earlier releases: without a checksum, the manifest alone has to tell.
    (copy / "_SUCCESS").write_bytes(b"")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": FORMAT_VERSION + 1}))
    with pytest.raises(DataError, match=rf"format version {FORMAT_VERSION + 1}, .* reads version {FORMAT_VERSION};"):
        ClientDataset.open(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="unreadable manifest"):
        ClientDataset.open(copy)
    (copy / "manifest.json").write_text(json.dumps({"format_version": FORMAT_VERSION}))
    with pytest.raises(DataError, match="malformed manifest"):
        ClientDataset.open(copy)


@pytest.mark.parametrize("kind", ["flipped", "truncated"])
def test_damaged_shard_is_named(copy, kind):
    dataset = ClientDataset.open(copy)
    shard = next(path for path in sorted((copy / "shards").iterdir()) if path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content if kind == "flipped" else content[:-20])
    with pytest.raises(DataError, match=rf"{shard.name}: corrupt TFRecord at byte \d+"):
        for client in dataset.client_ids:
            dataset.load(client, "validation")
    with pytest.raises(DataError, match=rf"{shard.name}: differs from the manifest"):
        ClientDataset.open(copy, verify=True)


def test_missing_shard_and_damaged_index(copy):
    dataset = ClientDataset.open(copy)
    shutil.rmtree(copy / "shards")
    with pytest.raises(DataError, match="cannot be read"):
        dataset.load("silo_00", "train")
    (copy / "index.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"index\.parquet: differs from the manifest"):
        ClientDataset.open(copy)


def test_a_dataset_that_is_replaced_while_it_is_open_is_refused(copy, digits, tmp_path):
    """Its shards are opened when they are first read: by then they may be others."""
    dataset = ClientDataset.open(copy)
    client = dataset.client_ids[0]
    dataset.load(client, "train")
    shutil.copytree(digits, tmp_path / "other")
    copy.rename(tmp_path / "before")
    for replace in (lambda: None, lambda: (tmp_path / "other").rename(copy)):
        replace()
        for read in (dataset.load, dataset.example_ids):
            with pytest.raises(DataError, match=f"^{copy} was prepared anew, or removed, while it was in use"):
                read(client, "train")
    assert len(ClientDataset.open(copy).load(client, "train").y)


def numbered(first, count):
    """Examples of two values whose first one and whose label count up."""
    y = np.arange(first, first + count)
    return np.stack([y, np.zeros(count)], axis=1).astype(np.float32), y


def test_several_extents_are_one_client(tmp_path):
    extents = [
        ("b", "train", 0, *numbered(0, 2)),
        ("a", "train", 0, *numbered(126, 3)),
        ("a", "test", 1, *numbered(300, 1)),
        ("b", "train", 1, *numbered(2, 1)),
        ("a", "train", 1, *numbered(7, 2)),
        ("b", "train", 1, *numbered(3, 3)),
    ]
    dataset = ClientDataset.open(write_clients(tmp_path / "clients", FeatureSpec.of((1, 2), 1000), extents, 2))
    assert dataset.client_ids == ("a", "b")
    assert [dataset.num_examples("a", split) for split in ("train", "validation", "test")] == [5, 0, 1]
    a, b = dataset.load("a", "train"), dataset.load("b", "train")
    assert a.y.tolist() == [126, 127, 128, 7, 8] and a.x[:, 0, 0].tolist() == a.y.tolist()
    assert b.y.tolist() == list(range(6)) and b.x.shape == (6, 1, 2) and b.x.dtype == np.float32
    nothing = dataset.load("a", "validation")
    assert nothing.x.shape == (0, 1, 2) and nothing.y.dtype == np.int64


@pytest.mark.parametrize(("read_bytes", "gap_bytes"), [(1 << 25, 1 << 14), (1, 0), (300, 0), (300, 1 << 14)])
def test_many_clients_are_read_as_one_after_another(tmp_path, monkeypatch, read_bytes, gap_bytes):
    monkeypatch.setattr(shard_files, "_READ_BYTES", read_bytes)
    monkeypatch.setattr(shard_files, "_GAP_BYTES", gap_bytes)
    names = [f"client {number}" for number in range(9)]
    extents = [
        (name, split, (number + part) % 3, *numbered(100 * number + 10 * part, number % 4))
        for number, name in enumerate(names)
        for part in range(2)
        for split in ("test", "train")
    ]
    dataset = ClientDataset.open(write_clients(tmp_path / "clients", FeatureSpec.of((1, 2), 1000), extents, 3))
    expected = {
        number: [100 * number + 10 * part + row for part in range(2) for row in range(number % 4)]
        for number in range(9)
    }
    for places in ([5, 1, 8, 0, 3], [2, 2, 6], list(range(9)), [4], []):
        found = dataset.load_many(np.array(places, np.int64), "train")
        assert found.y.tolist() == [label for place in places for label in expected[place]]
        assert found.x.shape == (len(found.y), 1, 2) and found.x[:, 0, 0].tolist() == found.y.tolist()
    assert dataset.sizes("train").tolist() == [2 * (number % 4) for number in range(9)]
    assert dataset.sizes("validation").tolist() == [0] * 9


def test_damage_is_found_among_many_clients(tmp_path):
    extents = [(f"client {number}", "train", 0, *numbered(10 * number, 2)) for number in range(5)]
    dataset = ClientDataset.open(write_clients(tmp_path / "clients", FeatureSpec.of((1, 2), 1000), extents))
    shard = tmp_path / "clients" / "shards" / "0.tfrecord"
    content = bytearray(shard.read_bytes())
    length = len(content) // 10
    content[7 * length - 20] ^= 1
    shard.write_bytes(content)
    assert dataset.load_many(np.array([4, 0, 1]), "train").y.tolist() == [40, 41, 0, 1, 10, 11]
    with pytest.raises(DataError, match=rf"0\.tfrecord: corrupt TFRecord at byte {6 * length};"):
        dataset.load_many(np.array([4, 3, 2]), "train")


def test_bytes_are_read_as_fractions(tmp_path):
    features = FeatureSpec.of((2,), 0, "uint8")
    extents = [("a", "train", 0, np.array([[0, 255], [51, 102]], np.uint8), np.array([0.5, -2.0], np.float32))]
    examples = ClientDataset.open(write_clients(tmp_path / "clients", features, extents)).load("a", "train")
    assert examples.x.tolist() == [[0.0, 1.0], [float(np.float32(0.2)), float(np.float32(0.4))]]
    assert examples.y.dtype == np.float32 and examples.y.tolist() == [0.5, -2.0]


@pytest.mark.parametrize(
    "change",
    [
        {"client_id": "nobody"},
        {"client_id": None},
        {"client_id": 5},
        {"split": "dev"},
        {"shard": 1},
        {"shard": -1},
        {"offset": "here"},
        {"nbytes": None},
    ],
)
def test_index_of_another_dataset(tmp_path, change):
    extents = [("a", "train", 0, *numbered(0, 2))]
    features = FeatureSpec.of((2,), 10)
    with pytest.raises(DataError, match=r"index\.parquet: unusable index .*; prepare the data again"):
        ClientDataset.open(
            write_clients(tmp_path / "1", features, extents, change_rows=lambda rows: [{**rows[0], **change}])
        )


def test_index_without_a_column(tmp_path):
    extents = [("a", "train", 0, *numbered(0, 2))]
    with pytest.raises(DataError, match=r"unusable index .*num_examples"):
        ClientDataset.open(
            write_clients(
                tmp_path / "column",
                FeatureSpec.of((2,), 10),
                extents,
                change_rows=lambda rows: [{name: rows[0][name] for name in rows[0] if name != "num_examples"}],
            )
        )


@pytest.mark.parametrize("promised", [(3, 1), (1, 3), (2, 1)])
def test_index_that_promises_other_numbers_than_there_are(tmp_path, promised):
    def promise(rows):
        return [{**row, "num_examples": count} for row, count in zip(rows, promised, strict=True)]

    extents = [("a", "train", 0, *numbered(0, 2)), ("b", "train", 0, *numbered(0, 2))]
    folder = write_clients(tmp_path / "clients", FeatureSpec.of((2,), 10), extents, change_rows=promise)
    dataset = ClientDataset.open(folder)
    wrong, count = ("a", promised[0]) if promised[0] != 2 else ("b", promised[1])
    message = rf"0\.tfrecord: 2 whole records in the \d+ bytes at byte \d+, but the index promises {count};"
    with pytest.raises(DataError, match=message):
        dataset.load(wrong, "train")


@pytest.fixture
def many_shards(monkeypatch, tmp_path):
    """Sixteen clients with a shard each, of which two are open at a time."""
    monkeypatch.setattr(shard_files, "_OPEN_FILES", 2)
    extents = [(str(client), "train", client, *numbered(client, 3)) for client in range(16)]
    return ClientDataset.open(write_clients(tmp_path / "clients", FeatureSpec.of((2,), 100), extents, 16))


def is_sound(dataset, client):
    return dataset.load(str(client), "train").y.tolist() == [client, client + 1, client + 2]


def open_shards(dataset):
    targets = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum(target.startswith(os.path.realpath(dataset / "shards")) for target in targets)


def test_shards_stay_open_up_to_a_limit_and_until_the_dataset_is_gone(many_shards):
    path = many_shards.path
    assert open_shards(path) == 0
    assert is_sound(many_shards, 0) and open_shards(path) == 1
    assert is_sound(many_shards, 0) and open_shards(path) == 1
    assert all(is_sound(many_shards, client) for client in range(16)) and open_shards(path) == 2
    epoch = many_shards.epoch("train", 48, 0)
    assert len(next(epoch)[1]) == 48 and open_shards(path) == 2
    copied = pickle.loads(pickle.dumps(many_shards))
    assert is_sound(copied, 3) and open_shards(path) == 3
    del epoch, copied
    assert open_shards(path) == 2


def test_threads_that_close_each_others_shards(many_shards):
    clients = np.random.default_rng(0).integers(0, 16, 4000).tolist()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda client: is_sound(many_shards, client), clients))
    assert open_shards(many_shards.path) == 2


def test_processes_that_are_forked(many_shards):
    assert is_sound(many_shards, 5)
    children = []
    for child in range(4):
        process = os.fork()
        if process == 0:
            succeeded = False
            try:
                succeeded = all(is_sound(many_shards, (5 + child + step) % 16) for step in range(200))
            finally:
                os._exit(0 if succeeded else 1)
        children.append(process)
    assert all(is_sound(many_shards, client % 16) for client in range(200))
    assert [os.waitpid(process, 0)[1] for process in children] == [0] * 4


def test_framing_is_tensorflows(tmp_path):
    import tensorflow as tf

    payloads = [b"", b"one", bytes(1000)]
    path = tmp_path / "records"
    path.write_bytes(b"".join(map(tfrecord.frame, payloads)))
    assert list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()) == payloads
    assert tfrecord.unframe(path.read_bytes(), "records") == payloads
