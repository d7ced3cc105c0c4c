"""From silos in a file to served answers: a regression over scaled features, and a support vector machine."""

import html
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf
import yaml

from beam_pipelines.sources.silo_files import SiloArrays, write_silo_arrays
from serving.client.grpc_client import GrpcClient
from serving.client.rest_client import RestClient
from serving.export.model_checks import LayoutSize
from serving.saved_model import layout
from serving.saved_model.servable import load_servable
from serving.server.embedded import EmbeddedServer
from serving.tf_serving import ServedModel
from tests.places import DEMO
from tests.rounding import ELEMENTARY, assert_within, gamma
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg
from tff_pdp.algorithms.whole_models.finetune import build_local_only
from tff_pdp.cli import main
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.build import experiment_engine
from tff_pdp.experiment.config import load_experiment
from tff_pdp.experiment.model import model_seed
from tff_pdp.experiment.prepare import prepare_clients
from tff_pdp.models.dense import build_linear_svm
from tff_pdp.models.derived import SCALE, SHIFT, with_scaled_inputs
from tff_pdp.personal_models.export import export_experiment
from tff_pdp.personal_models.model_card import exported_ids
from tff_pdp.personal_models.served import served_models
from tff_pdp.personal_models.trained_clients import global_model_of, trained_clients
from tff_pdp.training.evaluate import evaluate_experiment, load_trained, summary_table
from tff_pdp.training.record.charges import run_id_of
from tff_pdp.training.run_folder import read_metrics
from tff_pdp.training.train import train

pytestmark = pytest.mark.usefixtures("one_fresh_process")

SIZES = {"clinic_north": 60, "clinic_south": 40, "clinic_west": 50}
# Relative, of a score to the magnitudes of its terms: two products, their sum and a bias. A shift rounds once more, and
# scales are powers of two.
SCORE = gamma(2 + 1)
SHIFTED_SCORE = gamma(2 + 1 + 1)
# Relative, of a probability: a softmax of two scores. It changes by less than its score does.
PROBABILITY = gamma(2 * ELEMENTARY + 4)


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
        "data.kind": "silo_files",
        "data.input_shape": [2],
        "data.num_classes": num_classes,
        "data.test_fraction": 0.4,
        "data.exact_split": True,
        "model.kind": model,
        # All examples, so that noise follows from a formula; for samples it takes seconds to work out.
        "privacy.batch_size": 64,
        "training.rounds": 6,
        "training.evaluate_every": 3,
        "training.test_only_seed": 1,
        "training.client_parallelism": "loop",
        "algorithms": {"local_only": {"learning_rate": 0.1}, "mr_mtl": {"learning_rate": 0.1}},
        **overrides,
    }
    return load_experiment(DEMO, settings)


def run(config):
    prepare_clients(config)
    for name in config.algorithms:
        train(config, name, progress=False)
    return evaluate_experiment(config), export_experiment(config).version


def weights_and_test_examples(config, name):
    method, state = load_trained(config, name)
    with experiment_engine(config):
        weights = trained_clients(method, state).weights_by_id()
    return weights, {client_id: method.clients.load(client_id, "test") for client_id in SIZES}


def answers_of(config, client_ids, x):
    name = config.export.model_name
    client_ids = [exported_ids(config)(client_id) for client_id in client_ids]
    with EmbeddedServer([ServedModel(name, config.export_folder)]) as server:
        rest = RestClient(f"127.0.0.1:{server.rest_port}").predict(name, client_ids, x)
        with GrpcClient(f"127.0.0.1:{server.grpc_port}") as client:
            grpc = client.predict(name, client_ids, x)
    np.testing.assert_array_equal(rest.answers, grpc.answers)
    np.testing.assert_array_equal(rest.personalized, grpc.personalized)
    return rest


