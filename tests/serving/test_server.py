import contextlib
import json
import shutil
import socket
import threading
import time
import urllib.request

import numpy as np
import pytest

from serving import layout
from serving.client import GrpcClient, RestClient
from serving.manager import ModelManager
from serving.server import EmbeddedServer
from tff_pdp.errors import ServingError


@pytest.fixture(params=[RestClient, GrpcClient])
def client(request, server):
    port = server.rest_port if request.param is RestClient else server.grpc_port
    return request.param(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "client_ids",
    [["alice"] * 6, ["stranger"] * 6, ["bob", "", "alice", "é ü", "<global>", "bob"], ["bob"]],
    ids=["known", "unknown", "mixed", "one"],
)
def test_answers_equal_the_model_in_this_process(client, exporter, client_ids):
    x = exporter.x[: len(client_ids)]
    prediction = client.predict("toy", client_ids, x)
    np.testing.assert_allclose(prediction.answers, exporter.expected(client_ids, x), atol=1e-6)
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


def test_different_batch_sizes_are_refused(client, exporter):
    with pytest.raises(ServingError, match="same batch size"):
        client.predict("toy", ["alice"], exporter.x)


def test_wrong_shape_is_refused(client, exporter):
    with pytest.raises(ServingError, match="input x has shape"):
        client.predict("toy", ["alice"] * 6, exporter.x.reshape(6, 2, 3))


def test_unknown_model_is_not_found(client, exporter):
    with pytest.raises(ServingError, match=r"Servable not found for request: Latest\(other\)"):
        client.predict("other", ["alice"], exporter.x[:1])


def test_unreachable_server_is_one_clear_error(exporter):
    port = _free_port()
    with pytest.raises(ServingError, match="cannot be reached"):
        RestClient(f"127.0.0.1:{port}").predict("toy", ["a"], exporter.x[:1])
    with GrpcClient(f"127.0.0.1:{port}") as client, pytest.raises(ServingError, match="UNAVAILABLE"):
        client.predict("toy", ["a"], exporter.x[:1])


def test_busy_port_is_one_clear_error(server, export_dir):
    before = threading.active_count()
    for port in ("rest_port", "grpc_port"):
        number = getattr(server, port)
        for refused in (number, 70000):
            with pytest.raises(ServingError, match=f"port {refused} on 127.0.0.1"):
                EmbeddedServer(export_dir.parent, "toy", **{port: refused}).start()
    assert threading.active_count() == before


def test_nothing_runs_after_stop(export_dir, exporter):
    before = set(threading.enumerate())
    server = EmbeddedServer(export_dir.parent, "toy")
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


def test_nothing_to_serve_is_one_clear_error(tmp_path):
    with pytest.raises(ServingError, match="Export a model there first"):
        EmbeddedServer(tmp_path, "toy").start()
    with pytest.raises(ServingError, match="Cannot read the export directory"):
        EmbeddedServer(tmp_path / "missing", "toy").start()


def test_a_new_version_is_picked_up_and_a_corrupt_one_keeps_the_old(exporter, export_dir, tmp_path):
    shutil.copytree(export_dir, tmp_path / "1")
    with EmbeddedServer(tmp_path, "toy", poll_seconds=0.05) as server:
        client = RestClient(f"127.0.0.1:{server.rest_port}")
        changed = {"alice": exporter.personal_weights["bob"]}
        with _hammer(client, exporter.x) as answers:
            exporter.export(tmp_path, personal_weights=changed)
            _wait_for_state(server, 2, "AVAILABLE")
        assert len(answers) > 1
        assert not [answer for answer in answers if isinstance(answer, ServingError)]
        answer = client.predict("toy", ["alice"], exporter.x[:1])
        np.testing.assert_allclose(answer.answers, exporter.expected(["bob"], exporter.x[:1]), atol=1e-6)

        shutil.copytree(tmp_path / "2", tmp_path / "staging")
        (tmp_path / "staging" / layout.SAVED_MODEL_FILE).write_bytes(b"garbage")
        (tmp_path / "staging").rename(tmp_path / "3")
        status = _wait_for_state(server, 3, "END")
        assert "does not match the SHA-256" in status["status"]["error_message"]
        again = client.predict("toy", ["alice"], exporter.x[:1])
        np.testing.assert_array_equal(again.answers, answer.answers)


def test_a_slow_copy_is_tried_again_when_it_is_complete(export_dir, tmp_path):
    manager = ModelManager(tmp_path, "toy", poll_seconds=60)
    shutil.copytree(export_dir, tmp_path / "1", ignore=shutil.ignore_patterns("variables.index"))
    with pytest.raises(ServingError, match="lacks variables"):
        manager.load()
    shutil.copytree(export_dir, tmp_path / "1", dirs_exist_ok=True)
    manager.load()
    assert manager.servable("toy")[0] == 1


@contextlib.contextmanager
def _hammer(client, x):
    """Calls the server without a pause while the block runs, and collects what comes back."""
    answers, done = [], threading.Event()

    def call():
        while not done.is_set():
            try:
                answers.append(client.predict("toy", ["alice"] * len(x), x))
            except ServingError as error:
                answers.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()


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


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
