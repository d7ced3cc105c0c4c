import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from serving.client import calls
from serving.client.calls import ServerError
from serving.client.rest_client import RestClient
from serving.client_ids import ClientIdHash
from tests.serving.client.fake_servers import DROP, raw_server, rest_server, sums
from tff_pdp.errors import ServingError

X = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
IDS = ["alice", "", "é ü"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.01)


def _failing(replies):
    """Gives the replies one after another, then sums."""
    left = list(replies)
    return lambda *request: left.pop(0) if left else sums(*request)


def test_answers_and_what_was_sent():
    with rest_server(sums) as seen, RestClient(f"127.0.0.1:{seen.port}") as client:
        prediction = client.predict("toy", IDS, X)
        np.testing.assert_array_equal(prediction.answers, np.array([3, 7, 11], np.float32))
        assert prediction.answers.dtype == np.float32
        assert prediction.personalized.tolist() == [True, False, False]
        client.predict("toy", ["a"], X[:1], version=3)
        client.predict("t/y", ["a"], X[:1], label="a b")
    assert seen.requests[0] == ("POST", "/v1/models/toy:predict", {"inputs": {"client_id": IDS, "x": X.tolist()}})
    assert [path for _, path, _ in seen.requests[1:]] == [
        "/v1/models/toy/versions/3:predict",
        "/v1/models/t%2Fy/labels/a%20b:predict",
    ]
    assert seen.connections == 1


def test_images_and_examples_in_their_json_forms():
    def answer(method, path, body):
        if path.endswith(":classify"):
            return 200, b'{"results": [[["0", 0.25], ["1", 0.75]]]}'
        if path.endswith(":regress"):
            return 200, b'{"results": [0.5]}'
        return 200, b'{"outputs": {"probabilities": [[0.25, 0.75]], "personalized": [true]}}'

    with rest_server(answer) as seen, RestClient(f"http://127.0.0.1:{seen.port}/") as client:
        assert client.predict_images("toy", ["a"], [b"\x00\xff"]).answers.tolist() == [[0.25, 0.75]]
        classification = client.classify("toy", ["a"], X[:1].reshape(1, 2, 1))
        assert (classification.classes.tolist(), classification.scores.tolist()) == ([["0", "1"]], [[0.25, 0.75]])
        assert client.regress("toy", ["a"], X[:1]).values.tolist() == [0.5]
    images, classify, regress = (body for _, _, body in seen.requests)
    assert images == {
        "signature_name": "predict_images",
        "inputs": {"client_id": ["a"], "image_bytes": [{"b64": "AP8="}]},
    }
    assert classify == {"signature_name": "classify", "examples": [{"client_id": "a", "x": [1.0, 2.0]}]}
    assert regress == {"signature_name": "regress", "examples": [{"client_id": "a", "x": [1.0, 2.0]}]}


def test_ids_are_hashed_on_this_side():
    hash_ids = ClientIdHash(bytes(32))
    with rest_server(sums) as seen, RestClient(f"127.0.0.1:{seen.port}", client_id_hash=hash_ids) as client:
        client.predict("toy", ["alice", ""], X[:2])
    assert seen.requests[0][2]["inputs"]["client_id"] == ["ce3837f76a54a635191b1704ac767226", ""]


def test_large_batches_are_split_and_joined_in_order():
    x = np.arange(10, dtype=np.float32).reshape(10, 1)
    with rest_server(sums) as seen, RestClient(f"127.0.0.1:{seen.port}", max_batch_size=4) as client:
        assert client.predict("toy", ["a"] * 10, x).answers.tolist() == list(range(10))
    assert [len(body["inputs"]["x"]) for _, _, body in seen.requests] == [4, 4, 2]


def test_requests_above_the_size_limit_are_halved_down_to_one_example():
    x = np.arange(4, dtype=np.float32).reshape(4, 1)
    # '{"inputs":{"client_id":["a","a"],"x":[[0.0],[1.0]]}}' has 52 bytes, with longer ids 90, of four examples 150.
    with rest_server(sums) as seen, RestClient(f"127.0.0.1:{seen.port}", max_message_bytes=100) as client:
        assert client.predict("toy", ["a" * 20] * 4, x).answers.tolist() == [0, 1, 2, 3]
        # '{"inputs":{"client_id":[""],"x":[[0.0]]}}' has 41.
        with pytest.raises(ServingError, match="Example 0 makes a request of 111 bytes, above the limit of 100"):
            client.predict("toy", ["a" * 70, "a"], x[:2])
    assert [len(body["inputs"]["x"]) for _, _, body in seen.requests] == [2, 2]


