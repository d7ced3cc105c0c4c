"""Trainings on synthetic data, then on records: what is exported, reported, served, and fitted to new silos."""

import html
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from msgspec.structs import replace

from serving.client_ids import ClientIdHash
from serving.saved_model.servable import load_servable
from tests.rounding import ELEMENTARY, gamma
from tests.training.record.whole_runs import NAMES, NUM_TRAIN, SYNTHETIC, config_of, points
from tff_pdp.cli import main
from tff_pdp.experiment.build import experiment_engine
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.new_clients.options import FitOptions
from tff_pdp.personal_models.new_clients.personalize import personalize
from tff_pdp.personal_models.trained_clients import trained_clients
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC as RELEASE
from tff_pdp.training.evaluate import evaluate_experiment, load_trained
from tff_pdp.training.train import train

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_fresh_process")]

SECTION = {**SYNTHETIC["synthetic"], "rounds": 3}
BUDGET = SYNTHETIC["budgets"]["epsilon"]
HPARAMS = {"learning_rate": 0.5, "local_steps": 2, "adaptation_learning_rate": 0.5, "adaptation_steps": 3}
METHODS = ("fed_avg", "pppfl")
OBJECTS = ("synthetic data", "shared model", "personal models")


def trained_in_phases(folder, section=SECTION, methods=METHODS):
    """An experiment whose methods have three rounds on synthetic data and two on records."""
    config = config_of(
        folder,
        {**SYNTHETIC, "synthetic": section},
        methods[0],
        **{"algorithms": dict.fromkeys(methods, HPARAMS), "training.rounds": 5},
    )
    prepare_clients(config)
    for name in methods:
        train(config, name, progress=False)
    return config


def exporting(config, name):
    """The experiment with another method to be exported, under the method's name."""
    return replace(config, export=replace(config.export, algorithm=name, model_name=name))


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """Two methods adapted by DP-SGD, and evaluated."""
    config = trained_in_phases(tmp_path_factory.mktemp("private"))
    return config, evaluate_experiment(config)


@pytest.fixture(scope="module")
def exports(private):
    """The newest version of each method's export, by name."""
    config, _ = private
    return {name: export_experiment(exporting(config, name)).version for name in METHODS}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """FedAvg adapted without clip and noise, and evaluated."""
    section = {**SECTION, "adaptation": "non_private"}
    config = trained_in_phases(tmp_path_factory.mktemp("bare"), section, ("fed_avg",))
    return config, evaluate_experiment(config)


def document(version, name):
    return json.loads((version / "assets.extra" / f"{name}.json").read_text())


def page_of(config):
    return " ".join(html.unescape((Path(config.output) / "report.html").read_text()).split())


def synthetic_epsilon(config, name="fed_avg"):
    """The largest epsilon of a silo's synthetic data alone, by their events in the ledger."""
    method, state = load_trained(config, name)
    entries = [entry for entry in state.ledger.entries if entry.reason == RELEASE]
    assert {entry.count for entry in entries} == {1}
    return max(epsilon_bounds(one.event, method.plan.budgets[one.scope].delta).best for one in entries)


@pytest.mark.parametrize("name", METHODS)
def test_an_export_answers_like_the_adapted_models(private, exports, name):
    config = private[0]
    method, state = load_trained(config, name)
    with experiment_engine(config):
        trained = trained_clients(method, state)
        weights, shared = trained.weights_by_id(), trained.global_weights
    assert all(any(not np.array_equal(own[key], shared[key]) for key in own) for own in weights.values()), (
        "each silo has adapted the shared model"
    )
    served_id = ClientIdHash.load(config.client_id_key)
    models = [*(weights[name] for name in NAMES), shared]
    x = np.random.default_rng(0).uniform(-1, 1, (len(models), 2)).astype(np.float32)
    ids = np.array([*(served_id(name) for name in NAMES), "stranger"], object)
    answer = load_servable(exports[name]).predict("", {"client_id": ids, "x": x})
    assert answer["personalized"].tolist() == [True] * len(NAMES) + [False]
    logits = [method.model.predict(own, tf.constant(row[np.newaxis]))[0] for own, row in zip(models, x, strict=True)]
    expected = [tf.nn.softmax(one).numpy() for one in logits]
    # A probability changes by less than its logits, which are sums of fewer terms than there are weights.
    largest = max(logit_magnitude(own, row) for own, row in zip(models, x, strict=True))
    np.testing.assert_allclose(
        answer["probabilities"],
        expected,
        rtol=2 * gamma(2 * ELEMENTARY),
        atol=2 * gamma(method.model.num_parameters()) * largest,
    )


def logit_magnitude(weights, x):
    """The largest sum of the magnitudes of a logit's terms."""
    size = np.abs(x)
    for layer in range(2):
        size = size @ np.abs(weights[f"dense_{layer}/kernel"]) + np.abs(weights[f"dense_{layer}/bias"])
    return float(size.max())


