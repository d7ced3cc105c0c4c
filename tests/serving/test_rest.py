import http.client
import json

import numpy as np
import pytest


@pytest.fixture
def call(server):
    """Sends one request and returns its status and JSON body."""

    def send(method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
        try:
            payload = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, payload, headers or {})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    return send


def _row(client_id="alice", x=None):
    return {"client_id": client_id, "x": np.zeros((3, 2)).tolist() if x is None else x}


def test_rows_and_columns_give_the_same_answer(call, exporter):
    ids, x = ["alice", "stranger"], exporter.x[:2].tolist()
    status, rows = call(
        "POST", "/v1/models/toy:predict", {"instances": [_row(*pair) for pair in zip(ids, x, strict=True)]}
    )
    assert status == 200
    status, columns = call("POST", "/v1/models/toy/versions/1:predict", {"inputs": {"client_id": ids, "x": x}})
    assert status == 200
    assert [row["probabilities"] for row in rows["predictions"]] == columns["outputs"]["probabilities"]
    assert [row["personalized"] for row in rows["predictions"]] == columns["outputs"]["personalized"] == [True, False]


def test_base64_ids_and_the_second_signature(call):
    body = {"signature_name": "predict", "instances": [_row({"b64": "YWxpY2U="})]}
    status, answer = call("POST", "/v1/models/toy:predict", body)
    assert status == 200
    assert answer["predictions"][0]["personalized"] is True


def test_status_and_metadata(call):
    expected = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/toy", "/v1/models/toy/versions/1"):
        assert call("GET", path) == (200, {"model_version_status": [expected]})
    for path in ("/v1/models/toy/metadata", "/v1/models/toy/versions/1/metadata"):
        status, metadata = call("GET", path)
        assert status == 200
        assert metadata["model_spec"] == {"name": "toy", "signature_name": "", "version": "1"}
        signatures = metadata["metadata"]["signature_def"]["signature_def"]
        assert signatures["serving_default"]["inputs"]["x"]["dtype"] == "DT_FLOAT"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/models", 400, "Missing model name in request."),
        ("GET", "/v1/models/other", 404, "Could not find any versions of model other"),
        ("GET", "/v1/models/toy/versions/7", 404, "Could not find version 7 of model toy"),
        ("GET", "/v1/models/toy/versions/7/metadata", 404, "Servable not found for request: Specific(toy, 7)"),
        ("POST", "/v1/models/toy/versions/7:predict", 404, "Servable not found for request: Specific(toy, 7)"),
        ("POST", "/v1/models/..%2f..%2fetc:predict", 404, "Servable not found for request: Latest(../../etc)"),
        ("GET", f"/v1/models/toy/versions/{2**63}", 400, f"Failed to convert version: {2**63} to numeric."),
        ("GET", "/v1/models/toy/labels/stable", 400, "Unrecognized servable version label: stable"),
        ("POST", "/v1/models/toy:explode", 400, "Malformed request: POST /v1/models/toy:explode"),
        ("GET", "/v1/models/toy:predict", 400, "Malformed request: GET /v1/models/toy:predict"),
        ("POST", "/v1/models/toy", 400, "Malformed request: POST /v1/models/toy"),
        ("DELETE", "/v1/models/toy", 400, "Malformed request: DELETE /v1/models/toy"),
        ("GET", "/elsewhere", 404, "Not found"),
    ],
)
def test_paths_that_are_refused(call, method, path, status, message):
    assert call(method, path) == (status, {"error": message})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON Parse error: The document is empty"),
        (b'{"instances": [', "JSON Parse error: Expecting value at offset: 15"),
        (b"\xff", "JSON Parse error"),
        (b"[" * 30000, "nested too deeply"),
        ([1], "JSON Value: [1] Is not object"),
        ({}, "Missing 'inputs' or 'instances' key"),
        ({"inputs": {}, "instances": []}, "expecting only one of 'inputs' or 'instances' keys to exist"),
        ({"instances": []}, "No values in 'instances' array"),
        ({"instances": {}}, "Expecting 'instances' to be an list/array"),
        ({"instances": [1]}, "instances is a plain list, but expecting list of objects"),
        ({"inputs": [1]}, "expecting an object"),
        ({"instances": [_row(), {"x": 1}]}, "Failed to process element: 1 of 'instances' list."),
        ({"signature_name": 3, "instances": [_row()]}, "'signature_name' key must be a string value."),
        ({"signature_name": "s", "instances": [_row()]}, 'Serving signature name: "s" not found in signature def'),
        ({"inputs": {"client_id": ["a"]}}, "Missing but required: {x}."),
        ({"inputs": {"client_id": ["a"], "x": [1], "z": [1]}}, "Sent extra: {z}."),
        ({"inputs": {"client_id": ["a"], "y": [1]}}, "input tensor alias not found in signature: y."),
        ({"instances": [_row(client_id=7)]}, "JSON Value: 7 Type: Number is not of expected type: string"),
        ({"instances": [_row({"b64": "?"})]}, "Unable to base64 decode"),
        ({"instances": [_row(x=[[0, 0], [0, "q"], [0, 0]])]}, 'JSON Value: "q" Type: String is not of expected type'),
        ({"instances": [_row(x=[[0, 0], [0, True], [0, 0]])]}, "Type: Bool is not of expected type: float32"),
        ({"instances": [_row(x=[[0, 0], [0], [0, 0]])]}, "Encountered list at unexpected size: 1"),
        ({"instances": [_row(x=[[0, 0], 0, [0, 0]])]}, "Type: Number is not of expected type: Array"),
        ({"instances": [_row(x=[[1e39, 0], [0, 0], [0, 0]])]}, "x must be finite"),
        ({"instances": [_row(x=[[10**400, 0], [0, 0], [0, 0]])]}, "does not fit the expected type"),
        ({"inputs": {"client_id": [], "x": []}}, "input x has shape [0]"),
    ],
)
def test_bodies_that_are_refused(call, body, message):
    status, answer = call("POST", "/v1/models/toy:predict", body)
    assert status == 400
    assert message in answer["error"]


def test_oversized_body_is_refused_unread(call, server):
    status, answer = call("POST", "/v1/models/toy:predict", b"x" * ((1 << 16) + 1))
    assert status == 413
    assert answer == {"error": "The body has 65537 bytes; this server accepts 65536."}


def test_bodies_of_unknown_length_are_refused(call):
    status, _ = call("POST", "/v1/models/toy:predict", b"0\r\n\r\n", {"Transfer-Encoding": "chunked"})
    assert status == 411
    status, _ = call("POST", "/v1/models/toy:predict", b"", {"Content-Length": "-1"})
    assert status == 400