def test_an_answer_above_the_size_limit_is_refused():
    with (
        rest_server(lambda *_: (200, b" " * 300)) as seen,
        RestClient(f"127.0.0.1:{seen.port}", max_message_bytes=200) as client,
        pytest.raises(ServingError, match="more than 200 bytes"),
    ):
        client.predict("toy", ["a"], X[:1])


@pytest.mark.parametrize("reply", [DROP, (503, b'{"error": "loading"}')])
def test_unavailability_is_retried(reply):
    with rest_server(_failing([reply] * 3)) as seen, RestClient(f"127.0.0.1:{seen.port}") as client:
        assert client.predict("toy", ["a"], X[:1]).answers.tolist() == [3]
    assert len(seen.requests) == 4


def test_a_server_that_starts_late_is_found(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = []
    with RestClient(f"127.0.0.1:{port}") as client:
        thread = threading.Thread(target=lambda: answers.append(client.predict("toy", ["a"], X[:1]).answers.tolist()))
        thread.start()
        time.sleep(0.1)
        with rest_server(sums, port):
            thread.join()
    assert answers == [[3]]


def test_retries_end():
    with rest_server(_failing([(503, b'{"error": "loading"}')] * 9)) as seen:
        with RestClient(f"127.0.0.1:{seen.port}") as client, pytest.raises(ServingError, match=r"\(503\): loading\."):
            client.predict("toy", ["a"], X[:1])
        assert len(seen.requests) == 4
    with RestClient(f"127.0.0.1:{seen.port}") as client, pytest.raises(ServingError, match="cannot be reached"):
        client.predict("toy", ["a"], X[:1])


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        ((400, b'{"error": "x must be finite"}'), "400", "x must be finite"),
        ((404, b"no JSON"), "404", "no JSON"),
        ((429, b'{"error": "queue"}'), "429", "queue"),
        ((500, b""), "500", "no message"),
        ((302, b""), "302", "no message"),
    ],
)
def test_other_errors_are_not_retried(reply, code, message):
    with rest_server(lambda *_: reply) as seen, RestClient(f"127.0.0.1:{seen.port}") as client:
        with pytest.raises(ServerError) as raised:
            client.predict("toy", ["a"], X[:1])
        assert (raised.value.code, raised.value.message) == (code, message)
        url = f"http://127.0.0.1:{seen.port}/v1/models/toy:predict"
        assert str(raised.value) == f"{url} answered {code}: {message}"
    assert len(seen.requests) == 1