def predictions_of(config, client_id, capsys, *options):
    """What `tff-pdp predict` prints, of the client's first three test examples."""
    path = Path(config.output) / "experiment.yaml"
    path.write_text(yaml.safe_dump(config.to_dict()))
    name = config.export.model_name
    with EmbeddedServer([ServedModel(name, config.export_folder)]) as server:
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
        rounded = [_rounded_mean(weights[client_id], examples[client_id], errors[client_id]) for client_id in by_silo]
        found = {silo["id"]: silo["personal"][name] for silo in summary["silos"]}
        assert found.keys() == by_silo.keys()
        assert_within([found[client_id] for client_id in by_silo], list(by_silo.values()), rounded)
        sizes = [len(own) for own in errors.values()]
        assert row["mean"] == pytest.approx(np.mean(list(by_silo.values())), abs=np.mean(rounded))
        over_examples = np.average(rounded, weights=sizes)
        assert row["mean_over_examples"] == pytest.approx(
            np.concatenate(list(errors.values())).mean(), abs=over_examples
        )
        assert row["worst_decile"] == pytest.approx(max(by_silo.values()), abs=max(rounded))
        assert len(set(sizes)) == 3, "or all means would be the same"
        rows = read_metrics(config.algorithm_folder(name))
        assert [(line["metric"], line["higher_is_better"]) for line in rows] == [("mean_squared_error", False)] * 2
        assert 0 < rows[1]["nonprivate"]["mean"] < rows[0]["nonprivate"]["mean"]
    assert "mean squared error, lower is better" in summary_table(summary)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Mean squared error of each silo" in page
    assert "accurac" not in page.lower()

    weights, examples = weights_and_test_examples(config, "mr_mtl")
    ids = ["clinic_west", "nobody", "clinic_north"]
    x = examples["clinic_south"].x[:3]
    served = answers_of(config, ids, x)
    np.testing.assert_array_equal(served.personalized, [True, False, True])
    _, state = load_trained(config, "mr_mtl")
    shared = state.server_state["algorithm"]["mean"]
    models = [{**weights, "nobody": shared}[one] for one in ids]
    expected, terms = (
        [function(one, x[index : index + 1])[0] for index, one in enumerate(models)] for function in (_values, _terms)
    )
    assert_within(served.answers, expected, SHIFTED_SCORE * np.array(terms))
    own = examples["clinic_west"]
    printed = json.loads(predictions_of(config, "clinic_west", capsys, "--json"))["predictions"]
    expected, terms = (function(weights["clinic_west"], own.x[:3]) for function in (_values, _terms))
    assert_within([row["predicted"] for row in printed], expected, SHIFTED_SCORE * terms)
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
    return _scores(weights, scaled)


def _scores(weights, x):
    kernel, bias = (np.asarray(weights[f"dense_0/{part}"], np.float64) for part in ("kernel", "bias"))
    return np.asarray(x, np.float64) @ kernel[:, 0] + bias


def _magnitudes(weights, x):
    """Of each score, the sum of its terms' magnitudes."""
    return _scores({name: np.abs(value) for name, value in weights.items()}, np.abs(x))


def _terms(weights, x):
    """Those of `_values`."""
    return _magnitudes(weights, np.asarray(x, np.float64) / [2.0, 4.0] + 1.0)


def _rounded_mean(weights, own, errors):
    """How far a mean of squared errors may be off in float32: by predictions, differences, squares and their mean."""
    off = SHIFTED_SCORE * _terms(weights, own.x)
    return float(np.mean((2 * np.sqrt(errors) + off) * off) + gamma(2 + 1 + len(errors)) * errors.mean())


