"""A model, a method and a source in a folder outside of the package, from raw data to a served answer."""

import csv
import dataclasses
import importlib
import json
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
import yaml

import tff_pdp.algorithms.whole_models.pfedme as method_module
from serving.client.rest_client import RestClient
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.places import ROOT
from tff_pdp import testing
from tff_pdp.cli import main
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.kinds import MODELS, PLANS
from tff_pdp.personal_models.model_card import exported_ids
from tff_pdp.training.evaluate import load_trained

WARDS, ROWS, FEATURES = 4, 40, 3
BUDGETS = {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-4}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The folder of the modules, which is on Python's path and not part of this package."""
    shutil.copytree(ROOT / "tests" / "outside" / "my_lab", tmp_path / "lab" / "my_lab")
    shutil.copy(method_module.__file__, tmp_path / "lab" / "my_lab" / "methods.py")
    monkeypatch.syspath_prepend(tmp_path / "lab")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        del sys.modules[name]


@pytest.fixture
def wards(tmp_path):
    rng = np.random.default_rng(1)
    folder = tmp_path / "wards"
    folder.mkdir()
    for ward in range(WARDS):
        x = rng.normal(size=(ROWS, FEATURES))
        y = (x[:, 0] + 0.5 * ward * x[:, 1] > 0).astype(int)
        with open(folder / f"ward_{ward}.csv", "w", newline="") as file:
            csv.writer(file).writerows(
                [["a", "b", "c", "class"], *([*row, label] for row, label in zip(x, y, strict=True))]
            )
    return folder


@pytest.fixture
def config_file(tmp_path, wards):
    settings = {
        "title": "Wards of a hospital",
        "output": str(tmp_path / "run"),
        "data": {"kind": "my_lab.wards:Wards", "input": str(wards), "input_shape": [FEATURES], "num_classes": 2},
        "model": {"kind": "my_lab.models:build_gated", "width": 4},
        "privacy": {"kind": "silo_example", "batch_size": 10, "clip_norm": 1.0, "budgets": BUDGETS},
        "training": {"rounds": 3, "client_parallelism": "loop"},
        "algorithms": {"ours": {"kind": "my_lab.methods:build_pfedme", "learning_rate": 0.2, "inner_steps": 2}},
        "export": {"algorithm": "ours", "model_name": "wards"},
    }
    file = tmp_path / "wards.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.timeout(300)
def test_what_comes_from_outside_is_trained_tested_exported_and_served(lab, config_file):
    for command in ("prepare", "train", "evaluate", "export"):
        assert main([command, "--config", str(config_file)]) == 0
    config = load_experiment(config_file)
    statement = json.dumps(json.loads((config.export_folder / "1/assets.extra/privacy_report.json").read_text()))
    for place in ("my_lab.wards:Wards", "my_lab.models:build_gated", "my_lab.methods:build_pfedme"):
        assert f"defined outside of tff_pdp ({place}" in statement
    method, _ = load_trained(config, "ours")
    client_ids = list(method.clients.client_ids)
    x = np.stack([method.clients.load(client_id, "test").x[0] for client_id in client_ids])
    own_id = exported_ids(config)
    ids = [own_id(client_id) for client_id in client_ids]
    export = tf.saved_model.load(str(config.export_folder / "1"))
    with EmbeddedServer([ServedModel("wards", config.export_folder)]) as server:
        answers = RestClient(f"127.0.0.1:{server.rest_port}").predict("wards", ids, x)
    directly = export.signatures["serving_default"](client_id=tf.constant(ids), x=tf.constant(x))
    np.testing.assert_allclose(answers.answers, directly["probabilities"], rtol=1e-5)
    assert answers.personalized.all()


@pytest.mark.timeout(300)
def test_they_meet_the_contracts(lab, wards, tmp_path):
    from my_lab.methods import build_pfedme
    from my_lab.models import build_gated
    from my_lab.wards import Wards

    testing.check_algorithm(build_pfedme, inner_steps=2)
    testing.check_model(build_gated, (FEATURES,), 2, width=4)
    testing.check_model(build_gated, (2, 2), 0)
    settings = {"input": str(wards), "input_shape": [FEATURES], "num_classes": 2}
    dataset = testing.check_source(Wards, settings, tmp_path, num_clients=WARDS)
    assert set(dataset.client_ids) == {f"ward_{ward}" for ward in range(WARDS)}


