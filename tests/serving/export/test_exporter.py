import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from serving.export import versions
from serving.export.expectations import expectations_of_version
from serving.models import CLUSTERS, HYPERNETWORK, PersonalModels
from serving.saved_model import layout, warmup
from serving.saved_model.checks import check_export
from serving.saved_model.servable import load_servable
from tests.rounding import assert_within, gamma
from tff_pdp.errors import DataError, ServingError
from tff_pdp.models.base import Model
from tff_pdp.models.dense import build_linear_regression, build_mlp
from tff_pdp.models.hypernetwork import Hypernetwork


@pytest.fixture
def copy(export_dir, tmp_path):
    return shutil.copytree(export_dir, tmp_path / "copy")


def test_signatures_have_the_promised_keys_types_and_open_batches(export_dir):
    signatures = load_servable(export_dir).signatures
    described = {
        name: {
            key: (tf.as_dtype(info.dtype).name, [dimension.size for dimension in info.tensor_shape.dim])
            for key, info in (*signatures[name].inputs.items(), *signatures[name].outputs.items())
        }
        for name in signatures
        if signatures[name].inputs
    }
    predict = {
        "client_id": ("string", [-1]),
        "x": ("float32", [-1, 3, 2]),
        "probabilities": ("float32", [-1, 4]),
        "personalized": ("bool", [-1]),
    }
    classify = {"inputs": ("string", [-1]), "classes": ("string", [-1, 4]), "scores": ("float32", [-1, 4])}
    assert described == {"serving_default": predict, "predict": predict, "classify": classify}
    assert signatures["classify"].method_name == "tensorflow/serving/classify"
    assert signatures["predict"].method_name == "tensorflow/serving/predict"


