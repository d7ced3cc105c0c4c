"""Raw data by name: from an experiment's settings to its client dataset, and arguments that are refused."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.data.raw_images import write_cifar10, write_mnist
from tff_pdp.cli import RAW_DATA
from tff_pdp.config import load_config
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.silo_arrays import SiloArrays, write_silo_arrays
from tff_pdp.data.sources import write_digits_leaf
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.registry import DATASETS
from tff_pdp.runtime.prepare import prepare_clients

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def prepare(tmp_path):
    def run(**data):
        content = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
        content |= {"output": str(tmp_path / "run"), "data": {"input": str(tmp_path / "raw"), **data}}
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(content))
        summary = prepare_clients(load_config(path), overwrite=True)
        return ClientDataset.open(summary.output, verify=True)

    return run


ROTATED = {
    "source": "rotated_mnist",
    "input_shape": [4, 4, 1],
    "num_classes": 10,
    "validation_fraction": 0.25,
    "exact_split": True,
}
CIFAR = {"source": "heterogeneous_cifar10", "input_shape": [32, 32, 3], "num_classes": 10}


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


def test_heterogeneous_cifar10(prepare, tmp_path):
    _, train, _ = write_cifar10(tmp_path / "raw", train=(100, 200), test=100)
    dataset = prepare(**CIFAR, arguments={"num_silos": 4}, validation_fraction=0.0, min_examples_per_client=1)
    assert dataset.manifest.num_examples == {"train": 300, "validation": 0, "test": 100}
    images = np.concatenate([dataset.load(client, "train").x for client in dataset.client_ids])
    assert {image.tobytes() for image in images} == {(image / np.float32(255)).tobytes() for image in train}
    for client in dataset.client_ids:
        labels = [set(dataset.load(client, split).y.tolist()) for split in ("train", "test")]
        assert len(labels[0]) == 5 and labels[0] == labels[1]


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


def test_the_command_line_names_every_kind_of_raw_data():
    named = [line.split()[0] for line in RAW_DATA.splitlines() if line.startswith("  ")]
    assert named == list(DATASETS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "mnist"}, "data.source: 'mnist' is not known; known: heterogeneous_cifar10, leaf, "),
        (
            {**ROTATED, "arguments": {"num_silo": 8}},
            "source 'rotated_mnist': unknown key 'data.arguments.num_silo'; did you mean 'num_silos'",
        ),
        ({"arguments": {"num_silos": 8}}, "source 'leaf': unknown key 'data.arguments.num_silos'; known keys: none"),
        ({**ROTATED, "arguments": {"num_silos": "8"}}, "'data.arguments.num_silos' must be a int, not '8'"),
        ({**ROTATED, "arguments": {"num_silos": 7}}, "num_silos 7 must be a multiple of num_rotations 4"),
        ({**ROTATED, "num_classes": 62}, r"are \[4, 4, 1\] and 62; rotated_mnist has \[4, 4, 1\] and 10"),
        ({**ROTATED, "input_shape": [16]}, r"are \[16\] and 10; rotated_mnist has \[4, 4, 1\] and 10"),
        ({**CIFAR, "input_shape": [3, 32, 32]}, r"heterogeneous_cifar10 has \[32, 32, 3\] and 10"),
        ({**CIFAR, "arguments": {"num_silos": 3}}, "3 silos with 5 of 10 classes"),
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