# Each of our own, with what is asked of a model of its kind.
SHAPES = {
    "linear_regression": ((4,), 0),
    "linear_svm": ((4,), 2),
    "logistic_regression": ((4,), 2),
    "cnn": ((28, 28, 1), 3),
    "lenet": ((32, 32, 3), 3),
    "tutorial_cnn": ((28, 28, 1), 3),
    "resnet20": ((8, 8, 3), 3),
}


# Settings without a default.
NEEDED: dict[str, dict] = {"text": {"vocabulary_size": 5}}


@pytest.mark.parametrize("name", sorted(MODELS.own))
def test_our_own_models_meet_the_contract(name):
    shape, num_classes = SHAPES.get(name, ((4,), 3))
    testing.check_model(MODELS.find(name), shape, num_classes, **NEEDED.get(name, {}))


PRIVATE = {"batch_size": 8, "clip_norm": 1.0, "budgets": BUDGETS}
SETTINGS = {
    "silo_example": PRIVATE,
    "user": {**PRIVATE, "users_per_round": 4.0},
    "none": {"batch_size": 8, "unit": "silo"},
}


@pytest.mark.parametrize("name", sorted({*PLANS.own} - {"contact_graph"}))
def test_our_own_plans_meet_the_contract(name):
    testing.check_plan(PLANS.find(name), SETTINGS[name])


@pytest.mark.parametrize("broken", ["draws", "batch", "shape", "order"])
def test_a_model_that_breaks_the_contract_is_refused(lab, broken):
    from my_lab.models import build_gated

    def build(input_shape, num_classes):
        good = build_gated(input_shape, num_classes)
        predict = {
            "draws": lambda weights, x: good.predict(weights, x) + tf.random.normal([tf.shape(x)[0], num_classes]),
            "batch": lambda weights, x: good.predict(weights, x - tf.reduce_mean(x, axis=0, keepdims=True)),
            "shape": lambda weights, x: good.predict(weights, x)[:, :1],
            "order": good.predict,
        }[broken]
        calls = []

        def init(seed):
            calls.append(seed)
            weights = good.init(seed)
            return dict(reversed(weights.items())) if broken == "order" and len(calls) > 1 else weights

        return dataclasses.replace(good, predict=predict, init=init)

    with pytest.raises(AssertionError, match="Rule broken"):
        testing.check_model(build)


def test_a_plan_that_charges_too_little_is_refused():
    kind = PLANS.find("silo_example")

    class Cheap(kind):
        def build(self, training):
            plan = super().build(training)

            class CheapPlan(type(plan)):
                def charges(self, scope, round_number):
                    return super().charges(scope, round_number)[:0]

            return CheapPlan(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})

    with pytest.raises(AssertionError, match="charges add up to training_counts"):
        testing.check_plan(Cheap, PRIVATE)


LEAKY = """
import dataclasses
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg

def build_{name}():
    algorithm = build_fed_avg()

    def client_update(broadcast, state, data, grad_fn, hparams):
        result = algorithm.client_update(broadcast, state, data, grad_fn, hparams)
        {statement}
        return result

    return dataclasses.replace(algorithm, client_update=client_update)
"""


@pytest.mark.parametrize(
    ("name", "statement", "rule"),
    [
        (
            "undeclared",
            "result = result._replace(released={**result.released, 'size': {}})",
            "in `released`, no others",
        ),
        ("twice", "algorithm.client_update(broadcast, state, data, grad_fn, hparams)", "asked for once"),
        (
            "bare",
            "u = dict(result.released['update']); k = list(u)[0]; import tensorflow as tf; "
            "u[k] = tf.zeros_like(u[k]) + tf.reduce_sum(data.x); result = result._replace(released={'update': u})",
            "every released coordinate has noise",
        ),
    ],
)
def test_a_method_that_leaks_is_refused(lab, tmp_path, name, statement, rule):
    (tmp_path / "lab" / "my_lab" / f"{name}.py").write_text(
        LEAKY.replace("{name}", name).replace("{statement}", statement)
    )
    module = importlib.import_module(f"my_lab.{name}")
    with pytest.raises(AssertionError, match=rule):
        testing.check_algorithm(getattr(module, f"build_{name}"))
