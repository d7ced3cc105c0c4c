"""Datasets of TensorFlow Datasets from prepared files to trained models, and back to TensorFlow Datasets."""

import collections

import pytest
import tensorflow_datasets as tfds

from tests.beam_pipelines.sources.built_tfds import Letters, Portraits, build
from tests.places import DEMO
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.training.evaluate import evaluate_experiment
from tff_pdp.training.train import train

pytestmark = pytest.mark.all

LETTERS = {"input": "letters", "input_shape": [4, 4, 1], "num_classes": 4, "test_split": "test"}
PORTRAITS = {"input": "portraits", "input_shape": [5, 5, 3], "num_classes": 2, "label": "attributes/Smiling"}
DIRICHLET = {"kind": "dirichlet", "num_clients": 3, "concentration": 1.0}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    for kind in (Letters, Portraits):
        build(kind, folder)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("data", "partition", "num_clients"),
    [
        (LETTERS, {"kind": "feature", "client_feature": "writer"}, 3),
        (LETTERS, DIRICHLET, 3),
        (PORTRAITS, {"kind": "feature", "client_feature": "person"}, 2),
        (PORTRAITS, DIRICHLET, 3),
    ],
    ids=["letters by writer", "letters by Dirichlet", "portraits by person", "portraits by Dirichlet"],
)
def test_prepared_trained_and_read_again(data_dir, tmp_path, data, partition, num_clients):
    settings = {
        "output": str(tmp_path / "run"),
        "data": {"kind": "tfds", "data_dir": str(data_dir), "partition": partition, "tfds_copy": True, **data},
        "privacy.batch_size": 4,
        "privacy.budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-2},
        "training.rounds": 2,
        "training.client_parallelism": "loop",
        "algorithms": {"mr_mtl": {"learning_rate": 0.1, "local_steps": 1, "prox_weight": 1.0}},
        "tuning": {},
    }
    config = load_experiment(DEMO, settings)
    summary = prepare_clients(config)
    train(config, "mr_mtl", progress=False)
    result = evaluate_experiment(config)
    assert len(result["silos"]) == num_clients
    assert all(0 < silo["epsilon_spent"] <= 8 for silo in result["silos"])
    assert 0 <= result["algorithms"]["mr_mtl"]["mean"] <= 1

    dataset = ClientDataset.open(summary.output, verify=True)
    builder = tfds.builder_from_directory(summary.output / "tfds")
    for split in ("train", "validation", "test"):
        counts = collections.Counter(
            example["client_id"].decode() for example in tfds.as_numpy(builder.as_dataset(split=split))
        )
        assert dict(counts) == {
            client: numbers[split] for client, numbers in dataset.manifest.clients.items() if numbers[split]
        }
    # Preparing again skips both.
    assert prepare_clients(config).skipped