def test_manifest_hashes_every_file(export_dir):
    manifest = json.loads((export_dir / layout.MANIFEST_FILE).read_text())
    files = {path.relative_to(export_dir).as_posix() for path in export_dir.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {layout.MANIFEST_FILE}
    card = (export_dir / layout.MODEL_CARD_FILE).read_bytes()
    assert manifest["files"][layout.MODEL_CARD_FILE] == hashlib.sha256(card).hexdigest()
    assert manifest["tensorflow_version"] == tf.__version__
    assert (manifest["num_clients"], manifest["num_rows"], manifest["layout"]) == (3, 4, "stacked")
    assert manifest["weights"] == {
        "shared": [],
        "stacked": ["dense_0/bias", "dense_0/kernel", "dense_1/bias", "dense_1/kernel"],
    }
    assert manifest["signatures"]["classify"] == {
        "method": "tensorflow/serving/classify",
        "inputs": {"inputs": {"dtype": "string", "shape": [None]}},
        "outputs": {
            "classes": {"dtype": "string", "shape": [None, 4]},
            "scores": {"dtype": "float32", "shape": [None, 4]},
        },
    }
    assert json.loads((export_dir / layout.PRIVACY_REPORT_FILE).read_text()) == {"claim": "none"}


def test_export_carries_no_example_and_no_staging_path(exporter, export_dir):
    requests = list(warmup.read_requests(export_dir))
    assert len(requests) == 3 * len(warmup.BATCH_SIZES)
    assert all(not request.inputs["x"].any() for request in requests if request.method == "predict")
    for path in export_dir.rglob("*"):
        if path.is_file():
            assert str(export_dir.parent).encode() not in path.read_bytes(), path
            assert exporter.x[0].tobytes() not in path.read_bytes(), path


def test_a_regression_answers_values(exporter, tmp_path):
    model = build_linear_regression((3, 2))
    weights = [{name: np.full_like(array, k) for name, array in model.init(0).items()} for k in (1, 10, 1000)]
    personal = {"a": weights[1], "b": weights[2]}
    # The tolerance is relative to values this large.
    path = dataclasses.replace(exporter, model=model, global_weights=weights[0], personal_weights=personal).export(
        tmp_path
    )
    servable = load_servable(path)
    outputs = servable.signatures["predict"].outputs
    assert {key: [dimension.size for dimension in info.tensor_shape.dim] for key, info in outputs.items()} == {
        "values": [-1],
        "personalized": [-1],
    }
    answer = servable.predict("", {"client_id": np.array(["b", "", "a"], object), "x": exporter.x[:3]})
    x = exporter.x[:3].astype(np.float64)
    # Six products, their sum with the bias; of terms that may cancel.
    sums, bounds = x.sum(axis=(1, 2)) + 1, gamma(2 + x[0].size) * (np.abs(x).sum(axis=(1, 2)) + 1)
    assert_within(answer["values"], sums * [1000, 1, 10], bounds * [1000, 1, 10])
    np.testing.assert_array_equal(answer["personalized"], [True, False, True])
    manifest = json.loads((path / layout.MANIFEST_FILE).read_text())
    assert manifest["signatures"]["predict"]["outputs"]["values"] == {"dtype": "float32", "shape": [None]}
    assert "classify" not in manifest["signatures"]
    examples = [warmup.example("b", exporter.x[0]), warmup.example("", exporter.x[1])]
    serialised = np.array([one.SerializeToString() for one in examples], object)
    found = servable.on_examples("regress", "regress", serialised)["outputs"]
    assert_within(found, sums[:2] * [1000, 1], bounds[:2] * [1000, 1])


def test_a_client_may_own_only_the_head(exporter, tmp_path):
    heads = {
        client: {name: weights[name] for name in exporter.model.head}
        for client, weights in exporter.personal_weights.items()
    }
    servable = load_servable(exporter.export(tmp_path, personal_weights=heads))
    ids = ["bob", "nobody", "alice"]
    answer = servable.predict("", {"client_id": np.array(ids, object), "x": exporter.x[:3]})
    expected = [
        tf.nn.softmax(exporter.model.predict({**exporter.global_weights, **heads.get(client, {})}, x[np.newaxis]))[0]
        for client, x in zip(ids, exporter.x[:3], strict=True)
    ]
    np.testing.assert_allclose(answer["probabilities"], expected, atol=exporter.rounding())
    np.testing.assert_array_equal(answer["personalized"], [True, False, True])


def test_without_clients_the_global_model_answers_everyone(exporter, tmp_path):
    servable = load_servable(exporter.export(tmp_path, personal_weights={}))
    answer = servable.predict("", {"client_id": np.array(["alice", ""], object), "x": exporter.x[:2]})
    np.testing.assert_allclose(
        answer["probabilities"], exporter.expected(["", ""], exporter.x[:2]), atol=exporter.rounding()
    )
    assert not answer["personalized"].any()


def test_convolutions_with_weights_of_each_client(tmp_path, exporter):
    def init(seed):
        rng = np.random.default_rng(seed)
        return {
            "kernel": rng.normal(size=(3, 3, 1, 2)).astype(np.float32),
            "head": rng.normal(size=(2, 3)).astype(np.float32),
        }

    def predict(weights, x):
        features = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, weights["kernel"], 1, "SAME")), 2, 2, "SAME")
        return tf.reduce_mean(features, [1, 2]) @ weights["head"]

    model = Model("toy_cnn", (4, 4, 1), 3, init, predict, ("head",))
    x = np.random.default_rng(1).normal(size=(2, 4, 4, 1)).astype(np.float32)
    personal = {"a": init(1), "b": init(2)}
    cnn = dataclasses.replace(exporter, model=model, global_weights=init(0), personal_weights=personal, x=x)
    # The export verifies itself against `model.predict`, client by client.
    servable = load_servable(cnn.export(tmp_path))
    answer = servable.predict("", {"client_id": np.array(["b", "a"], object), "x": x})
    np.testing.assert_allclose(answer["probabilities"], cnn.expected(["b", "a"], x), atol=cnn.rounding())


