"""The REST API as TensorFlow Serving documents it, in requests that our client does not send."""

import base64
import json

import numpy as np
import pytest

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

PREDICT = f"/v1/models/{CLASSIFIER}:predict"
X = np.array([[[0.0], [0.5]], [[1.0], [0.25]]])


def _post(send, path, document) -> tuple[int, dict]:
    status, body = send("POST", path, document if isinstance(document, bytes) else json.dumps(document).encode())
    return status, json.loads(body)


def _row(client_id="alice", x=None):
    return {"client_id": client_id, "x": X.tolist() if x is None else x}


def test_rows_and_columns(send):
    expected = classifier(CANARY).expected(["alice", "nobody"], np.array([X, X]))
    status, rows = _post(send, PREDICT, {"instances": [_row(), _row("nobody")]})
    assert status == 200
    np.testing.assert_allclose([row["probabilities"] for row in rows["predictions"]], expected, atol=TOLERANCE)
    assert [row["personalized"] for row in rows["predictions"]] == [True, False]
    columns = {"client_id": ["alice", "nobody"], "x": [X.tolist()] * 2, "not an input": "ignored"}
    status, answer = _post(send, PREDICT, {"signature_name": "predict", "inputs": columns})
    assert status == 200
    np.testing.assert_allclose(answer["outputs"]["probabilities"], expected, atol=TOLERANCE)
    assert answer["outputs"]["personalized"] == [True, False]


def test_text_in_base64(send):
    encoded = {"b64": base64.b64encode("é ü".encode()).decode()}
    status, answer = _post(send, PREDICT, {"instances": [_row(encoded)]})
    assert status == 200
    assert answer["predictions"][0]["personalized"] is True


def test_whole_numbers_are_floats_too(send):
    status, answer = _post(send, f"/v1/models/{REGRESSION}:predict", {"instances": [_row(x=[1, 2, 3])]})
    assert status == 200
    expected = regression().expected(["alice"], np.array([[1.0, 2.0, 3.0]]))
    np.testing.assert_allclose(answer["predictions"][0]["values"], expected[0], atol=REGRESSION_TOLERANCE)


def test_examples_with_a_context(send):
    document = {
        "signature_name": "regress",
        "context": {"client_id": "bob"},
        "examples": [{"x": [1.0, 2.0, 3.0]}, {"x": [0.0, 0.0, 0.5]}],
    }
    status, answer = _post(send, f"/v1/models/{REGRESSION}:regress", document)
    assert status == 200
    expected = regression().expected(["bob"] * 2, np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.5]]))
    np.testing.assert_allclose(answer["results"], expected, atol=REGRESSION_TOLERANCE)


def test_examples_without_a_client_get_the_global_model(send):
    document = {"signature_name": "classify", "examples": [{"x": [0.0, 0.5, 1.0, 0.25]}]}
    status, answer = _post(send, f"/v1/models/{CLASSIFIER}/labels/stable:classify", document)
    assert status == 200
    (result,) = answer["results"]
    assert [label for label, _ in result] == ["0", "1", "2"]
    scores = [score for _, score in result]
    np.testing.assert_allclose(scores, classifier(STABLE).expected([""], X[np.newaxis])[0], atol=TOLERANCE)


def test_status_and_metadata_documents(send):
    status, body = send("GET", f"/v1/models/{CLASSIFIER}/versions/{STABLE}")
    assert (status, json.loads(body)) == (
        200,
        {
            "model_version_status": [
                {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
            ]
        },
    )
    status, body = send("GET", f"/v1/models/{CLASSIFIER}/labels/canary/metadata")
    assert status == 200
    document = json.loads(body)
    assert document["model_spec"] == {"name": CLASSIFIER, "signature_name": "", "version": "2"}
    signatures = document["metadata"]["signature_def"]["signature_def"]
    assert signatures["serving_default"]["inputs"]["x"]["tensor_shape"]["dim"][0] == {"size": "-1", "name": ""}


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/models", 400, "Missing model name in request."),
        ("GET", "/v1/models/nothing", 404, "Could not find any versions of model nothing"),
        ("GET", f"/v1/models/{CLASSIFIER}/versions/7", 404, f"Could not find version 7 of model {CLASSIFIER}"),
        ("GET", f"/v1/models/{CLASSIFIER}/versions/{2**63}", 400, "to numeric."),
        ("POST", "/v1/models/nothing:predict", 404, "Servable not found for request: Latest(nothing)"),
        ("POST", "/v1/models/..%2f..%2fetc:predict", 404, "Servable not found for request: Latest("),
        ("POST", f"/v1/models/{CLASSIFIER}:explode", 400, "Malformed request: POST"),
        ("GET", PREDICT, 400, "Malformed request: GET"),
        ("DELETE", f"/v1/models/{CLASSIFIER}", 400, "Malformed request: DELETE"),
    ],
)
def test_paths_that_are_refused(send, method, path, status, message):
    body = json.dumps({"instances": [_row()]}).encode() if method == "POST" else None
    found, answer = send(method, path, body)
    assert found == status
    assert message in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "JSON Parse error"),
        (b'{"instances": [', "JSON Parse error"),
        ([1], "Is not object"),
        ({}, "Missing 'inputs' or 'instances' key"),
        ({"inputs": {}, "instances": [_row()]}, "expecting only one of 'inputs' or 'instances' keys to exist"),
        ({"instances": []}, "No values in 'instances' array"),
        ({"instances": {}}, "Expecting 'instances' to be an list/array"),
        ({"instances": [1]}, "instances is a plain list, but expecting list of objects"),
        ({"instances": [_row(), {"x": X.tolist()}]}, "Failed to process element: 1 of 'instances' list. JSON object"),
        ({"signature_name": "s", "instances": [_row()]}, 'Serving signature name: "s" not found in signature def'),
        ({"inputs": [1]}, "inputs is a plain value/list, but expecting an object"),
        ({"inputs": {"client_id": ["a"]}}, "Missing named input: x in 'inputs' object."),
        ({"instances": [_row(7)]}, "is not of expected type: string"),
        ({"instances": [_row({"b64": "?"})]}, "Unable to base64 decode"),
        ({"instances": [_row(x=[[[0], [0]], [[0], ["q"]]])]}, "is not of expected type: float"),
        ({"instances": [_row(x=[[[0], [0]], [[0]]])]}, "Encountered list at unexpected size: 1"),
        ({"instances": [_row(x=[[[0], [float("nan")]], [[0], [0]]])]}, "x must be finite"),
        ({"instances": [_row(x=[[[0], [float("-inf")]], [[0], [0]]])]}, "x must be finite"),
        ({"inputs": {"client_id": ["a", "b"], "x": [X.tolist()]}}, ""),
    ],
)
def test_bodies_that_are_refused(send, document, message):
    status, answer = _post(send, PREDICT, document)
    assert status == 400
    assert message in answer["error"]