def test_the_deadline_covers_retries_and_parts():
    def slow(*request):
        time.sleep(0.2)
        return sums(*request)

    with rest_server(slow) as seen:
        with (
            RestClient(f"127.0.0.1:{seen.port}", 0.5, max_batch_size=1) as client,
            pytest.raises(ServerError, match=r"DEADLINE_EXCEEDED: no answer within 0\.5 seconds"),
        ):
            client.predict("toy", ["a"] * 10, np.zeros((10, 1)))
        assert len(seen.requests) <= 3
    with rest_server(lambda *_: (503, b"")) as seen:
        started = time.monotonic()
        with RestClient(f"127.0.0.1:{seen.port}", 0.3, max_attempts=10**6) as client, pytest.raises(ServingError):
            client.predict("toy", ["a"], X[:1])
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("at_once", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"], ids=["head", "body"])
def test_the_deadline_holds_where_an_answer_trickles_in(at_once):
    # Five seconds in all, though no byte is longer than 50 ms in coming.
    trickling = b"HTTP/1.1 200 OK\r\nServer: ".ljust(100, b"s")
    with raw_server(at_once, trickling) as seen, RestClient(f"127.0.0.1:{seen.port}", 0.3) as client:
        started = time.monotonic()
        with pytest.raises(ServerError, match=r"DEADLINE_EXCEEDED: no answer within 0\.3 seconds"):
            client.status("toy")
        assert time.monotonic() - started < 2
    assert seen.connections == 1


def test_what_is_no_http_is_asked_once():
    # What a gRPC server says first.
    settings = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00"
    with (
        raw_server(settings) as seen,
        RestClient(f"127.0.0.1:{seen.port}") as client,
        pytest.raises(ServingError, match=r"does not answer as HTTP does .* is it the port of the REST API") as raised,
    ):
        client.status("toy")
    assert not isinstance(raised.value, ServerError)
    assert seen.connections == 1


def test_values_that_are_not_finite_travel_both_ways():
    def answer(method, path, body):
        assert json.dumps(body["inputs"]["x"]) == "[[NaN, -Infinity]]"
        return 200, b'{"outputs": {"values": [NaN], "personalized": [false]}}'

    with rest_server(answer) as seen, RestClient(f"127.0.0.1:{seen.port}") as client:
        answers = client.predict("toy", ["a"], np.array([[np.nan, -np.inf]])).answers
    assert np.isnan(answers).tolist() == [True]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'{"outputs": [1]}',
        b'{"outputs": {"values": [1]}}',
        b'{"outputs": {"values": [[1], 2], "personalized": [true]}}',
        b'{"outputs": {"values": [1, 2], "personalized": [true]}}',
    ],
)
def test_other_answers_are_refused(body):
    with (
        rest_server(lambda *_: (200, body)) as seen,
        RestClient(f"127.0.0.1:{seen.port}") as client,
        pytest.raises(ServingError, match="did not answer like a personalised model"),
    ):
        client.predict("toy", ["a"], X[:1])


def test_no_json_is_refused():
    with (
        rest_server(lambda *_: (200, b"<html>")) as seen,
        RestClient(f"127.0.0.1:{seen.port}") as client,
        pytest.raises(ServingError, match="did not answer with JSON"),
    ):
        client.status("toy")


def test_arguments_are_checked_before_anything_is_sent():
    client = RestClient("127.0.0.1:1")
    with pytest.raises(ServingError, match="2 client ids for 3 examples"):
        client.predict("toy", ["a", "b"], X)
    with pytest.raises(ServingError, match="0 client ids for 0 examples"):
        client.predict("toy", [], X[:0])
    with pytest.raises(ServingError, match="list of texts, one for each example, not 'abc'"):
        client.predict("toy", "abc", X)
    with pytest.raises(ServingError, match=r"not \[1, 2, 3\]"):
        client.predict("toy", [1, 2, 3], X)  # pyright: ignore[reportArgumentType]
    for hash_ids in (None, ClientIdHash(bytes(32))):
        client = RestClient("127.0.0.1:1", client_id_hash=hash_ids)
        with pytest.raises(ServingError, match=r"Client id 'a\\ud800' is not valid Unicode"):
            client.predict("toy", ["b", "a\ud800"], X[:2])
    with pytest.raises(ServingError, match="x must be an array of numbers"):
        client.predict("toy", ["a", "b"], [[1], [1, 2]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ServingError, match="bytes of image files"):
        client.predict_images("toy", ["a"], X[:1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ServingError, match="by version or by label"):
        client.predict("toy", ["a"], X[:1], version=1, label="stable")
    with pytest.raises(ServingError, match="must be positive"):
        RestClient("127.0.0.1:1", 0)
    with pytest.raises(ServingError, match="no address of a REST API"):
        RestClient("http://[::1")


def test_a_path_before_the_api_and_an_environment_with_proxies(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with rest_server(sums) as seen, RestClient(f"http://127.0.0.1:{seen.port}/models/") as client:
        client.predict("toy", ["a"], X[:1])
    assert seen.requests[0][1] == "/models/v1/models/toy:predict"


def test_many_threads_share_a_client():
    with rest_server(sums) as seen, RestClient(f"127.0.0.1:{seen.port}") as client:
        answers = {}

        def ask(number):
            answers[number] = client.predict("toy", ["a"], np.full((1, 2), number)).answers.tolist()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {number: [2 * number] for number in range(12)}


def test_no_tensorflow_is_imported():
    program = "import sys, serving.client.rest_client; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