def test_clients_may_share_rows(exporter, tmp_path):
    four = exporter.models()
    models = dataclasses.replace(
        four, client_ids=["a", "b", "c", "d"], rows=np.array([2, 1, 2, 0], np.int32), layout=CLUSTERS
    )
    servable = load_servable(exporter.export(tmp_path, models=models))
    ids = ["a", "b", "c", "d", "e"]
    answer = servable.predict("", {"client_id": np.array(ids, object), "x": exporter.x[:5]})
    expected = exporter.expected(["bob", "alice", "bob", "", ""], exporter.x[:5])
    np.testing.assert_allclose(answer["probabilities"], expected, atol=exporter.rounding())
    # Known is who has a row, be it the global one.
    np.testing.assert_array_equal(answer["personalized"], [True, True, True, True, False])


def test_weights_may_be_made_of_descriptors(exporter, tmp_path):
    hypernetwork = Hypernetwork(3, (4,), seed=1)
    parameters = hypernetwork.init({name: tf.constant(array) for name, array in exporter.global_weights.items()})
    descriptors = np.random.default_rng(2).normal(size=(3, 3)).astype(np.float32)
    models = PersonalModels(
        model=exporter.model,
        client_ids=["a", "b"],
        rows=np.array([1, 2], np.int32),
        shared={name: tensor.numpy() for name, tensor in parameters.items()},
        stacked={"descriptor": descriptors},
        make_weights=lambda shared, own: hypernetwork.generate(shared, own["descriptor"]),
        layout=HYPERNETWORK,
    )
    servable = load_servable(exporter.export(tmp_path, models=models))
    answer = servable.predict("", {"client_id": np.array(["b", "", "a"], object), "x": exporter.x[:3]})
    expected = [
        tf.nn.softmax(
            exporter.model.predict(hypernetwork.generate(parameters, tf.constant(descriptors[row])), x[np.newaxis])
        )[0]
        for row, x in zip([2, 0, 1], exporter.x[:3], strict=True)
    ]
    # Weights have errors of their own, as sums over descriptor and hidden units: fewer terms than those of the model.
    magnitudes = {name: tf.abs(tensor) for name, tensor in parameters.items()}
    terms = hypernetwork.generate(magnitudes, tf.constant(np.abs(descriptors).max(axis=0)))
    terms = {name: tensor.numpy() for name, tensor in terms.items()}
    bound = 2 * dataclasses.replace(exporter, global_weights=terms, personal_weights={}).rounding()
    np.testing.assert_allclose(answer["probabilities"], expected, atol=bound)


def test_answers_must_be_those_of_the_references(exporter, tmp_path):
    references = {"": exporter.global_weights, "bob": exporter.personal_weights["bob"]}
    assert exporter.export(tmp_path, references=references).name == "1"
    with pytest.raises(ServingError, match="differently from the model"):
        exporter.export(tmp_path, references={"bob": exporter.personal_weights["alice"]})
    with pytest.raises(ServingError, match="no such client"):
        exporter.export(tmp_path, references={"carol": exporter.global_weights})
    assert [path.name for path in layout.published_versions(tmp_path).values()] == ["1"]


def test_requests_without_examples_get_no_answers(export_dir):
    servable = load_servable(export_dir)
    answer = servable.predict("", {"client_id": np.array([], object), "x": np.zeros((0, 3, 2), np.float32)})
    assert answer["probabilities"].shape == (0, 4)


def test_version_numbers_rise_and_are_never_reused(exporter, tmp_path):
    assert exporter.export(tmp_path).name == "1"
    (tmp_path / "1").rename(tmp_path / "5")
    assert exporter.export(tmp_path).name == "6"
    shutil.rmtree(tmp_path / "6")
    assert exporter.export(tmp_path).name == "7"
    (tmp_path / "7").rename(tmp_path / str(2**63 - 1))
    with pytest.raises(ServingError, match="never reused"):
        exporter.export(tmp_path)


