import asyncio
import concurrent.futures
import http.client
import json
import shutil
import socket
import threading
import time
import urllib.request

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from serving.client.grpc_client import GrpcClient
from serving.client.rest_client import RestClient
from serving.saved_model import layout
from serving.server import embedded
from serving.server.embedded import EmbeddedServer
from serving.server.loaded_version import LoadedVersion
from serving.server.options import BatchingOptions, Limits
from serving.tf_serving import ServedModel
from tff_pdp.errors import ServingError


@pytest.fixture(params=[RestClient, GrpcClient])
def client(request, server):
    port = server.rest_port if request.param is RestClient else server.grpc_port
    with request.param(f"127.0.0.1:{port}") as opened:
        yield opened


@pytest.mark.parametrize(
    "client_ids",
    [["alice"] * 6, ["stranger"] * 6, ["bob", "", "alice", "é ü", "<global>", "bob"], ["bob"]],
    ids=["known", "unknown", "mixed", "one"],
)
def test_answers_equal_the_model_in_this_process(client, exporter, client_ids):
    x = exporter.x[: len(client_ids)]
    prediction = client.predict("toy", client_ids, x)
    np.testing.assert_allclose(prediction.answers, exporter.expected(client_ids, x), atol=exporter.rounding())
    assert prediction.answers.dtype == np.float32
    np.testing.assert_array_equal(
        prediction.personalized, [client_id in exporter.personal_weights for client_id in client_ids]
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(client, exporter, value):
    x = exporter.x.copy()
    x[3, 0, 1] = value
    with pytest.raises(ServingError, match="x must be finite"):
        client.predict("toy", ["alice"] * 6, x)


def test_wrong_shape_is_refused(client, exporter):
    with pytest.raises(ServingError, match="input x has shape"):
        client.predict("toy", ["alice"] * 6, exporter.x.reshape(6, 2, 3))


def test_unknown_model_is_not_found(client, exporter):
    with pytest.raises(ServingError, match=r"Servable not found for request: Latest\(other\)"):
        client.predict("other", ["alice"], exporter.x[:1])


def test_busy_port_is_one_clear_error(server, export_dir):
    before = threading.active_count()
    for port in ("rest_port", "grpc_port"):
        number = getattr(server, port)
        for refused in (number, 70000):
            with pytest.raises(ServingError, match=f"port {refused} on 127.0.0.1"):
                EmbeddedServer([ServedModel("toy", export_dir.parent)], **{port: refused}).start()
    assert threading.active_count() == before


def test_nothing_runs_after_stop(export_dir, exporter):
    before = set(threading.enumerate())
    server = EmbeddedServer([ServedModel("toy", export_dir.parent)])
    server.start()
    assert "TensorFlow Serving" in server.banner
    # An idle keep-alive connection must not hold the server up.
    idle = socket.create_connection(("127.0.0.1", server.rest_port))
    waiting = threading.Thread(target=server.wait)
    waiting.start()
    server.stop()
    server.stop()
    waiting.join(timeout=30)
    idle.close()
    # gRPC's own last thread ends with the grace it was given.
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(threading.enumerate()) <= before
    for port in (server.rest_port, server.grpc_port):
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_ctrl_c_while_it_starts_leaves_nothing_running(export_dir, monkeypatch):
    class Interrupted(concurrent.futures.Future):
        is_first = True

        def result(self, timeout=None):
            if self.is_first:
                self.is_first = False
                raise KeyboardInterrupt
            return super().result(timeout)

    monkeypatch.setattr(embedded, "Future", Interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        EmbeddedServer([ServedModel("toy", export_dir.parent)]).start()
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name == "serving"]


def test_nothing_to_serve_is_one_clear_error(tmp_path):
    before = set(threading.enumerate())
    with pytest.raises(ServingError, match="Export a model there first"):
        EmbeddedServer([ServedModel("toy", tmp_path)]).start()
    with pytest.raises(ServingError, match="Cannot read the export directory"):
        EmbeddedServer([ServedModel("toy", tmp_path / "missing")]).start()
    assert set(threading.enumerate()) <= before


def test_arguments_that_cannot_be_served_are_refused(tmp_path):
    with pytest.raises(ServingError, match="cannot be served"):
        EmbeddedServer([ServedModel("../up", tmp_path)])
    with pytest.raises(ServingError, match="no model to serve"):
        EmbeddedServer([])
    with pytest.raises(ServingError, match="Two models are called 'a'"):
        EmbeddedServer([ServedModel("a", tmp_path)] * 2)
    for limit in ("max_bytes", "max_elements", "timeout_seconds"):
        with pytest.raises(ServingError, match=f"{limit} must be positive"):
            Limits(**{limit: 0})


def test_several_models_are_served_and_told(server):
    for name in ("toy", "line"):
        assert f"http://127.0.0.1:{server.rest_port}/v1/models/{name}\n" in server.banner


def test_a_reload_replaces_the_models(export_dir, line_dir):
    models = [ServedModel("toy", export_dir.parent), ServedModel("line", line_dir.parent)]
    with EmbeddedServer(models, poll_seconds=0) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            request = model_management_pb2.ReloadConfigRequest()
            request.config.model_config_list.config.add(
                name="moved", base_path=str(export_dir.parent), model_platform="tensorflow"
            )
            stub = model_service_pb2_grpc.ModelServiceStub(channel)
            response = stub.HandleReloadConfigRequest(request, timeout=30)
            assert response.status.error_code == 0
        with RestClient(f"127.0.0.1:{server.rest_port}") as client:
            assert len(client.predict("moved", ["alice"], np.zeros((1, 3, 2), np.float32)).answers) == 1
            with pytest.raises(ServingError, match=r"Latest\(line\)"):
                client.predict("line", ["ten"], np.zeros((1, 3, 2), np.float32))


@pytest.fixture(scope="module")
def second_dir(exporter, export_dir, tmp_path_factory):
    """Version 2: alice has bob's model."""
    base_path = shutil.copytree(export_dir.parent, tmp_path_factory.mktemp("second") / "toy")
    return exporter.export(base_path, {**exporter.personal_weights, "alice": exporter.personal_weights["bob"]})


def _publish(export_dir, base_path):
    """Copies a version and then renames it, as an export does."""
    shutil.copytree(export_dir, base_path / "staging").rename(base_path / export_dir.name)


@pytest.mark.parametrize("batching", [BatchingOptions(), None], ids=["batching", "alone"])
def test_a_swap_under_load_loses_no_request_and_answers_are_those_of_a_version(
    exporter, export_dir, second_dir, tmp_path, batching
):
    shutil.copytree(export_dir, tmp_path / "1")
    x = exporter.x[:1]
    expected = {1: exporter.expected(["alice"], x), 2: exporter.expected(["bob"], x)}
    bound = exporter.rounding()
    seen, failures, done = set(), [], threading.Event()

    def hammer(stub, request):
        while not done.is_set():
            try:
                response = stub.Predict(request, timeout=30)
            except grpc.RpcError as error:
                failures.append(error)
                return
            version = response.model_spec.version.value
            seen.add(version)
            answer = tf.make_ndarray(response.outputs["probabilities"])
            if not np.allclose(answer, expected[version], rtol=0, atol=bound):
                failures.append(answer)

    with (
        EmbeddedServer([ServedModel("toy", tmp_path)], poll_seconds=0.05, batching=batching) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        threads = [threading.Thread(target=hammer, args=(stub, _request(x))) for _ in range(32)]
        for thread in threads:
            thread.start()
        _wait_until(lambda: seen == {1})
        _publish(second_dir, tmp_path)
        _wait_for_state(server, 2, "AVAILABLE")
        _wait_until(lambda: 2 in seen)
        _wait_for_state(server, 1, "END")
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert seen == {1, 2}


def test_a_corrupt_version_keeps_the_old(exporter, export_dir, second_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    with EmbeddedServer([ServedModel("toy", tmp_path)], poll_seconds=0.05) as server:
        shutil.copytree(second_dir, tmp_path / "staging")
        (tmp_path / "staging" / layout.SAVED_MODEL_FILE).write_bytes(b"garbage")
        (tmp_path / "staging").rename(tmp_path / "2")
        status = _wait_for_state(server, 2, "END")
        assert "does not match the SHA-256" in status["status"]["error_message"]
        with RestClient(f"127.0.0.1:{server.rest_port}") as client:
            answer = client.predict("toy", ["alice"], exporter.x[:1])
        np.testing.assert_allclose(
            answer.answers, exporter.expected(["alice"], exporter.x[:1]), atol=exporter.rounding()
        )


def test_a_stop_answers_what_it_has_begun(exporter, export_dir, monkeypatch):
    begun, run = threading.Semaphore(0), LoadedVersion.run

    async def run_slowly(self, *arguments):
        begun.release()
        await asyncio.sleep(0.5)
        return await run(self, *arguments)

    monkeypatch.setattr(LoadedVersion, "run", run_slowly)
    server = EmbeddedServer([ServedModel("toy", export_dir.parent)])
    server.start()
    answers = []

    def ask(client_class, port):
        with client_class(f"127.0.0.1:{port}") as client:
            answers.append(client.predict("toy", ["alice"], exporter.x[:1]).answers)

    asking = [(RestClient, server.rest_port), (GrpcClient, server.grpc_port)]
    threads = [threading.Thread(target=ask, args=arguments) for arguments in asking]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=30)
    server.stop()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(answers, [exporter.expected(["alice"], exporter.x[:1])] * 2, atol=exporter.rounding())


def test_a_stop_under_load_returns_and_answers_nothing_wrong(exporter, export_dir):
    server = EmbeddedServer([ServedModel("toy", export_dir.parent)])
    server.start()
    codes, wrong, answered = [], [], threading.Event()
    expected, bound = exporter.expected(["alice"], exporter.x[:1]), exporter.rounding()

    def hammer(stub):
        while True:
            try:
                response = stub.Predict(_request(exporter.x[:1]), timeout=30)
            except grpc.RpcError as error:
                codes.append(error.code())
                return
            answered.set()
            if not np.allclose(tf.make_ndarray(response.outputs["probabilities"]), expected, rtol=0, atol=bound):
                wrong.append(response)

    def hammer_rest():
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=30)
            try:
                connection.request("GET", "/v1/models/toy")
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    wrong.append(response.status)
            except (OSError, http.client.HTTPException):
                return
            finally:
                connection.close()

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        threads = [threading.Thread(target=hammer, args=(stub,)) for _ in range(8)]
        threads += [threading.Thread(target=hammer_rest) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert answered.wait(30)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 4.5, "idle or waiting connections held the server up"
        for thread in threads:
            thread.join()
    assert not wrong
    # What had reached the machine but not the server yet is cancelled; what comes later is refused.
    assert set(codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def _request(x):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "toy"
    request.inputs["client_id"].CopyFrom(tf.make_tensor_proto(["alice"] * len(x)))
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(x))
    return request


def _wait_until(reached):
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _wait_for_state(server, version, state):
    url = f"http://127.0.0.1:{server.rest_port}/v1/models/toy"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with urllib.request.urlopen(url, timeout=5) as response:
            for entry in json.load(response)["model_version_status"]:
                if entry["version"] == str(version) and entry["state"] == state:
                    return entry
        time.sleep(0.02)
    raise AssertionError(f"version {version} did not become {state}")