@pytest.mark.timeout(300)
@pytest.mark.all
def test_a_support_vector_machine_is_served_by_the_logistic_function_of_its_scores(tmp_path, capsys):
    config = config_of(tmp_path, "linear_svm", 2)
    summary, _ = run(config)
    assert (summary["metric"], summary["higher_is_better"]) == ("accuracy", True)
    weights, examples = weights_and_test_examples(config, "mr_mtl")
    own = examples["clinic_south"]
    scores = _scores(weights["clinic_south"], own.x)
    rounded = SCORE * _magnitudes(weights["clinic_south"], own.x)
    assert (np.abs(scores) > rounded).all(), "this test needs scores whose sign is certain"
    # A quotient of whole numbers.
    assert {silo["id"]: silo["personal"]["mr_mtl"] for silo in summary["silos"]}["clinic_south"] == pytest.approx(
        np.mean((scores > 0) == own.y), rel=gamma(1)
    )
    served = answers_of(config, ["clinic_south"] * len(own.y), own.x)
    assert served.personalized.all()
    expected = 1 / (1 + np.exp(-scores))
    assert_within(served.answers[:, 1], expected, PROBABILITY * expected + rounded)
    np.testing.assert_allclose(served.answers.sum(axis=1), 1.0, rtol=PROBABILITY)
    row = served.answers[0]
    line = f"label {own.y[0]}: predicted {row.argmax()} with probability {row.max():.3f} by the personal model"
    assert predictions_of(config, "clinic_south", capsys).splitlines()[0] == line


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
    "privacy.kind": "user",
    "privacy.users_per_round": len(SIZES),
    "privacy.budgets": {"kind": "one_for_all", "epsilon": 8.0, "delta": 1e-3},
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
        before = served_models(trained_clients(method, state, model_seed(config))).references
        columns = state.client_states.read(range(3))
        others = tf.nest.map_structure(lambda column: column + np.float32(1), columns)
        state.client_states.write(state.round_number + 1, range(3), others)
        after = served_models(trained_clients(method, state, model_seed(config))).references
    state.client_states.close()
    for key, weights in before[""].items():
        np.testing.assert_array_equal(after[""][key], weights)
        for user in SIZES:
            is_shared = name == "fed_per" and key not in method.model.head
            assert np.array_equal(after[user][key], before[user][key]) == is_shared
    kernel = before[""]["dense_0/kernel"]
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
    assert card["run"] == summary["algorithms"]["fed_avg"]["run"] == run_id_of(config.algorithm_folder("fed_avg"))
    assert card["client_ids"].startswith("keyed hashes (HMAC-SHA256")
    assert card["unknown_clients"].startswith("answered by the global model")
    page = html.unescape((Path(config.output) / "report.html").read_text())
    # The page goes on, on local training, which costs nothing.
    assert [one["heading"] for one in report["paragraphs"] if one["text"] not in page] == []
    assert any("A choice among the 2 compared methods" in one["text"] for one in report["paragraphs"])
    for content in (report, card):
        assert "joint differential privacy" in content["personal_models"]
        assert "whoever holds it can learn about every user" in content["personal_models"]
    alone = config_of(tmp_path, "linear_svm", 2, **{**USERS, "algorithms": methods, "export.algorithm": "local_only"})
    extra = export_experiment(alone).version / "assets.extra"
    card = json.loads((extra / "model_card.json").read_text())
    assert card["unknown_clients"].startswith("answered by the untrained initial model")
    assert json.loads((extra / "privacy_report.json").read_text())["epsilon"] == 0.0


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    """A function that gives one trained experiment, one silo of which added no noise, with other ways to export it."""
    folder = tmp_path_factory.mktemp("silos")
    budgets = {"kind": "by_silo", "delta": 1e-4, "silos": {"clinic_south": float("inf")}, "default_epsilon": 4.0}
    settings = {"privacy.budgets": budgets, "training.test_only_seed": None, "training.rounds": 3}
    settings["algorithms"] = {"mr_mtl": {"learning_rate": 0.1}}

    def build(**export):
        further = {f"export.{key}": value for key, value in export.items()}
        return config_of(folder, "linear_svm", 2, **settings, **further)

    config = build()
    prepare_clients(config)
    train(config, "mr_mtl", progress=False)
    return build


