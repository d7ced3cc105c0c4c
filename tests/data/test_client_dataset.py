"""The reader on datasets that are sound, unfinished, foreign or damaged."""

import json
import shutil

import numpy as np
import pytest

from beam_pipelines.femnist import FemnistOptions, run_femnist
from tff_pdp.data import tfrecord
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.sources import write_digits_leaf
from tff_pdp.errors import DataError


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    write_digits_leaf(root / "raw", num_clients=4, concentration=1.0, seed=0)
    options = FemnistOptions(root / "raw", root / "clients", input_shape=(8, 8, 1), num_classes=10, num_shards=2)
    return run_femnist(options).output


@pytest.fixture
def copy(digits, tmp_path):
    return shutil.copytree(digits, tmp_path / "copy")


def test_load_and_stack_agree(digits):
    dataset = ClientDataset.open(digits, verify=True)
    clients = dataset.client_ids[::-1]
    stacked = dataset.stack(clients, "train")
    assert stacked.x.dtype == np.float32 and stacked.y.dtype == np.int64 and stacked.num_examples.dtype == np.int32
    assert stacked.x.shape == (4, stacked.num_examples.max(), 8, 8, 1)
    for position, client in enumerate(clients):
        examples = dataset.load(client, "train")
        count = dataset.num_examples(client, "train")
        assert len(examples.y) == count == stacked.num_examples[position] == stacked.mask[position].sum()
        np.testing.assert_array_equal(stacked.x[position, :count], examples.x)
        np.testing.assert_array_equal(stacked.y[position, :count], examples.y)
        assert not stacked.x[position, count:].any() and not stacked.y[position, count:].any()
    assert dataset.stack([], "train").x.shape == (0, 0, 8, 8, 1)


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


def test_other_version_and_damaged_manifest(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": 3}))
    with pytest.raises(DataError, match="format version 2"):
        ClientDataset.open(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="unreadable manifest"):
        ClientDataset.open(copy)
    (copy / "manifest.json").write_text(json.dumps({"format_version": 2}))
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
        dataset.stack(dataset.client_ids, "validation")
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


def test_framing_is_tensorflows(tmp_path):
    import tensorflow as tf

    payloads = [b"", b"one", bytes(1000)]
    path = tmp_path / "records"
    path.write_bytes(b"".join(map(tfrecord.frame, payloads)))
    assert list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()) == payloads
    assert tfrecord.unframe(path.read_bytes(), "records") == payloads