def test_failed_verification_leaves_nothing(exporter, tmp_path):
    lying = dataclasses.replace(exporter.model, predict=_differs_between_calls(exporter.model.predict))
    with pytest.raises(ServingError, match="differently from the model"):
        dataclasses.replace(exporter, model=lying).export(tmp_path)
    assert layout.published_versions(tmp_path) == {}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_killed_export_leaves_nothing_that_looks_complete_and_the_next_removes_its_weights(tmp_path, caplog):
    program = (
        "import os, pathlib, sys\n"
        "from serving.export.versions import hold, staged_version\n"
        "with hold(pathlib.Path(sys.argv[1])) as held, staged_version(held) as (version, staging):\n"
        "    (staging / 'saved_model.pb').write_bytes(b'weights')\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    assert (tmp_path / "1.tmp" / "saved_model.pb").read_bytes() == b"weights"
    assert layout.published_versions(tmp_path) == {}
    (tmp_path / "notes.tmp").write_text("not an export's")
    with versions.hold(tmp_path) as held, versions.staged_version(held) as (version, staging):
        # Nothing was published under the number.
        assert (version, list(staging.iterdir())) == (1, [])
    assert "1.tmp is removed: the process that wrote it was stopped" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".last_version", "1", "notes.tmp"]


def test_a_number_is_not_reused_by_whoever_is_killed_while_publishing(tmp_path, monkeypatch):
    with versions.hold(tmp_path) as held:
        with monkeypatch.context() as patch:
            patch.setattr(versions, "sync", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt), versions.staged_version(held):
                pass
        with versions.staged_version(held) as (version, _):
            assert version == 2


def test_two_do_not_export_to_one_path_at_the_same_time(exporter, tmp_path):
    base_path = tmp_path / "base"
    with versions.hold(base_path) as held:
        with pytest.raises(DataError, match=rf"process {os.getpid()} writes to {base_path}: wait"):
            exporter.export(base_path)
        assert list(held.glob("[0-9]*")) == []
    assert exporter.export(base_path).name == "1"


def test_a_version_that_was_put_there_meanwhile_keeps_its_number(tmp_path):
    with versions.hold(tmp_path) as held:
        with pytest.raises(ServingError, match="Version 7 was put under"), versions.staged_version(held):
            (tmp_path / "7").mkdir()
        assert (versions.last_version(tmp_path), list(layout.published_versions(tmp_path))) == (7, [7])


def test_what_a_version_answers_is_what_its_model_must_answer(exporter, export_dir, tmp_path):
    models = exporter.models()
    answers = expectations_of_version(export_dir, models)
    assert list(answers) == ["", *models.client_ids]
    x = answers["bob"].inputs["x"]
    np.testing.assert_allclose(
        answers["bob"].outputs["probabilities"], exporter.expected(["bob"] * len(x), x), atol=exporter.rounding()
    )
    assert exporter.export(tmp_path, further_expectations=list(answers.values())).name == "1"
    with pytest.raises(ServingError, match="differently from the model"):
        others = {**exporter.personal_weights, "bob": exporter.personal_weights["alice"]}
        exporter.export(tmp_path, others, further_expectations=list(answers.values()))
    # Weights of the same names and shapes, and another function.
    scaled = build_mlp((3, 2), num_classes=4, hidden_units=(5,), input_scale=5.0)
    with pytest.raises(ServingError, match="differently from the model"):
        expectations_of_version(export_dir, dataclasses.replace(models, model=scaled))


@pytest.mark.parametrize("client_id", ["", "a\nb", "a\rb", "<global>"])
def test_ids_that_break_the_vocabulary_are_refused(exporter, tmp_path, client_id):
    with pytest.raises(ServingError, match="cannot be exported"):
        exporter.export(tmp_path, personal_weights={client_id: exporter.global_weights})
    assert not list(tmp_path.iterdir())


