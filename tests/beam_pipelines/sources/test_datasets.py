"""Raw data by name: from an experiment's settings to its client dataset, and arguments that are refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import DataConfig
from beam_pipelines.sources.leaf import leaf_images
from beam_pipelines.sources.partition import write_digits_leaf
from beam_pipelines.sources.silo_arrays import SiloArrays, write_silo_arrays
from tests.beam_pipelines.sources.raw_images import (
    write_cifar10,
    write_cifar100,
    write_emnist,
    write_mnist,
    write_writers,
)
from tff_pdp.cli import RAW_DATA
from tff_pdp.data.manifest import Tally
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.registry import DATASETS

ROTATED = {
    "source": "rotated_mnist",
    "input_shape": [4, 4, 1],
    "num_classes": 10,
    "validation_fraction": 0.25,
    "exact_split": True,
}
POOLED = {"source": "partitioned_images", "validation_fraction": 0.0, "min_examples_per_client": 1}
CLASSES = {"images": "cifar10", "partition": "classes", "num_clients": 4, "classes_per_client": 5}
UNIFORM = {"images": "mnist", "partition": "uniform", "num_clients": 8}
PARTITIONED = {**POOLED, "input_shape": [4, 4, 1], "num_classes": 10, "arguments": UNIFORM}
CIFAR = {**POOLED, "input_shape": [32, 32, 3], "num_classes": 10, "arguments": CLASSES}


def test_rotated_mnist(prepare, tmp_path):
    write_mnist(tmp_path / "raw", train=400, test=100)
    arguments = {"num_silos": 8, "mask_fraction": 0.25, "train_per_silo": 40, "test_per_silo": 10}
    dataset = prepare(**ROTATED, seed=3, arguments=arguments)
    manifest = dataset.manifest
    assert set(manifest.clients) == set(manifest.parameters["rotation_groups"])
    assert sorted(manifest.parameters["rotation_groups"].values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(counts == {"train": 30, "validation": 10, "test": 10} for counts in manifest.clients.values())
    expected = {"source": "rotated_mnist", "num_silos": 8, "mask_fraction": 0.25, "test_fraction": None, "seed": 3}
    assert expected.items() <= manifest.parameters.items()
    assert [file["name"] for file in manifest.parameters["origin"]][2] == "t10k-images-idx3-ubyte.gz"
    for client in dataset.client_ids:
        examples = [dataset.load(client, split) for split in ("train", "validation", "test")]
        masked = [(part.x == 1).all(axis=0) for part in examples]
        assert (masked[0] == masked[1]).all() and (masked[0] == masked[2]).all()
        # Image i is filled with i modulo 200, and its label is i modulo 10.
        for part in examples:
            values = np.where(masked[0], np.nan, part.x).reshape(len(part.y), -1)
            values = values[:, ~np.isnan(values[0])] * 255
            assert values.size == 0 or (np.round(values) % 10 == part.y[:, np.newaxis]).all()
    again = prepare(**ROTATED, seed=3, arguments=arguments)
    assert again.manifest == manifest
    assert prepare(**ROTATED, seed=4, arguments=arguments).manifest.shards != manifest.shards


def test_cifar10_by_classes(prepare, tmp_path):
    _, train, _ = write_cifar10(tmp_path / "raw", train=(100, 200), test=100)
    dataset = prepare(**CIFAR)
    assert dataset.manifest.num_examples == {"train": 300, "validation": 0, "test": 100}
    images = np.concatenate([dataset.load(client, "train").x for client in dataset.client_ids])
    assert {image.tobytes() for image in images} == {(image / np.float32(255)).tobytes() for image in train}
    for client in dataset.client_ids:
        labels = [set(dataset.load(client, split).y.tolist()) for split in ("train", "test")]
        assert len(labels[0]) == 5 and labels[0] == labels[1]
    expected = {"source": "partitioned_images", **CLASSES, "concentration": None, "shrink": 1, "test_fraction": None}
    assert expected.items() <= dataset.manifest.parameters.items()


def test_other_pooled_images(prepare, tmp_path):
    uniform = {"partition": "uniform", "num_clients": 5}
    write_cifar100(tmp_path / "raw")
    dataset = prepare(**POOLED, input_shape=[32, 32, 3], num_classes=100, arguments={**uniform, "images": "cifar100"})
    assert all(counts == {"train": 40, "validation": 0, "test": 20} for counts in dataset.manifest.clients.values())
    write_mnist(tmp_path / "raw", train=50, test=10)
    shrunk = {"input_shape": [2, 2, 1], "arguments": {**uniform, "images": "mnist", "shrink": 2}}
    dataset = prepare(**POOLED, num_classes=10, **shrunk)
    images = np.concatenate([dataset.load(client, "train").x for client in dataset.client_ids])
    assert sorted(np.rint(images[:, 0, 0, 0] * 255)) == list(range(50))
    write_emnist(tmp_path / "raw", "letters", np.zeros((52, 4, 4)), np.arange(52) % 26 + 1)
    dirichlet = {"images": "emnist", "partition": "dirichlet", "num_clients": 4, "concentration": 0.5}
    dataset = prepare(**POOLED, input_shape=[4, 4, 1], num_classes=26, arguments=dirichlet)
    labels = np.concatenate([dataset.load(client, "test").y for client in dataset.client_ids])
    assert sorted(labels) == sorted([*range(26)] * 2)


def test_mnist_writers(prepare, tmp_path):
    folder = write_mnist(tmp_path / "raw", train=60, test=10)
    table = write_writers(tmp_path / "elsewhere.gz", np.arange(60) % 10, np.arange(60) // 20)
    dataset = prepare(
        source="mnist_writers",
        input_shape=[4, 4, 1],
        num_classes=10,
        arguments={"writers": str(table)},
        exact_split=True,
        test_fraction=0.25,
    )
    split = {"train": 11, "validation": 4, "test": 5}
    assert dataset.manifest.clients == {f"writer_000{number}": split for number in range(3)}
    images = np.concatenate([dataset.load("writer_0001", split).x for split in ("train", "validation", "test")])
    assert sorted(np.rint(images[:, 0, 0, 0] * 255)) == list(range(20, 40))
    assert dataset.manifest.parameters["test_fraction"] == 0.25
    names = [file["name"] for file in dataset.manifest.parameters["origin"]]
    assert names == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "elsewhere.gz"]
    (folder / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(ConfigError, match=r"and 62; mnist_writers has \[2, 2, 1\] and 10"):
        prepare(source="mnist_writers", input_shape=[2, 2, 1], arguments={"writers": str(table), "shrink": 2})


def test_silo_files_of_a_regression(prepare, tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    write_silo_arrays(tmp_path / "raw" / "silos.npz", [SiloArrays("a", x, np.arange(1.0, 21.0))])
    dataset = prepare(
        source="silo_files",
        input_shape=[2],
        num_classes=0,
        test_fraction=0.25,
        validation_fraction=0.0,
        exact_split=True,
        arguments={"label_shift": -1, "label_scale": 0.5},
    )
    assert dataset.manifest.clients == {"a": {"train": 15, "validation": 0, "test": 5}}
    for split in ("train", "test"):
        examples = dataset.load("a", split)
        np.testing.assert_array_equal(examples.y, examples.x[:, 0] / 4)


def test_leaf_is_the_default(prepare, tmp_path):
    write_digits_leaf(tmp_path / "raw", num_clients=3, concentration=1.0, seed=0)
    dataset = prepare(input_shape=[8, 8, 1], num_classes=10)
    assert dataset.manifest.kept.examples == 1797 and dataset.manifest.parameters["source"] == "leaf"


def test_leaf_with_train_and_test(prepare, tmp_path):
    for side in ("train", "test"):
        write_digits_leaf(tmp_path / "raw" / side, num_clients=3, concentration=1.0, seed=0)
    manifest = prepare(input_shape=[8, 8, 1], num_classes=10, validation_fraction=0.0).manifest
    assert manifest.num_examples == {"train": 1797, "validation": 0, "test": 1797} and len(manifest.clients) == 3


def test_nist_sd19(prepare, tmp_path):
    for number in range(12):
        for place in (f"by_class/{30 + number % 10}/hsf_0", f"by_write/hsf_0/f000{number % 2}_14/d000{number % 2}_14"):
            path = tmp_path / "raw" / place / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((128, 128), number, np.uint8)).save(path)
    data = {"source": "nist_sd19", "num_classes": 10, "min_examples_per_client": 1}
    manifest = prepare(**data, arguments={"classes": "digits"}).manifest
    assert manifest.read == manifest.kept == Tally(2, 12) and set(manifest.clients) == {"f0000_14", "f0001_14"}
    with pytest.raises(ConfigError, match=r"and 10; nist_sd19 has \[28, 28, 1\] and 62"):
        prepare(**data)


def test_a_source_may_have_a_job_of_its_own(prepare, tmp_path, monkeypatch):
    write_digits_leaf(tmp_path / "raw", num_clients=3, concentration=1.0, seed=0)
    asked = []

    class OneClient:
        def run(self, options):
            asked.append(options)
            return run_client_dataset_job(leaf_images(tmp_path / "raw"), options)

    def build_one_client(data: DataConfig, workspace: Path, *, name: str) -> OneClient:
        return OneClient()

    monkeypatch.setitem(DATASETS, "one_client", build_one_client)
    dataset = prepare(source="one_client", input_shape=[8, 8, 1], num_classes=10, seed=7, arguments={"name": "a"})
    assert dataset.manifest.kept.examples == 1797
    assert (asked[0].seed, asked[0].num_classes, asked[0].overwrite) == (7, 10, True)
    with pytest.raises(ConfigError, match=r"unknown key 'data\.arguments\.size'"):
        prepare(source="one_client", arguments={"name": "a", "size": 1})


def test_the_command_line_names_every_kind_of_raw_data():
    named = [line.split()[0] for line in RAW_DATA.splitlines() if line.startswith("  ")]
    assert named == list(DATASETS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "mnist"}, "data.source: 'mnist' is not known; known: celeba, .*fed_emnist, leaf, "),
        (
            {**ROTATED, "arguments": {"num_silo": 8}},
            "source 'rotated_mnist': unknown key 'data.num_silo'; did you mean 'num_silos'",
        ),
        ({"arguments": {"num_silos": 8}}, "source 'leaf': unknown key 'data.num_silos'; known keys: none"),
        ({**ROTATED, "arguments": {"num_silos": "8"}}, "'data.num_silos' must be a int, not '8'"),
        ({**ROTATED, "arguments": {"num_silos": 7}}, "num_silos 7 must be a multiple of num_rotations 4"),
        ({**ROTATED, "num_classes": 62}, r"are \[4, 4, 1\] and 62; rotated_mnist has \[4, 4, 1\] and 10"),
        ({**ROTATED, "input_shape": [16]}, r"are \[16\] and 10; rotated_mnist has \[4, 4, 1\] and 10"),
        ({**PARTITIONED, "input_shape": [1, 4, 4]}, r"partitioned_images has \[4, 4, 1\] and 10"),
        ({**PARTITIONED, "arguments": {**UNIFORM, "num_clients": 401}}, "400 training images cannot be divided"),
        ({**PARTITIONED, "arguments": {**UNIFORM, "shrink": 3}}, "shrink 3 does not divide images of 4 x 4 pixels"),
        ({**PARTITIONED, "arguments": {**UNIFORM, "concentration": 1}}, "uniform does not take concentration"),
        (
            {**PARTITIONED, "arguments": {**UNIFORM, "images": "svhn"}},
            "images: 'svhn' is not known; known: cifar10, cifar100, mnist, emnist",
        ),
        ({**PARTITIONED, "arguments": {"images": "mnist"}}, "missing key 'data.partition'"),
        ({"source": "fed_emnist", "num_classes": 47}, r"is 47; fed_emnist has 10 \(digits\) or 62"),
        ({"source": "fed_emnist", "num_classes": 10, "input_shape": [28, 28]}, r"fed_emnist has \[28, 28, 1\] and 10"),
        ({"source": "silo_files", "arguments": {"label_scale": 0.1}}, "set data.num_classes to 0"),
        (
            {"source": "silo_files", "num_classes": 0, "arguments": {"label_scale": 0}},
            "finite, the scale not 0",
        ),
        ({"exact_split": 1}, "'data.exact_split' must be a bool, not 1"),
    ],
)
def test_settings_that_do_not_fit(prepare, tmp_path, data, message):
    write_mnist(tmp_path / "raw", train=400, test=100)
    with pytest.raises(ConfigError, match=message):
        prepare(**data)
    assert not (tmp_path / "run").exists()


def test_options_are_judged_before_the_input_is_read(prepare):
    with pytest.raises(DataError, match="must leave room for train"):
        prepare(**ROTATED, test_fraction=0.8)
