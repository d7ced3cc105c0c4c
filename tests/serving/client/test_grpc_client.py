import socket
import threading
import time

import grpc
import numpy as np
import pytest
import tensorflow as tf

from serving.client import calls
from serving.client.calls import ServerError
from serving.client.grpc_client import GrpcClient
from tests.serving.client.fake_servers import grpc_server
from tff_pdp.errors import ServingError

X = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.01)


def test_answers_and_what_was_sent():
    with grpc_server([]) as seen, GrpcClient(f"127.0.0.1:{seen.port}") as client:
        prediction = client.predict("toy", ["alice", "é"], X[:2], version=3)
        client.predict("toy", ["alice"], X[:1], label="stable")
    assert prediction.answers.tolist() == [3, 7]
    assert prediction.personalized.tolist() == [True, False]
    first, second = seen.requests
    assert (first.model_spec.name, first.model_spec.version.value, second.model_spec.version_label) == (
        "toy",
        3,
        "stable",
    )
    assert tf.make_ndarray(first.inputs["client_id"]).tolist() == [b"alice", "é".encode()]
    np.testing.assert_array_equal(tf.make_ndarray(first.inputs["x"]), X[:2])
    assert len(first.inputs["x"].tensor_content) == 16


def test_large_batches_are_split_by_number_and_by_size():
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    with grpc_server([]) as seen:
        with GrpcClient(f"127.0.0.1:{seen.port}", max_batch_size=4) as client:
            answers = client.predict("toy", ["a"] * 10, x).answers
        assert [len(request.inputs["client_id"].string_val) for request in seen.requests] == [4, 4, 2]
        np.testing.assert_array_equal(answers, x.sum(1))
        seen.requests.clear()
        with GrpcClient(f"127.0.0.1:{seen.port}", max_message_bytes=100) as client:
            np.testing.assert_array_equal(client.predict("toy", ["a"] * 10, x).answers, x.sum(1))
            assert all(request.ByteSize() <= 100 for request in seen.requests)
            with pytest.raises(ServingError, match="Example 0 makes a request of"):
                client.predict("toy", ["a"], np.zeros((1, 100)))


def test_ids_that_are_no_unicode_are_refused_before_anything_is_sent():
    with GrpcClient("127.0.0.1:1") as client:
        for ask in (client.predict, client.classify):
            with pytest.raises(ServingError, match=r"Client id '\\ud800' is not valid Unicode"):
                ask("toy", ["\ud800"], X[:1])


def test_unavailability_is_retried_and_nothing_else():
    with grpc_server([grpc.StatusCode.UNAVAILABLE] * 3) as seen, GrpcClient(f"127.0.0.1:{seen.port}") as client:
        assert client.predict("toy", ["a"], X[:1]).answers.tolist() == [3]
        assert len(seen.requests) == 4
    for code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND):
        with grpc_server([code]) as seen, GrpcClient(f"127.0.0.1:{seen.port}") as client:
            with pytest.raises(ServerError) as raised:
                client.predict("toy", ["a"], X[:1])
            assert str(raised.value) == f"127.0.0.1:{seen.port} answered {code.name}: scripted"
            assert raised.value.code == code.name
            assert len(seen.requests) == 1


def test_a_server_that_starts_late_or_again_is_found(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = []
    with GrpcClient(f"127.0.0.1:{port}") as client:

        def ask():
            answers.append(client.predict("toy", ["a"], X[:1]).answers.tolist())

        for _ in range(2):
            thread = threading.Thread(target=ask)
            thread.start()
            time.sleep(0.1)
            with grpc_server([], port=port):
                thread.join()
    assert answers == [[3]] * 2


def test_the_deadline_covers_retries_and_parts():
    with grpc_server([], delay_seconds=0.2) as seen:
        started = time.monotonic()
        with (
            GrpcClient(f"127.0.0.1:{seen.port}", 0.5, max_batch_size=1) as client,
            pytest.raises(ServerError, match="DEADLINE_EXCEEDED"),
        ):
            client.predict("toy", ["a"] * 10, np.zeros((10, 1)))
        assert time.monotonic() - started < 1.8
    with GrpcClient(f"127.0.0.1:{seen.port}", 0.3) as client, pytest.raises(ServingError, match="UNAVAILABLE"):
        client.predict("toy", ["a"], X[:1])


def test_answers_are_read_in_every_form_of_a_tensor():
    """TensorFlow Serving sends numbers as packed values, and may leave out the repeated end of a tensor."""
    from tensorflow_serving.apis import predict_pb2

    from serving.client.grpc_client import _arrays

    response = predict_pb2.PredictResponse()
    response.outputs["values"].dtype = tf.float32.as_datatype_enum
    response.outputs["values"].tensor_shape.dim.add(size=3)
    response.outputs["values"].float_val.extend([1.5, 2.5])
    response.outputs["personalized"].CopyFrom(tf.make_tensor_proto([True, False, True]))
    answers, personalized = _arrays("predict", response)
    assert answers.tolist() == [1.5, 2.5, 2.5]
    assert personalized.tolist() == [True, False, True]
