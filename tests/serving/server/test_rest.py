import gzip
import http.client
import json
import socket
import threading
import zlib

import numpy as np
import pytest

from serving.server import rest_api
from tests.rounding import assert_within, gamma


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


def test_examples_are_classified_with_their_context(call, exporter):
    x = exporter.x[:2]
    examples = [{"x": one.ravel().tolist()} for one in x]
    body = {"signature_name": "classify", "context": {"client_id": "alice"}, "examples": examples}
    status, answer = call("POST", "/v1/models/toy:classify", body)
    assert status == 200
    assert [[label for label, _ in row] for row in answer["results"]] == [["0", "1", "2", "3"]] * 2
    scores = [[score for _, score in row] for row in answer["results"]]
    np.testing.assert_allclose(scores, exporter.expected(["alice"] * 2, x), atol=exporter.rounding())


def test_examples_are_regressed(call, exporter):
    examples = [
        {"client_id": "ten", "x": exporter.x[0].ravel().tolist()},
        {"client_id": {"b64": "Pw=="}, "x": exporter.x[1].ravel().tolist()},
    ]
    status, answer = call("POST", "/v1/models/line:regress", {"signature_name": "regress", "examples": examples})
    assert status == 200
    x = exporter.x[:2].astype(np.float64)
    # Six products, their sum with the bias; of terms that may cancel.
    bounds = gamma(2 + x[0].size) * (np.abs(x).sum(axis=(1, 2)) + 1) * [10, 1]
    assert_within(answer["results"], (x.sum(axis=(1, 2)) + 1) * [10, 1], bounds)


@pytest.mark.parametrize(
    "body",
    [
        b'{"examples": [{"\\ud800": [1.5]}]}',
        b'{"context": {"\\udfff": 1}, "examples": [{}]}',
        b'{"examples": [{"x": "\\ud800"}]}',
    ],
)
@pytest.mark.parametrize("method", ["classify", "regress"])
def test_examples_with_half_a_surrogate_pair_are_refused(call, method, body):
    error = "JSON Parse error: The surrogate pair in string is invalid."
    assert call("POST", f"/v1/models/toy:{method}", body) == (400, {"error": error})


def test_a_context_is_not_copied_beyond_the_limit_of_bodies(call):
    body = {"signature_name": "classify", "context": {"note": "x" * 10_000}, "examples": [{}] * 7}
    status, answer = call("POST", "/v1/models/toy:classify", body)
    assert status == 429
    assert answer["error"].startswith("7 examples with a context of 10")


def test_a_large_body_is_answered_off_the_event_loop(call, exporter, monkeypatch):
    threads, original = [], rest_api.parse_inputs

    def parse_inputs(*arguments):
        threads.append(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(rest_api, "parse_inputs", parse_inputs)
    monkeypatch.setattr(rest_api, "LARGE_BYTES", 150)
    for num_rows in (1, 4):
        status, answer = call("POST", "/v1/models/toy:predict", {"instances": [_row()] * num_rows})
        assert (status, len(answer["predictions"])) == (200, num_rows)
    assert threads[0] == "serving"
    assert threads[1].startswith("asyncio_")


def test_oversized_bodies_are_refused_by_their_length_or_once_they_are_too_long(call):
    body = b"x" * ((1 << 16) + 1)
    status, answer = call("POST", "/v1/models/toy:predict", body)
    assert status == 413
    assert answer == {"error": "The body has 65537 bytes; this server accepts 65536."}
    chunks = b"10001\r\n" + body + b"\r\n0\r\n\r\n"
    status, answer = call("POST", "/v1/models/toy:predict", chunks, {"Transfer-Encoding": "chunked"})
    assert status == 413
    assert answer == {"error": "The body is too large; this server accepts 65536 bytes."}


def test_chunked_and_packed_bodies_are_accepted(call):
    body = json.dumps({"instances": [_row()]}).encode()
    _, expected = call("POST", "/v1/models/toy:predict", body)
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))
    for sent, headers in [
        (chunks, {"Transfer-Encoding": "chunked"}),
        (gzip.compress(body), {"Content-Encoding": "gzip"}),
        (zlib.compress(body), {"Content-Encoding": "deflate"}),
    ]:
        assert call("POST", "/v1/models/toy:predict", sent, headers) == (200, expected)


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (gzip.compress(b" " * (1 << 24)), {"Content-Encoding": "gzip"}, 413, "The body is too large"),
        (gzip.compress(b"{}" * 99)[:-9], {"Content-Encoding": "gzip"}, 400, "The body ends before its gzip data does."),
        (b"{}", {"Content-Encoding": "gzip"}, 400, "The body is not gzip."),
        (b"{}", {"Content-Encoding": "br"}, 400, "Content-Encoding br is not supported; use gzip."),
        (b"", {"Content-Length": "-1"}, 400, ""),
        (b"", {"Content-Length": "many"}, 400, ""),
        (b"{}", {"X-Long": "x" * 10000}, 400, ""),
        (b"{}", {f"X-{number}": "x" for number in range(200)}, 400, ""),
    ],
    ids=["bomb", "cut off", "not gzip", "unknown packing", "negative", "no number", "long header", "many headers"],
)
def test_http_that_is_refused(call, body, headers, status, message):
    answered, answer = call("POST", "/v1/models/toy:predict", body, headers)
    assert answered == status
    assert message in answer["error"]


def test_a_client_that_asks_first_is_told_to_go_on(server):
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/models/toy:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/models/toy:predict HTTP/1.1\r\nHost:", b""),
        (b"POST /v1/models/toy:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "headers", "body"],
)
def test_a_slow_client_is_let_go(server, sent, answer):
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(1000):
            received += chunk
        assert received.startswith(answer)
        assert bool(received) == bool(answer)


def test_a_connection_answers_one_request_after_another_and_tells_no_versions(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
    for _ in range(2):
        connection.request("GET", "/v1/models/toy")
        response = connection.getresponse()
        assert response.getheader("Server") == "tff_pdp"
        assert response.getheader("Content-Type").startswith("application/json")
        response.read()
        assert connection.sock is not None
    connection.close()


def test_a_fault_of_the_server_is_logged_without_the_values_of_the_request(call, monkeypatch, caplog):
    def fail(document, signature):
        raise ValueError(f"cannot read {document}")

    monkeypatch.setattr(rest_api, "parse_inputs", fail)
    status, answer = call("POST", "/v1/models/toy:predict", {"instances": [_row("secret patient")]})
    assert (status, answer) == (500, {"error": "Internal error; see the server's log."})
    assert "ValueError" in caplog.text
    assert "in fail" in caplog.text
    assert "secret patient" not in caplog.text
