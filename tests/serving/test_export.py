import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from serving import layout, loader, versions, warmup
from serving.checks import check_export
from serving.manifest import write_manifest
from tff_pdp.errors import ServingError
from tff_pdp.models.base import Model
from tff_pdp.models.linear_regression import build_linear_regression


@pytest.fixture
def copy(export_dir, tmp_path):
    return shutil.copytree(export_dir, tmp_path / "copy")


def test_both_signatures_have_the_promised_keys_types_and_open_batches(export_dir):
    signatures = loader.load_servable(export_dir).signatures
    for name in ("serving_default", "predict"):
        described = {
            key: (tf.as_dtype(info.dtype).name, [dimension.size for dimension in info.tensor_shape.dim])
            for key, info in (*signatures[name].inputs.items(), *signatures[name].outputs.items())
        }
        assert described == {
            "client_id": ("string", [-1]),
            "x": ("float32", [-1, 3, 2]),
            "probabilities": ("float32", [-1, 4]),
            "personalized": ("bool", [-1]),
        }


def test_manifest_hashes_every_file(export_dir):
    manifest = json.loads((export_dir / layout.MANIFEST_FILE).read_text())
    files = {path.relative_to(export_dir).as_posix() for path in export_dir.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {layout.MANIFEST_FILE}
    card = (export_dir / layout.MODEL_CARD_FILE).read_bytes()
    assert manifest["files"][layout.MODEL_CARD_FILE] == hashlib.sha256(card).hexdigest()
    assert manifest["tensorflow_version"] == tf.__version__
    assert manifest["num_clients"] == 3
    assert json.loads((export_dir / layout.PRIVACY_REPORT_FILE).read_text()) == {"claim": "none"}


def test_export_carries_no_example_and_no_staging_path(exporter, export_dir):
    requests = list(warmup.read_requests(export_dir))
    assert len(requests) == len(layout.SIGNATURE_NAMES) * len(warmup.BATCH_SIZES)
    assert all(not request.inputs["x"].any() for request in requests)
    for path in export_dir.rglob("*"):
        if path.is_file():
            assert str(export_dir.parent).encode() not in path.read_bytes(), path
            assert exporter.x[0].tobytes() not in path.read_bytes(), path


def test_a_regression_answers_values(exporter, tmp_path):
    model = build_linear_regression((3, 2))
    weights = [{name: np.full_like(array, k) for name, array in model.init(0).items()} for k in (1, 10, 1000)]
    # The tolerance is relative to values this large.
    path = type(exporter)(model, weights[0], {"a": weights[1], "b": weights[2]}, exporter.x).export(tmp_path)
    servable = loader.load_servable(path)
    outputs = servable.signatures["predict"].outputs
    assert {key: [dimension.size for dimension in info.tensor_shape.dim] for key, info in outputs.items()} == {
        "values": [-1],
        "personalized": [-1],
    }
    answer = servable.predict("", {"client_id": np.array(["b", "", "a"], object), "x": exporter.x[:3]})
    sums = exporter.x[:3].sum(axis=(1, 2)) + 1
    np.testing.assert_allclose(answer["values"], sums * [1000, 1, 10], rtol=1e-5)
    np.testing.assert_array_equal(answer["personalized"], [True, False, True])
    manifest = json.loads((path / layout.MANIFEST_FILE).read_text())
    assert manifest["signatures"]["predict"]["outputs"]["values"] == {"dtype": "float32", "shape": [None]}


def test_a_client_may_own_only_the_head(exporter, tmp_path):
    heads = {
        client: {name: weights[name] for name in exporter.model.head}
        for client, weights in exporter.personal_weights.items()
    }
    servable = loader.load_servable(exporter.export(tmp_path, personal_weights=heads))
    ids = ["bob", "nobody", "alice"]
    answer = servable.predict("", {"client_id": np.array(ids, object), "x": exporter.x[:3]})
    expected = [
        tf.nn.softmax(exporter.model.predict({**exporter.global_weights, **heads.get(client, {})}, x[np.newaxis]))[0]
        for client, x in zip(ids, exporter.x[:3], strict=True)
    ]
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-6)
    np.testing.assert_array_equal(answer["personalized"], [True, False, True])


def test_without_clients_the_global_model_answers_everyone(exporter, tmp_path):
    servable = loader.load_servable(exporter.export(tmp_path, personal_weights={}))
    answer = servable.predict("", {"client_id": np.array(["alice", ""], object), "x": exporter.x[:2]})
    np.testing.assert_allclose(answer["probabilities"], exporter.expected(["", ""], exporter.x[:2]), atol=1e-6)
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
    # The export validates itself against `model.predict`, client by client.
    path = type(exporter)(model, init(0), {"a": init(1), "b": init(2)}, x).export(tmp_path)
    assert path.name == "1"