def files_with(folder, text):
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_an_export_has_pseudonyms_in_place_of_ids(silos):
    config = silos()
    version = export_experiment(config).version
    hashed = {silo: exported_ids(config)(silo) for silo in SIZES}
    assert all(files_with(version, silo) == [] for silo in SIZES)
    assert (version / "assets" / "client_ids.txt").read_text().splitlines()[1:] == sorted(hashed.values())
    assert files_with(version, config.client_id_key.read_text().strip()) == []
    report = json.loads((version / "assets.extra" / "privacy_report.json").read_text())
    epsilons = {silo["id"]: silo["epsilon"] for silo in report["silos"]}
    # In the order of the hashes: another would tell whose they are.
    assert list(epsilons) == sorted(hashed.values())
    assert epsilons[hashed["clinic_south"]] is None and epsilons[hashed["clinic_west"]] <= 4.0
    claims = {silo["id"]: silo["claim"] for silo in report["silos"]}
    assert {silo for silo, claim in claims.items() if claim == "none"} == {hashed["clinic_south"]}
    assert report["claim_reason"] == f"1 silos trained without noise, for example {hashed['clinic_south']}"
    assert report["personal_models"].startswith("Nothing is promised of the exported file")
    paragraphs = {one["heading"]: one["text"] for one in report["paragraphs"]}
    assert paragraphs["Claim"].startswith(f"This run is not private. Reason: {report['claim_reason']}.")
    assert paragraphs["Personal models"] == report["personal_models"]
    assert "ε spent by one method is" in paragraphs["What it cost"]
    card = json.loads((version / "assets.extra" / "model_card.json").read_text())
    assert (card["claim"], card["claim_reason"]) == ("none", report["claim_reason"])
    assert card["client_ids"].startswith("keyed hashes") and card["personal_models"] == report["personal_models"]
    assert card["layout"] == "stacked"
    # Another version has the same ids.
    again = export_experiment(config).version
    assert again != version
    assert (again / "assets" / "client_ids.txt").read_text() == (version / "assets" / "client_ids.txt").read_text()


def test_an_export_may_have_the_ids_themselves(silos, capsys):
    config = silos(client_ids="plain", model_name="plain")
    version = export_experiment(config).version
    assert (version / "assets" / "client_ids.txt").read_text().splitlines()[1:] == sorted(SIZES)
    card = json.loads((version / "assets.extra" / "model_card.json").read_text())
    assert card["client_ids"] == "in plain text, as in the client dataset"
    assert answers_of(config, ["clinic_west", "nobody"], np.zeros((2, 2), np.float32)).personalized.tolist() == [1, 0]
    assert "by the personal model" in predictions_of(config, "clinic_west", capsys)


def test_every_silo_may_have_an_export_of_its_own(silos, capsys):
    config = silos(layout="per_client", model_name="own")
    exported = export_experiment(config)
    hashed = {silo: exported_ids(config)(silo) for silo in SIZES}
    assert (exported.layout, set(exported.versions)) == ("per_client", {f"own.{one}" for one in hashed.values()})
    for silo, version in ((silo, exported.versions[f"own.{one}"]) for silo, one in hashed.items()):
        found = {other for other in SIZES if files_with(version, hashed[other])}
        assert found == {silo}
        assert all(files_with(version, other) == [] for other in SIZES)
        report = json.loads((version / "assets.extra" / "privacy_report.json").read_text())
        assert (report["epsilon_at_most"], report["delta_at_most"], "silos" in report) == (None, 1e-4, False)
        (claim,) = [one["text"] for one in report["paragraphs"] if one["heading"] == "Claim"]
        assert claim.startswith("This run is not private. Reason: 1 silos trained without noise. Whatever follows")
    method, state = load_trained(config, "mr_mtl")
    with experiment_engine(config):
        weights = trained_clients(method, state).weights_by_id()
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    version = exported.versions[f"own.{hashed['clinic_west']}"]
    answer = load_servable(version).predict("", {"client_id": np.array([hashed["clinic_west"]] * 3, object), "x": x})
    expected = np.asarray(method.model.answers(method.model.predict(weights["clinic_west"], tf.constant(x))))
    rounded = SCORE * _magnitudes(weights["clinic_west"], x)[:, np.newaxis]
    assert_within(answer["probabilities"], expected, 2 * (PROBABILITY * expected + rounded))