def test_ids_must_be_different(exporter, tmp_path):
    models = dataclasses.replace(exporter.models(), client_ids=["a", "b", "a"])
    with pytest.raises(ServingError, match="two clients have it"):
        exporter.export(tmp_path, models=models)
    assert not list(tmp_path.iterdir())


def test_arguments_that_do_not_fit_the_model_are_refused(exporter, tmp_path):
    models, weights = exporter.models(), exporter.global_weights
    bias = "dense_0/bias"

    def with_stack(name, stack):
        return {"models": dataclasses.replace(models, stacked={**models.stacked, name: stack})}

    def with_rows(rows):
        return {"models": dataclasses.replace(models, rows=np.array(rows))}

    stack = models.stacked[bias]
    without_bias = {name: array for name, array in models.stacked.items() if name != bias}
    broken = np.where(np.arange(4)[:, np.newaxis] == 2, np.float32(np.nan), stack)
    cases = [
        ({"models": dataclasses.replace(models, stacked=without_bias)}, "Weights of the global model are"),
        (with_stack("unknown", stack), "Weights of the global model are"),
        (with_stack(bias, np.zeros((4, 6), np.float32)), r"has shape \(6,\); the model needs \(5,\)"),
        (with_stack(bias, stack[:3]), "the same number of rows"),
        (with_stack(bias, stack.astype(np.float64)), "is float64"),
        (with_stack(bias, broken), "'dense_0/bias' of client 'bob' has a value that is not finite"),
        ({"models": dataclasses.replace(models, shared={bias: weights[bias]})}, "both shared and stacked"),
        (with_rows([1, 2]), "rows is int64"),
        ({"models": dataclasses.replace(models, rows=np.array([1, 4, 2], np.int32))}, "'bob' has row 4"),
        ({"models": dataclasses.replace(models, layout="other")}, "no layout"),
        ({"models": dataclasses.replace(models, layout=HYPERNETWORK)}, "needs make_weights, other layouts"),
        ({"model_name": "../up"}, "cannot be served"),
        ({"model_card": {"accuracy": float("nan")}}, "model_card.json cannot be written"),
    ]
    for changes, message in cases:
        with pytest.raises(ServingError, match=message):
            exporter.export(tmp_path / "base", **changes)
    if (tmp_path / "base").exists():
        assert layout.published_versions(tmp_path / "base") == {}
        assert not list((tmp_path / "base").glob("*.tmp"))


def test_python_functions_in_the_graph_are_refused(exporter, tmp_path):
    def predict(weights, x):
        return tf.numpy_function(lambda logits: logits, [exporter.model.predict(weights, x)], tf.float32)

    model = Model("python", (3, 2), 4, exporter.model.init, predict, ())
    with pytest.raises(ServingError, match="PyFunc"):
        dataclasses.replace(exporter, model=model).export(tmp_path, personal_weights={})


def test_changed_missing_and_added_files_are_refused(copy):
    vocabulary = next((copy / "assets").iterdir())
    original = vocabulary.read_bytes()
    vocabulary.write_bytes(original.replace(b"alice", b"malic"))
    with pytest.raises(ServingError, match="does not match the SHA-256"):
        check_export(copy)
    vocabulary.unlink()
    with pytest.raises(ServingError, match="lacks assets/"):
        check_export(copy)
    vocabulary.write_bytes(original)
    (copy / layout.EXTRA_DIRECTORY / "more").write_bytes(b"")
    with pytest.raises(ServingError, match=r"holds assets\.extra/more"):
        check_export(copy)
    (copy / layout.MANIFEST_FILE).unlink()
    with pytest.raises(ServingError, match="not a complete export"):
        check_export(copy)


def _differs_between_calls(predict):
    calls = []

    def changing(weights, x):
        calls.append(x)
        return predict(weights, x) * float(len(calls))

    return changing
