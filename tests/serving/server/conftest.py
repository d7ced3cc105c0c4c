"""One server with a classifier and a regression, and a plain way to call each protocol."""

import http.client
import json

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

from serving.server.embedded import EmbeddedServer
from serving.server.options import Limits
from serving.tf_serving import ServedModel
from tests.serving.conftest import MAX_BYTES, MAX_ELEMENTS, MODEL_NAME, Exporter
from tff_pdp.models.dense import build_linear_regression

TIMEOUT_SECONDS = 1.0


@pytest.fixture(scope="session")
def line_dir(exporter, fresh_process, tmp_path_factory):
    """A regression: the answer to `x` is its sum times the client's factor, plus one."""
    model = build_linear_regression((3, 2))
    ones, tens = ({name: np.full_like(array, k) for name, array in model.init(0).items()} for k in (1, 10))
    line = Exporter(model, ones, {"ten": tens}, exporter.x, fresh_process)
    return line.export(tmp_path_factory.mktemp("line"), model_name="line")


@pytest.fixture(scope="session")
def server(export_dir, line_dir):
    models = [
        ServedModel(MODEL_NAME, export_dir.parent, labels={"stable": 1}),
        ServedModel("line", line_dir.parent),
    ]
    with EmbeddedServer(models, poll_seconds=60, limits=Limits(MAX_BYTES, MAX_ELEMENTS, TIMEOUT_SECONDS)) as running:
        yield running


@pytest.fixture(scope="session")
def channel(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


@pytest.fixture(scope="session")
def stub(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture(scope="session")
def model_stub(channel):
    return model_service_pb2_grpc.ModelServiceStub(channel)


@pytest.fixture(scope="session")
def call(server):
    """Sends one REST request and returns its status and JSON body."""

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


@pytest.fixture(scope="session")
def serialized():
    """A serialised example of one client."""

    def build(client_id, x):
        example = tf.train.Example()
        example.features.feature["client_id"].bytes_list.value.append(client_id.encode())
        example.features.feature["x"].float_list.value.extend(np.ravel(x).tolist())
        return example

    return build