def test_silos_without_budgets_may_have_exports_of_their_own_too(tmp_path):
    config = config_of(
        tmp_path,
        "linear_svm",
        2,
        **{
            "privacy": {"kind": "none", "unit": "silo", "batch_size": 16},
            "training.rounds": 1,
            "algorithms": {"mr_mtl": {"learning_rate": 0.1}},
            "export.layout": "per_client",
        },
    )
    prepare_clients(config)
    train(config, "mr_mtl", progress=False)
    exported = export_experiment(config)
    assert len(exported.versions) == len(SIZES)
    for version in exported.versions.values():
        report = json.loads((version / "assets.extra" / "privacy_report.json").read_text())
        assert report["claim"] == "none"
        assert not {"silos", "epsilon_at_most", "delta_at_most"} & set(report)


def test_clients_that_were_added_are_left_out_only_when_that_is_said(silos, tmp_path, capsys):
    config = silos(model_name="added_to")
    version = export_experiment(config).version
    card_file = version / "assets.extra" / "model_card.json"
    added = {"clients_not_in_training": 1, "clients_fitted_after_training": 3}
    card_file.write_text(json.dumps({**json.loads(card_file.read_text()), **added}))
    layout.write_manifest(version, layout.read_manifest(version))
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert main(["export", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert "1 clients that were not in training, 3 fits in all" in said and "--drop-added" in said
    assert layout.published_versions(config.export_folder).keys() == {1}
    # Whether a damaged version has added clients cannot be told.
    card_file.write_text(json.dumps({**json.loads(card_file.read_text()), "clients_fitted_after_training": 0}))
    assert main(["export", "--config", str(path)]) == 2
    assert "model_card.json does not match the SHA-256 in its manifest" in capsys.readouterr().err
    card_file.write_text("{")
    layout.write_manifest(version, layout.read_manifest(version))
    assert main(["export", "--config", str(path)]) == 2
    assert "model_card.json cannot be read" in capsys.readouterr().err
    assert layout.published_versions(config.export_folder).keys() == {1}
    assert main(["export", "--config", str(path), "--drop-added", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    # What is printed is what is stored.
    manifest = json.loads((Path(content["version"]) / "assets.extra" / "manifest.json").read_text())
    assert content["size"] == manifest["size"]
    assert layout.published_versions(config.export_folder).keys() == {1, 2}
    assert main(["export", "--config", str(path)]) == 0
    assert f"size: {LayoutSize(**manifest['size']).text()}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("has_shared_model", "has_users", "words"),
    [
        (True, True, "the global model"),
        (True, False, "the global model"),
        (False, True, "the untrained initial model"),
        (False, False, "the mean of the clients' personal models"),
    ],
)
def test_what_unknown_clients_get_is_called_what_it_is(has_shared_model, has_users, words):
    method = SimpleNamespace(
        algorithm=build_fed_avg() if has_shared_model else build_local_only(),
        plan=SimpleNamespace(samples_clients=has_users),
    )
    assert global_model_of(cast(Any, method)) == words


def test_a_layout_that_is_not_possible_is_named(silos):
    with pytest.raises(ConfigError, match=r"export\.layout hypernetwork: mr_mtl does not"):
        export_experiment(silos(layout="hypernetwork"))
    with pytest.raises(ConfigError, match=r"export\.layout must be one of auto, clusters, .*, not 'heads'"):
        silos(layout="heads")
    with pytest.raises(ConfigError, match=r"export\.client_ids must be one of hashed, plain, not 'secret'"):
        silos(client_ids="secret")


def test_asking_without_the_key_is_refused(silos, tmp_path, capsys):
    config = silos()
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**config.to_dict(), "output": str(tmp_path)}))
    assert main(["predict", "--config", str(path), "--client-id", "clinic_west"]) == 2
    assert "client_id.key is missing" in capsys.readouterr().err