@pytest.mark.parametrize("name", METHODS)
def test_files_of_an_export_state_the_claim_of_each_object(private, exports, name):
    report, card = (document(exports[name], part) for part in ("privacy_report", "model_card"))
    released, shared, personal = (report["objects"][one] for one in OBJECTS)
    assert released == shared
    assert released["claim"] == "formal"
    assert released["epsilon"] == synthetic_epsilon(private[0], name)
    assert personal["epsilon"] == max(row["epsilon"] for row in report["silos"])
    assert released["epsilon"] < personal["epsilon"] <= BUDGET
    assert all(one["may_leave_the_silo"] and one["delta"] == 1e-3 for one in report["objects"].values())
    assert report["claim"] == card["claim"] == personal["claim"] == "formal-conditional"
    assert report["claim_reason"] == card["claim_reason"]
    (stages,) = [one["text"] for one in report["paragraphs"] if one["heading"] == "Stages of training"]
    assert "WITHOUT" not in stages


def test_the_summary_has_the_objects_and_the_page_the_three_stages(private):
    config, summary = private
    assert (
        json.loads((Path(config.output) / "summary.json").read_text())["privacy"]["objects"]
        == (summary["privacy"]["objects"])
    )
    released, shared, personal = (summary["privacy"]["objects"][one] for one in OBJECTS)
    assert released == shared
    assert released["epsilon"] == synthetic_epsilon(config)
    assert personal["epsilon"] == max(silo["epsilon_spent"] for silo in summary["silos"])
    assert {row["claim"] for row in summary["algorithms"].values()} == {"formal-conditional"}
    page = page_of(config)
    for stage in (
        "First, each silo releases 40 synthetic examples (generator dp_gaussian), once for all methods.",
        "Second, 3 rounds train on synthetic data alone.",
        "Third, each silo adapts a model of its own to its records, by DP-SGD",
        "Whoever gets synthetic data",
        "The server, in rounds on synthetic data",
        "The server and other silos, in rounds on records",
    ):
        assert stage in page


def test_models_adapted_without_noise_are_flagged_everywhere(bare):
    config, summary = bare
    released, shared, personal = (summary["privacy"]["objects"][one] for one in OBJECTS)
    assert released == shared
    assert (released["claim"], released["may_leave_the_silo"]) == ("formal", True)
    assert 0.99 * BUDGET < released["epsilon"] <= BUDGET, "synthetic data have the whole budget"
    assert (personal["claim"], personal["epsilon"], personal["delta"]) == ("none", None, None)
    assert personal["may_leave_the_silo"] is False
    assert "without clip and noise" in personal["claim_reason"]
    assert summary["privacy"]["claim"] == "none"
    assert summary["algorithms"]["fed_avg"]["claim"] == "none"
    page = page_of(config)
    assert "WITHOUT clip and noise. Nothing is claimed of personal models" in page
    assert "by DP-SGD, and releases nothing" not in page


def test_the_command_refuses_to_export_models_adapted_without_noise(bare, capsys):
    config, _ = bare
    path = Path(config.output).with_name("experiment.json")
    # YAML has JSON in it.
    path.write_text(json.dumps(config.to_dict()))
    assert main(["export", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert "tff-pdp export: personal models cannot be exported: privacy.synthetic.adaptation is non_private" in said
    assert "trained on its silo's records without clip and noise" in said
    assert not config.export_folder.exists()


def test_a_new_silo_adapts_the_shared_model_and_pays(private, exports, tmp_path):
    config = exporting(private[0], "fed_avg")
    own, path = points("added", 9), tmp_path / "added.npz"
    np.savez(path, x=own.x[:NUM_TRAIN].astype(np.float32), y=np.asarray(own.y[:NUM_TRAIN]) > 0)
    fit = FitOptions(steps=30, epsilon=4.0, delta=1e-3)
    done = personalize(config, path, ["added"], fit, progress=False)
    (added,) = done.clients
    assert 0.99 * 4 < added.epsilon <= 4
    assert added.recorded.epsilon == added.epsilon
    assert int(done.version.name) == int(exports["fed_avg"].name) + 1
    report, before = (document(one, "privacy_report") for one in (done.version, exports["fed_avg"]))
    rows = {row["id"]: row for row in report["silos"]}
    assert rows[added.served_as]["epsilon"] == added.epsilon
    assert {row["id"]: row for row in before["silos"]}.items() <= rows.items(), "others have not paid"
    assert report["objects"]["synthetic data"] == before["objects"]["synthetic data"]
    x = np.random.default_rng(1).uniform(-1, 1, (5, 2)).astype(np.float32)
    east = ClientIdHash.load(config.client_id_key)("east")
    after, earlier = (
        [
            load_servable(version).predict("", {"client_id": np.array([one] * 5, object), "x": x})["probabilities"]
            for one in (added.served_as, "stranger", east)
        ]
        for version in (done.version, exports["fed_avg"])
    )
    assert not np.array_equal(after[0], earlier[0]), "the added silo has a model of its own"
    for one, other in zip(after[1:], earlier[1:], strict=True):
        np.testing.assert_array_equal(one, other)