def test_version_numbers_rise_and_are_never_reused(exporter, tmp_path):
    assert exporter.export(tmp_path).name == "1"
    assert exporter.export(tmp_path, version=5).name == "5"
    shutil.rmtree(tmp_path / "5")
    assert exporter.export(tmp_path).name == "6"
    for version in (0, 2, 5, 6, 2**63):
        with pytest.raises(ServingError, match="never reused"):
            exporter.export(tmp_path, version=version)


def test_failed_validation_leaves_nothing(exporter, tmp_path):
    lying = Model("lying", (3, 2), 4, exporter.model.init, _differs_between_calls(exporter.model.predict), ())
    with pytest.raises(ServingError, match="differently from the model"):
        type(exporter)(lying, exporter.global_weights, {}, exporter.x).export(tmp_path)
    assert layout.published_versions(tmp_path) == {}
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_export_leaves_nothing_that_looks_complete(tmp_path):
    program = (
        "import os, pathlib, sys\n"
        "from serving.versions import staged_version\n"
        "with staged_version(pathlib.Path(sys.argv[1])) as (version, staging):\n"
        "    (staging / 'saved_model.pb').write_bytes(b'')\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == ["1.tmp"]
    assert layout.published_versions(tmp_path) == {}
    with versions.staged_version(tmp_path) as (version, _):
        assert version == 2


def test_an_export_that_runs_holds_its_number(tmp_path):
    with versions.staged_version(tmp_path) as (first, _), versions.staged_version(tmp_path) as (second, _):
        assert (first, second) == (1, 2)


@pytest.mark.parametrize("client_id", ["", "a\nb", "a\rb", "<global>"])
def test_ids_that_break_the_vocabulary_are_refused(exporter, tmp_path, client_id):
    with pytest.raises(ServingError, match="cannot be exported"):
        exporter.export(tmp_path, personal_weights={client_id: exporter.global_weights})
    assert not list(tmp_path.iterdir())


def test_arguments_that_do_not_fit_the_model_are_refused(exporter, tmp_path):
    weights = exporter.global_weights
    broken = {**weights, "dense_0/bias": np.array([np.nan] * 5, np.float32)}
    cases = [
        ({"global_weights": {}}, "Global weights are"),
        ({"global_weights": {**weights, "dense_0/bias": np.zeros(6, np.float32)}}, "needs float32"),
        ({"global_weights": {**weights, "dense_0/bias": np.zeros(5)}}, "float64"),
        ({"personal_weights": {"a": broken}}, "'a' has a value that is not finite"),
        ({"personal_weights": {"a": weights, "b": {}}}, "must own the same weights"),
        ({"personal_weights": {"a": {"unknown": weights["dense_0/bias"]}}}, "must own the same weights"),
        ({"example_inputs": np.zeros((1, 2, 3))}, r"needs \[n, 3, 2\]"),
        ({"example_inputs": np.zeros((0, 3, 2))}, "n at least 1"),
        ({"model_name": "../up"}, "cannot be served"),
        ({"model_card": {"accuracy": float("nan")}}, "model_card.json cannot be written"),
    ]
    for changes, message in cases:
        with pytest.raises(ServingError, match=message):
            exporter.export(tmp_path / "base", **changes)
    assert layout.published_versions(tmp_path / "base") == {}
    assert not list((tmp_path / "base").glob("*.tmp"))


def test_python_functions_in_the_graph_are_refused(exporter, tmp_path):
    def predict(weights, x):
        return tf.numpy_function(lambda logits: logits, [exporter.model.predict(weights, x)], tf.float32)

    model = Model("python", (3, 2), 4, exporter.model.init, predict, ())
    with pytest.raises(ServingError, match="PyFunc"):
        type(exporter)(model, exporter.global_weights, {}, exporter.x).export(tmp_path)


def test_asset_outside_the_export_is_refused(copy):
    _rename_asset(copy, "../../secret.txt")
    with pytest.raises(ServingError, match="outside its assets directory"):
        check_export(copy)


def test_links_are_refused(copy, tmp_path):
    vocabulary = next((copy / "assets").iterdir())
    vocabulary.rename(tmp_path / "elsewhere")
    vocabulary.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ServingError, match="is a link"):
        check_export(copy)


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
    (copy / "extra").write_bytes(b"")
    with pytest.raises(ServingError, match="holds extra"):
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


def _rename_asset(export_dir, filename):
    """What an attacker does: points the asset elsewhere and makes the manifest agree."""
    from tensorflow.core.protobuf import saved_model_pb2

    path = export_dir / layout.SAVED_MODEL_FILE
    saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    saved_model.meta_graphs[0].asset_file_def[0].filename = filename
    path.write_bytes(saved_model.SerializeToString())
    write_manifest(export_dir, {})
