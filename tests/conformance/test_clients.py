"""What the clients of this package are answered."""

import io

import numpy as np
import pytest
from PIL import Image

from serving.client.calls import ServerError
from tests.conformance import models
from tests.conformance.models import (
    CANARY,
    CLASSIFIER,
    REGRESSION,
    REGRESSION_TOLERANCE,
    STABLE,
    TOLERANCE,
    classifier,
    regression,
)

# `test_rollout.py` alone starts a server in every change.
pytestmark = pytest.mark.all

MIXED = ["alice", "nobody", "é ü", "", "bob", "alice"]
PERSONAL = [True, False, True, False, True, True]


def _images(number: int) -> np.ndarray:
    return np.random.default_rng(1).random((number, *models.IMAGE_SHAPE)).astype(np.float32)


def _features(number: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(number, models.NUM_FEATURES)).astype(np.float32)


@pytest.mark.parametrize(
    ("which", "version"),
    [
        ({}, CANARY),
        ({"version": STABLE}, STABLE),
        ({"version": CANARY}, CANARY),
        ({"label": "stable"}, STABLE),
        ({"label": "canary"}, CANARY),
    ],
    ids=str,
)
def test_predict_by_version_and_label(client, which, version):
    x = _images(6)
    prediction = client.predict(CLASSIFIER, MIXED, x, **which)
    np.testing.assert_allclose(prediction.answers, classifier(version).expected(MIXED, x), atol=TOLERANCE)
    assert prediction.personalized.tolist() == PERSONAL


@pytest.mark.parametrize("client_id", ["alice", "é ü", "nobody", "", "<global>"])
def test_predict_one_example(client, client_id):
    x = _images(1)
    prediction = client.predict(CLASSIFIER, [client_id], x)
    np.testing.assert_allclose(prediction.answers, classifier(CANARY).expected([client_id], x), atol=TOLERANCE)
    assert prediction.personalized.tolist() == [client_id in models.CLIENT_IDS]


def test_predict_a_regression(client):
    x = _features(6)
    prediction = client.predict(REGRESSION, MIXED, x)
    np.testing.assert_allclose(prediction.answers, regression().expected(MIXED, x), atol=REGRESSION_TOLERANCE)
    assert prediction.personalized.tolist() == PERSONAL


def test_classify_and_regress(client):
    x = _images(6)
    classification = client.classify(CLASSIFIER, MIXED, x, label="stable")
    assert classification.classes.tolist() == [["0", "1", "2"]] * 6
    np.testing.assert_allclose(classification.scores, classifier(STABLE).expected(MIXED, x), atol=TOLERANCE)
    x = _features(6)
    np.testing.assert_allclose(
        client.regress(REGRESSION, MIXED, x).values, regression().expected(MIXED, x), atol=REGRESSION_TOLERANCE
    )


def test_images(client):
    pixels = np.random.default_rng(3).integers(0, 256, (6, 2, 2), dtype=np.uint8)
    prediction = client.predict_images(CLASSIFIER, MIXED, [_png(one) for one in pixels])
    expected = classifier(CANARY).expected(MIXED, pixels / 255)
    np.testing.assert_allclose(prediction.answers, expected, atol=TOLERANCE)
    assert prediction.personalized.tolist() == PERSONAL
    with pytest.raises(ServerError) as raised:
        client.predict_images(CLASSIFIER, ["alice"], [b"no image"])
    assert raised.value.code in ("INVALID_ARGUMENT", "400")


def test_batches_beyond_what_the_server_merges(client):
    ids, x = (MIXED * 30)[:150], _images(150)
    prediction = client.predict(CLASSIFIER, ids, x)
    np.testing.assert_allclose(prediction.answers, classifier(CANARY).expected(ids, x), atol=TOLERANCE)


def test_status(client):
    states = {state.version: state for state in client.status(CLASSIFIER)}
    assert {version: state.state for version, state in states.items()} == {STABLE: "AVAILABLE", CANARY: "AVAILABLE"}
    assert all(state.error_code == "OK" for state in states.values())
    assert [state.version for state in client.status(CLASSIFIER, version=STABLE)] == [STABLE]


def test_metadata(client):
    metadata = client.metadata(CLASSIFIER, label="stable")
    assert (metadata.model_name, metadata.version) == (CLASSIFIER, STABLE)
    assert {"serving_default", "predict", "predict_images", "classify"} <= set(metadata.signatures)
    signature = metadata.signatures["serving_default"]
    described = {key: (tensor.dtype, tensor.shape) for key, tensor in {**signature.inputs, **signature.outputs}.items()}
    assert described == {
        "client_id": ("DT_STRING", (None,)),
        "x": ("DT_FLOAT", (None, 2, 2, 1)),
        "probabilities": ("DT_FLOAT", (None, 3)),
        "personalized": ("DT_BOOL", (None,)),
    }
    assert metadata.signatures["classify"].method_name == "tensorflow/serving/classify"
    assert client.metadata(CLASSIFIER).version == CANARY


@pytest.mark.parametrize(
    ("name", "which", "codes", "message"),
    [
        ("nothing", {}, ("NOT_FOUND", "404"), "Servable not found for request: Latest(nothing)"),
        (
            CLASSIFIER,
            {"version": 7},
            ("NOT_FOUND", "404"),
            f"Servable not found for request: Specific({CLASSIFIER}, 7)",
        ),
        (CLASSIFIER, {"label": "beta"}, ("INVALID_ARGUMENT", "400"), "Unrecognized servable version label: beta"),
    ],
)
def test_models_versions_and_labels_that_are_not_there(client, name, which, codes, message):
    calls = [lambda: client.predict(name, ["alice"], _images(1), **which), lambda: client.metadata(name, **which)]
    for call in calls:
        with pytest.raises(ServerError) as raised:
            call()
        assert raised.value.code in codes
        assert message in raised.value.message


def test_states_of_what_is_not_there(client):
    for which, message in (
        ({"model_name": "nothing"}, "Could not find any versions of model nothing"),
        ({"model_name": CLASSIFIER, "version": 7}, f"Could not find version 7 of model {CLASSIFIER}"),
    ):
        with pytest.raises(ServerError) as raised:
            client.status(**which)
        assert raised.value.code in ("NOT_FOUND", "404")
        assert message in raised.value.message


@pytest.mark.parametrize(
    "x",
    [np.full((1, 2, 2, 1), np.nan), np.full((1, 2, 2, 1), np.inf), np.zeros((1, 2, 2)), np.zeros((1, 3, 2, 1))],
    ids=["nan", "infinity", "rank", "shape"],
)
def test_inputs_that_the_graph_refuses(client, x):
    with pytest.raises(ServerError) as raised:
        client.predict(CLASSIFIER, ["alice"], x)
    assert raised.value.code in ("INVALID_ARGUMENT", "400")


def test_classify_asks_a_classifier(client):
    with pytest.raises(ServerError) as raised:
        client.classify(REGRESSION, ["alice"], _features(1))
    assert raised.value.code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "400")


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels, "L").save(file, "PNG")
    return file.getvalue()
