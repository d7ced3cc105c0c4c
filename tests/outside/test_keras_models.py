"""Keras models in a folder outside of the package: trained with privacy, exported, and answering as Keras would."""

import csv
import json
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
import yaml

from tests.places import ROOT
from tff_pdp import testing
from tff_pdp.cli import main
from tff_pdp.experiment.build import experiment_engine
from tff_pdp.experiment.config import load_experiment
from tff_pdp.personal_models.model_card import exported_ids
from tff_pdp.personal_models.trained_clients import trained_clients
from tff_pdp.training.evaluate import load_trained

BUDGETS = {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-4}
FEATURES = {"build_cnn": 25, "build_text": 5, "build_batch_norm": 5}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The folder of the modules, which is on Python's path and not part of this package."""
    shutil.copytree(ROOT / "tests" / "outside" / "my_lab", tmp_path / "lab" / "my_lab")
    monkeypatch.syspath_prepend(tmp_path / "lab")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        del sys.modules[name]


def config_file(folder, build, parallelism="loop"):
    """Three wards with a table of whole numbers below 20 each; the class is that of the first number."""
    rng = np.random.default_rng(0)
    wards = folder / "wards"
    wards.mkdir()
    for ward in range(3):
        x = rng.integers(0, 20, (30, FEATURES[build]))
        with open(wards / f"ward_{ward}.csv", "w", newline="") as file:
            csv.writer(file).writerows([["x"] * FEATURES[build] + ["class"], *([*row, int(row[0] > 9)] for row in x)])
    settings = {
        "title": "Wards of a hospital",
        "output": str(folder / "run"),
        "data": {
            "kind": "my_lab.wards:Wards",
            "input": str(wards),
            "input_shape": [FEATURES[build]],
            "num_classes": 2,
        },
        "model": {"kind": f"my_lab.keras_models:{build}", "seed": 3},
        "privacy": {"kind": "silo_example", "batch_size": 10, "clip_norm": 1.0, "budgets": BUDGETS},
        "training": {"rounds": 2, "client_parallelism": parallelism},
        "algorithms": {"mr_mtl": {"learning_rate": 0.2}},
        "export": {"algorithm": "mr_mtl", "model_name": "wards"},
    }
    file = folder / "wards.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("build", "parallelism"), [("build_cnn", "vectorized"), ("build_text", "loop")])
def test_keras_models_are_trained_exported_and_verified(lab, tmp_path, build, parallelism):
    from my_lab import keras_models

    file = config_file(tmp_path, build, parallelism)
    for command in ("prepare", "train", "evaluate", "export"):
        assert main([command, "--config", str(file)]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0
    config = load_experiment(file)
    report = json.loads((config.export_folder / "1/assets.extra/privacy_report.json").read_text())
    assert f"my_lab.keras_models:{build}" in json.dumps(report)
    method, state = load_trained(config, "mr_mtl")
    client_ids = list(method.clients.client_ids)
    x = np.stack([method.clients.load(client_id, "test").x[0] for client_id in client_ids])
    own_id = exported_ids(config)
    export = tf.saved_model.load(str(config.export_folder / "1"))
    ids = tf.constant([own_id(client_id) for client_id in client_ids])
    answers = export.signatures["serving_default"](client_id=ids, x=tf.constant(x))["probabilities"]
    keras = getattr(keras_models, build)((FEATURES[build],), 2)
    with experiment_engine(config):
        trained = trained_clients(method, state).weights_by_id()
    initial = method.model.init(0)
    for place, client_id in enumerate(client_ids):
        weights = trained[client_id]
        assert list(weights) == list(initial)
        assert any(not np.array_equal(weights[name], initial[name]) for name in initial)
        keras.set_weights([np.asarray(value) for value in weights.values()])
        own = keras(x[place : place + 1], training=False)
        expected = own if build == "build_cnn" else tf.nn.softmax(own)
        np.testing.assert_allclose(answers[place], expected[0], atol=1e-6)


def test_a_model_with_batch_normalisation_is_refused_before_anything_is_spent(lab, tmp_path, capsys):
    file = config_file(tmp_path, "build_batch_norm")
    assert main(["prepare", "--config", str(file)]) == 0
    assert main(["train", "--config", str(file)]) != 0
    told = capsys.readouterr().err
    assert "'after_dense' (BatchNormalization)" in told and "LayerNormalization" in told
    assert not (tmp_path / "run" / "mr_mtl").exists()


def test_they_meet_the_contract(lab):
    from my_lab.keras_models import build_cnn, build_text

    from tff_pdp.models import from_keras

    for build in (build_cnn, build_text):
        features = FEATURES[build.__name__]
        keras = build((features,), 2)
        testing.check_model(lambda _, classes, keras=keras: from_keras(keras, classes), (features,), 2)
