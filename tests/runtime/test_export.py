"""From silos in a file to served answers: a regression over scaled features, and a support vector machine."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from serving.client import GrpcClient, RestClient
from serving.server import EmbeddedServer
from tff_pdp.cli import main
from tff_pdp.config import load_config
from tff_pdp.data.silo_arrays import SiloArrays, write_silo_arrays
from tff_pdp.models.linear_svm import build_linear_svm
from tff_pdp.models.scaled_inputs import SCALE, SHIFT, with_scaled_inputs
from tff_pdp.runtime.experiment import experiment_engine
from tff_pdp.runtime.export import export_experiment, personal_weights, served_model
from tff_pdp.runtime.prepare import prepare_clients
from tff_pdp.runtime.results import evaluate_experiment, load_trained, summary_table
from tff_pdp.runtime.train import read_metrics, train

SIZES = {"north": 60, "south": 40, "west": 50}


def config_of(folder, model, num_classes, **overrides):
    """Silos of two features whose label is their difference, a little off in each; or the sign of that."""
    rng = np.random.default_rng(0)
    silos = []
    for number, (name, size) in enumerate(SIZES.items()):
        x = rng.uniform(0, 4, (size, 2))
        y = x[:, 0] - x[:, 1] + 0.3 * number
        silos.append(SiloArrays(name, x, np.where(y > 0, 1, -1) if num_classes else y))
    write_silo_arrays(folder / "silos.npz", silos)
    settings = {
        "output": str(folder / "run"),
        "data.input": str(folder / "silos.npz"),
        "data.source": "silo_files",
        "data.input_shape": [2],
        "data.num_classes": num_classes,
        "data.test_fraction": 0.4,
        "data.exact_split": True,
        "model.name": model,
        "privacy.batch_size": 16,
        "training.rounds": 6,
        "training.evaluate_every": 3,
        "training.test_only_seed": 1,
        "training.client_parallelism": "loop",
        "algorithms": {"local_only": {"learning_rate": 0.1}, "mr_mtl": {"learning_rate": 0.1}},
        **overrides,
    }
    return load_config(Path(__file__).parents[2] / "configs" / "demo.yaml", settings)


def run(config):
    prepare_clients(config)
    for name in config.algorithms:
        train(config, name, progress=False)
    return evaluate_experiment(config), export_experiment(config)


def weights_and_test_examples(config, name):
    method, state = load_trained(config, name)
    with experiment_engine(config):
        weights = personal_weights(method, state)
    return weights, {client_id: method.clients.load(client_id, "test") for client_id in SIZES}


def answers_of(config, client_ids, x):
    name = config.export.model_name
    with EmbeddedServer(config.export_folder, name, rest_port=0, grpc_port=0) as server:
        rest = RestClient(f"127.0.0.1:{server.rest_port}").predict(name, client_ids, x)
        with GrpcClient(f"127.0.0.1:{server.grpc_port}") as client:
            grpc = client.predict(name, client_ids, x)
    np.testing.assert_array_equal(rest.answers, grpc.answers)
    np.testing.assert_array_equal(rest.personalized, grpc.personalized)
    return rest


def predictions_of(config, client_id, capsys, *options):
    """What `tff-pdp predict` prints, of the client's first three test examples."""
    path = Path(config.output) / "experiment.yaml"
    path.write_text(json.dumps(config.to_dict()))
    name = config.export.model_name
    with EmbeddedServer(config.export_folder, name, rest_port=0, grpc_port=0) as server:
        address = f"127.0.0.1:{server.rest_port}"
        arguments = ["--config", str(path), "--client-id", client_id, "--address", address, *options]
        assert main(["predict", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_regression_is_judged_reported_and_served_by_its_values(tmp_path, capsys):
    scaling = {"kind": "public_bounds", "lower": 0.0, "upper": [4.0, 8.0]}
    config = config_of(tmp_path, "linear_regression", 0, **{"privacy.feature_scaling": scaling})
    summary, version = run(config)
    assert (summary["metric"], summary["higher_is_better"]) == ("mean_squared_error", False)
    for name, row in summary["algorithms"].items():
        weights, examples = weights_and_test_examples(config, name)
        errors = {
            client_id: np.square(_values(weights[client_id], own.x) - own.y) for client_id, own in examples.items()
        }
        by_silo = {client_id: float(own.mean()) for client_id, own in errors.items()}
        assert {silo["id"]: silo["personal"][name] for silo in summary["silos"]} == pytest.approx(by_silo, rel=1e-5)
        assert row["mean"] == pytest.approx(np.mean(list(by_silo.values())), rel=1e-5)
        assert row["mean_over_examples"] == pytest.approx(np.concatenate(list(errors.values())).mean(), rel=1e-5)
        assert row["worst_decile"] == pytest.approx(max(by_silo.values()), rel=1e-5)
        assert len({len(own) for own in errors.values()}) == 3, "or all means would be the same"
        rows = read_metrics(config.algorithm_folder(name))
        assert [(line["metric"], line["higher_is_better"]) for line in rows] == [("mean_squared_error", False)] * 2
        assert 0 < rows[1]["mean"] < rows[0]["mean"]
    assert "mean squared error, lower is better" in summary_table(summary)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Mean squared error of each silo" in page
    assert "accurac" not in page.lower()

    weights, examples = weights_and_test_examples(config, "mr_mtl")
    ids = ["west", "nobody", "north"]
    x = examples["south"].x[:3]
    served = answers_of(config, ids, x)
    np.testing.assert_array_equal(served.personalized, [True, False, True])
    _, state = load_trained(config, "mr_mtl")
    shared = state.server_state["algorithm"]["mean"]
    expected = [_values({**weights, "nobody": shared}[one], x[index : index + 1])[0] for index, one in enumerate(ids)]
    np.testing.assert_allclose(served.answers, expected, rtol=1e-5)
    own = examples["west"]
    printed = json.loads(predictions_of(config, "west", capsys, "--json"))["predictions"]
    assert [row["predicted"] for row in printed] == pytest.approx(_values(weights["west"], own.x[:3]).tolist())
    assert [row["label"] for row in printed] == own.y[:3].tolist()
    assert [sorted(row) for row in printed] == [["label", "personalized", "predicted"]] * 3
    manifest = json.loads((version / "assets.extra" / "manifest.json").read_text())
    outputs = manifest["signatures"]["predict"]["outputs"]
    assert outputs == {
        "values": {"dtype": "float32", "shape": [None]},
        "personalized": {"dtype": "bool", "shape": [None]},
    }


def _values(weights, x):
    """With x from [0, 4] and [0, 8] taken to [-1, 1]."""
    scaled = np.asarray(x, np.float64) / [2.0, 4.0] - 1.0
    return (scaled @ np.asarray(weights["dense_0/kernel"]))[:, 0] + np.asarray(weights["dense_0/bias"])


@pytest.mark.timeout(300)
def test_a_support_vector_machine_is_served_by_the_logistic_function_of_its_scores(tmp_path, capsys):
    config = config_of(tmp_path, "linear_svm", 2)
    summary, _ = run(config)
    assert (summary["metric"], summary["higher_is_better"]) == ("accuracy", True)
    weights, examples = weights_and_test_examples(config, "mr_mtl")
    own = examples["south"]
    scores = (own.x @ weights["south"]["dense_0/kernel"])[:, 0] + weights["south"]["dense_0/bias"]
    assert {silo["id"]: silo["personal"]["mr_mtl"] for silo in summary["silos"]}["south"] == pytest.approx(
        np.mean((scores > 0) == own.y)
    )
    served = answers_of(config, ["south"] * len(own.y), own.x)
    assert served.personalized.all()
    np.testing.assert_allclose(served.answers[:, 1], 1 / (1 + np.exp(-scores)), atol=1e-6)
    np.testing.assert_allclose(served.answers.sum(axis=1), 1.0, atol=1e-6)
    row = served.answers[0]
    line = f"label {own.y[0]}: predicted {row.argmax()} with probability {row.max():.3f} by the personal model"
    assert predictions_of(config, "south", capsys).splitlines()[0] == line


def test_scaled_inputs_are_shifted_then_scaled():
    model = with_scaled_inputs(build_linear_svm((2,)))
    initial = model.init(0)
    assert initial[SHIFT].tolist() == [0, 0] and initial[SCALE].tolist() == [1, 1]
    weights = {
        **initial,
        SHIFT: [1.0, -1.0],
        SCALE: [2.0, 3.0],
        "dense_0/kernel": np.array([[1.0], [10.0]], np.float32),
    }
    np.testing.assert_array_equal(model.predict(weights, tf.constant([[1.0, 2.0]]))[0], [0.0, 34.0])


USERS = {
    "privacy.plan": "user",
    "privacy.users_per_round": 2,
    "privacy.budgets": {"epsilon": 8.0, "delta": 1e-3},
    "model.seed": 3,
    "training.test_only_seed": None,
}


@pytest.mark.parametrize("name", ["local_only", "fed_per"])
def test_unknown_clients_get_nothing_of_users_personal_weights(tmp_path, name):
    config = config_of(tmp_path, "mlp", 2, **{**USERS, "algorithms": {name: {}}, "export.algorithm": name})
    prepare_clients(config)
    train(config, name, progress=False)
    method, state = load_trained(config, name)
    with experiment_engine(config):
        before = served_model(method, state, config.model.seed)
        columns = state.client_states.read(range(3))
        others = tf.nest.map_structure(lambda column: column + np.float32(1), columns)
        state.client_states.write(state.round_number + 1, range(3), others)
        after = served_model(method, state, config.model.seed)
    state.client_states.close()
    for key, weights in before.global_weights.items():
        np.testing.assert_array_equal(after.global_weights[key], weights)
        for user in SIZES:
            is_shared = name == "fed_per" and key not in method.model.head
            assert np.array_equal(after.personal_weights[user][key], before.personal_weights[user][key]) == is_shared
    kernel = before.global_weights["dense_0/kernel"]
    assert not np.array_equal(kernel, method.model.init(0)["dense_0/kernel"])
    assert np.array_equal(kernel, method.model.init(3)["dense_0/kernel"]) == (name == "local_only")


def test_an_export_of_users_says_what_is_protected_from_whom(tmp_path):
    methods = {"local_only": {"learning_rate": 0.1}, "fed_avg": {"learning_rate": 0.1}}
    config = config_of(tmp_path, "linear_svm", 2, **{**USERS, "algorithms": methods, "export.algorithm": "fed_avg"})
    summary, version = run(config)
    extra = version / "assets.extra"
    report = json.loads((extra / "privacy_report.json").read_text())
    card = json.loads((extra / "model_card.json").read_text())
    assert (report["unit"], report["adjacency"]) == ("user", "add_or_remove_one")
    assert report["claim"] == "formal-conditional"
    assert report["epsilon"] == summary["algorithms"]["fed_avg"]["epsilon_spent"] <= 8.0
    assert (report["delta"], "silos" in report) == (1e-3, False)
    assert card["client_ids"] == "in plain text, as in the client dataset"
    assert card["unknown_clients"].startswith("answered by the global model")
    for content in (report, card):
        assert "joint differential privacy" in content["personal_models"]
        assert "whoever holds it can learn about every user" in content["personal_models"]
    alone = config_of(tmp_path, "linear_svm", 2, **{**USERS, "algorithms": methods, "export.algorithm": "local_only"})
    extra = export_experiment(alone) / "assets.extra"
    card = json.loads((extra / "model_card.json").read_text())
    assert card["unknown_clients"].startswith("answered by the untrained initial model")
    assert json.loads((extra / "privacy_report.json").read_text())["epsilon"] == 0.0
