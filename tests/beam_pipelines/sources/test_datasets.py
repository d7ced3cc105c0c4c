"""Raw data by name: from an experiment's settings to its client dataset, and arguments that are refused."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import SourceSettings
from beam_pipelines.sources.divided import Uniform
from beam_pipelines.sources.leaf import leaf_raw_data, read_users
from beam_pipelines.sources.partition import write_digits_leaf
from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from tests.beam_pipelines.sources.raw_images import (
    write_cifar10,
    write_cifar100,
    write_emnist,
    write_mnist,
    write_writers,
)
from tff_pdp.commands.experiment import Prepare
from tff_pdp.data.manifest import Tally
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.kinds import SOURCES
from tff_pdp.settings import Name

ROTATED = {
    "kind": "rotated_mnist",
    "input_shape": [4, 4, 1],
    "num_classes": 10,
    "validation_fraction": 0.25,
    "exact_split": True,
}
POOLED = {"kind": "partitioned_images", "validation_fraction": 0.0, "min_examples_per_client": 1}
CLASSES = {"num_clients": 4, "classes_per_client": 5}
UNIFORM = {"kind": "uniform", "num_clients": 8}
PARTITIONED = {**POOLED, "input_shape": [4, 4, 1], "num_classes": 10, "images": "mnist", "partition": UNIFORM}
SHARDS = {"kind": "shards", "num_clients": 4, "shards_per_client": 2}
UNEQUAL = {"kind": "dirichlet_unequal", "num_clients": 4, "concentration": 0.5}
# Ten classes need not be stated.
FASHION = {"kind": "fashion_mnist", "input_shape": [4, 4, 1], "validation_fraction": 0.0, "partition": SHARDS}
CIFAR = {
    **POOLED,
    "input_shape": [32, 32, 3],
    "num_classes": 10,
    "images": "cifar10",
    "partition": {"kind": "classes", **CLASSES},
}


def test_rotated_mnist(prepare, tmp_path):
    write_mnist(tmp_path / "raw", train=400, test=100)
    rotated = {**ROTATED, "num_silos": 8, "mask_fraction": 0.25, "train_per_silo": 40, "test_per_silo": 10}
    dataset = prepare(**rotated, seed=3)
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
    again = prepare(**rotated, seed=3)
    assert again.manifest == manifest
    assert prepare(**rotated, seed=4).manifest.shards != manifest.shards


def test_cifar10_by_classes(prepare, tmp_path):
    _, train, _ = write_cifar10(tmp_path / "raw", train=(100, 200), test=100)
    dataset = prepare(**CIFAR)
    assert dataset.manifest.num_examples == {"train": 300, "validation": 0, "test": 100}
    images = np.concatenate([dataset.load(client, "train").x for client in dataset.client_ids])
    assert {image.tobytes() for image in images} == {(image / np.float32(255)).tobytes() for image in train}
    for client in dataset.client_ids:
        labels = [set(dataset.load(client, split).y.tolist()) for split in ("train", "test")]
        assert len(labels[0]) == 5 and labels[0] == labels[1]
    expected = {"source": "partitioned_images", "images": "cifar10", "partition": "classes", **CLASSES}
    expected |= {"concentration": None, "shrink": 1, "test_fraction": None}
    assert expected.items() <= dataset.manifest.parameters.items()


def test_other_pooled_images(prepare, tmp_path):
    uniform = {**POOLED, "partition": {"kind": "uniform", "num_clients": 5}}
    write_cifar100(tmp_path / "raw")
    dataset = prepare(**uniform, input_shape=[32, 32, 3], num_classes=100, images="cifar100")
    assert all(counts == {"train": 40, "validation": 0, "test": 20} for counts in dataset.manifest.clients.values())
    write_mnist(tmp_path / "raw", train=50, test=10)
    dataset = prepare(**uniform, num_classes=10, input_shape=[2, 2, 1], images="mnist", shrink=2)
    images = np.concatenate([dataset.load(client, "train").x for client in dataset.client_ids])
    assert sorted(np.rint(images[:, 0, 0, 0] * 255)) == list(range(50))
    write_emnist(tmp_path / "raw", "letters", np.zeros((52, 4, 4)), np.arange(52) % 26 + 1)
    dirichlet = {"kind": "dirichlet", "num_clients": 4, "concentration": 0.5}
    dataset = prepare(**POOLED, input_shape=[4, 4, 1], num_classes=26, images="emnist", partition=dirichlet)
    labels = np.concatenate([dataset.load(client, "test").y for client in dataset.client_ids])
    assert sorted(labels) == sorted([*range(26)] * 2)


def test_fashion_mnist_in_shards_with_official_test_images_for_all(prepare, tmp_path):
    write_mnist(tmp_path / "raw", train=400, test=101)
    dataset = prepare(**FASHION, images_per_client=60, test_partition="uniform")
    counts = list(dataset.manifest.clients.values())
    assert [count["train"] for count in counts] == [60] * 4 and not any(count["validation"] for count in counts)
    assert sorted(count["test"] for count in counts) == [25, 25, 25, 26]
    expected = {"source": "fashion_mnist", "partition": "shards", "shards_per_client": 2, "test_fraction": None}
    expected |= {"images_per_client": 60, "test_partition": "uniform", "classes_per_client": None}
    assert expected.items() <= dataset.manifest.parameters.items()
    # Image i has label i modulo 10.
    for client in dataset.client_ids:
        for split in ("train", "test"):
            part = dataset.load(client, split)
            assert (np.rint(part.x[:, 0, 0, 0] * 255) % 10 == part.y).all()
    # Eight shards of ten classes: none has more than three.
    assert all(len(set(dataset.load(client, "train").y)) <= 6 for client in dataset.client_ids)


def test_a_part_of_the_images_in_unequal_shares(prepare, tmp_path):
    write_mnist(tmp_path / "raw", train=400, test=100)
    dataset = prepare(**{**FASHION, "partition": {**UNEQUAL, "min_images": 1}}, training_images=150)
    assert dataset.manifest.num_examples == {"train": 150, "validation": 0, "test": 100}
    assert dataset.manifest.parameters["training_images"] == 150


def test_settings_at_their_defaults_leave_manifests_as_they_were(prepare, tmp_path):
    write_mnist(tmp_path / "raw", train=400, test=100)
    recorded = prepare(**PARTITIONED).manifest.parameters
    assert not {"images_per_client", "training_images", "test_partition", "shards_per_client", "min_images"} & set(
        recorded
    )


def test_without_the_package_of_fashion_mnist(prepare, tmp_path):
    with pytest.raises(
        DataError, match=r"raw: no train-images-idx3-ubyte\.gz, .*; install Debian's package dataset-fa"
    ):
        prepare(**FASHION)
    kind = SOURCES.find("fashion_mnist")
    assert kind(kind="fashion_mnist", partition=Uniform(num_clients=2)).input == "/usr/share/datasets/fashion-mnist"


def test_mnist_writers(prepare, tmp_path):
    folder = write_mnist(tmp_path / "raw", train=60, test=10)
    table = write_writers(tmp_path / "elsewhere.gz", np.arange(60) % 10, np.arange(60) // 20)
    dataset = prepare(
        kind="mnist_writers",
        input_shape=[4, 4, 1],
        num_classes=10,
        writers=str(table),
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
        prepare(kind="mnist_writers", input_shape=[2, 2, 1], writers=str(table), shrink=2)


def test_silo_files_of_a_regression(prepare, tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    write_silo_arrays(tmp_path / "raw" / "silos.npz", [SiloArrays("a", x, np.arange(1.0, 21.0))])
    dataset = prepare(
        kind="silo_files",
        input_shape=[2],
        num_classes=0,
        test_fraction=0.25,
        validation_fraction=0.0,
        exact_split=True,
        label_shift=-1,
        label_scale=0.5,
    )
    assert dataset.manifest.clients == {"a": {"train": 15, "validation": 0, "test": 5}}
    for split in ("train", "test"):
        examples = dataset.load("a", split)
        np.testing.assert_array_equal(examples.y, examples.x[:, 0] / 4)


def test_leaf(prepare, tmp_path):
    write_digits_leaf(tmp_path / "raw", num_clients=3, concentration=1.0, seed=0)
    dataset = prepare(kind="leaf", input_shape=[8, 8, 1], num_classes=10)
    assert dataset.manifest.kept.examples == 1797 and dataset.manifest.parameters["source"] == "leaf"


def test_leaf_with_train_and_test(prepare, tmp_path):
    for side in ("train", "test"):
        write_digits_leaf(tmp_path / "raw" / side, num_clients=3, concentration=1.0, seed=0)
    manifest = prepare(kind="leaf", input_shape=[8, 8, 1], num_classes=10, validation_fraction=0.0).manifest
    assert manifest.num_examples == {"train": 1797, "validation": 0, "test": 1797} and len(manifest.clients) == 3


def test_nist_sd19(prepare, tmp_path):
    for number in range(12):
        for place in (f"by_class/{30 + number % 10}/hsf_0", f"by_write/hsf_0/f000{number % 2}_14/d000{number % 2}_14"):
            path = tmp_path / "raw" / place / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((128, 128), number, np.uint8)).save(path)
    data = {"kind": "nist_sd19", "num_classes": 10, "min_examples_per_client": 1}
    manifest = prepare(**data, classes="digits").manifest
    assert manifest.read == manifest.kept == Tally(2, 12) and set(manifest.clients) == {"f0000_14", "f0001_14"}
    with pytest.raises(ConfigError, match=r"and 10; nist_sd19 has \[28, 28, 1\] and 62"):
        prepare(**data)


class OneClient(SourceSettings):
    """A kind from outside, which has a job of its own."""

    name: Name

    def build(self, workspace: Path) -> "OneClient":
        return self

    def run(self, options):
        asked.append((self.name, options))
        return run_client_dataset_job(leaf_raw_data("leaf", Path(self.input), read_users), options)


asked = []


def test_a_source_may_have_a_job_of_its_own(prepare, tmp_path):
    write_digits_leaf(tmp_path / "raw", num_clients=3, concentration=1.0, seed=0)
    asked.clear()
    kind = f"{__name__}:OneClient"
    dataset = prepare(kind=kind, input_shape=[8, 8, 1], num_classes=10, seed=7, name="a")
    assert dataset.manifest.kept.examples == 1797
    ((name, options),) = asked
    assert (name, options.seed, options.num_classes, options.overwrite) == ("a", 7, 10, True)
    with pytest.raises(ConfigError, match=r"unknown key data\.size"):
        prepare(kind=kind, name="a", size=1)
    with pytest.raises(ConfigError, match=r"missing key data\.name: text that is not empty"):
        prepare(kind=kind)


def test_the_command_line_names_every_kind_of_raw_data():
    named = re.findall(r"^      (\w+) {4,}", Prepare.__doc__, re.MULTILINE)
    assert named == list(SOURCES.own)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "svhn"}, "data.kind: unknown kind 'svhn'; known: celeba, .*fed_emnist, leaf, "),
        ({"kind": "rotated_mnits"}, r"data.kind: unknown kind 'rotated_mnits'; did you mean rotated_mnist\?"),
        ({}, "missing key data.kind: one of leaf, silo_files, .*, simulated_outbreak, or module:name"),
        ({"kind": 3}, "data.kind must be text that is not empty, not 3"),
        ({**ROTATED, "num_silo": 8}, r"unknown key data.num_silo; did you mean num_silos\?"),
        ({"kind": "leaf", "num_silos": 8}, "unknown key data.num_silos; "),
        ({**ROTATED, "num_silos": "8"}, "data.num_silos must be a whole number of at least 1, not '8'"),
        ({**ROTATED, "num_silos": 7}, "num_silos 7 must be a multiple of num_rotations 4"),
        ({**ROTATED, "source": "leaf"}, "the key data.source is now data.kind"),
        ({**ROTATED, "arguments": {"num_silos": 8}}, "the key data.arguments is now the options of data.kind, which"),
        ({**ROTATED, "num_classes": 62}, r"are \[4, 4, 1\] and 62; rotated_mnist has \[4, 4, 1\] and 10"),
        ({**ROTATED, "input_shape": [16]}, r"are \[16\] and 10; rotated_mnist has \[4, 4, 1\] and 10"),
        ({**PARTITIONED, "input_shape": [1, 4, 4]}, r"partitioned_images has \[4, 4, 1\] and 10"),
        ({**PARTITIONED, "partition": {**UNIFORM, "num_clients": 401}}, "400 training images cannot be divided"),
        ({**PARTITIONED, "shrink": 3}, "shrink 3 does not divide images of 4 x 4 pixels"),
        ({**PARTITIONED, "partition": {**UNIFORM, "concentration": 1}}, "unknown key data.partition.concentration"),
        (
            {**PARTITIONED, "images": "svhn"},
            "data.images must be one of cifar10, cifar100, emnist, mnist, not 'svhn'",
        ),
        (
            {**POOLED, "images": "mnist"},
            "missing key data.partition: a mapping whose kind is one of classes, dirichlet, dirichlet_unequal, shards, "
            "uniform",
        ),
        (
            {**PARTITIONED, "partition": SHARDS, "images_per_client": 15},
            r"data: images_per_client 15 must be a multiple of partition.shards_per_client 2, so that",
        ),
        (
            {**PARTITIONED, "partition": {"kind": "classes", **CLASSES}, "images_per_client": 10},
            "data: images_per_client 10 needs clients of equal size, which partition classes does not make; leave out",
        ),
        (
            {**FASHION, "partition": UNEQUAL, "images_per_client": 10},
            "data: images_per_client 10 needs clients of equal size, which partition dirichlet_unequal does not make",
        ),
        (
            {**PARTITIONED, "partition": SHARDS, "training_images": 100},
            "data: training_images 100 is for clients of unequal size; partition shards makes clients of equal size: ",
        ),
        ({**FASHION, "images_per_client": 102}, "data.images_per_client: 4 clients with 102 images each need 408 "),
        (
            {**FASHION, "images_per_client": 0},
            "data.images_per_client must be a whole number of at least 1, or nothing",
        ),
        ({**PARTITIONED, "test_partition": "all"}, "data.test_partition must be one of same, uniform, not 'all'"),
        ({**FASHION, "images": "mnist"}, "unknown key data.images; known: exact_split"),
        ({**FASHION, "input_shape": [28, 28, 1]}, r"and 10; fashion_mnist has \[4, 4, 1\] and 10"),
        ({"kind": "fed_emnist", "num_classes": 47}, r"is 47; fed_emnist has 10 \(digits\) or 62"),
        ({"kind": "fed_emnist", "num_classes": 10, "input_shape": [28, 28]}, r"fed_emnist has \[28, 28, 1\] and 10"),
        ({"kind": "silo_files", "label_scale": 0.1}, "data: label_shift and .* regressions only; num_classes 0"),
        ({"kind": "silo_files", "num_classes": 0, "label_scale": 0}, "data: label_scale must not be 0"),
        (
            {"kind": "silo_files", "num_classes": 0, "label_shift": float("inf")},
            "data.label_shift must be a number that is finite, not inf",
        ),
        ({"kind": "leaf", "exact_split": 1}, "data.exact_split must be true or false, not 1"),
    ],
)
def test_settings_that_do_not_fit(prepare, tmp_path, data, message):
    write_mnist(tmp_path / "raw", train=400, test=100)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(**data)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_options_are_judged_before_the_input_is_read(prepare):
    with pytest.raises(ConfigError, match=r"data: validation_fraction \+ test_fraction must be below 1"):
        prepare(**ROTATED, test_fraction=0.8)
