import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


def _request(name="toy", version=None, signature_name="", output_filter=(), **inputs):
    request = predict_pb2.PredictRequest(output_filter=output_filter)
    request.model_spec.name = name
    request.model_spec.signature_name = signature_name
    if version is not None:
        request.model_spec.version.value = version
    for key, value in (inputs or {"client_id": ["alice"], "x": np.zeros((1, 3, 2), np.float32)}).items():
        request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    return request


def test_answer_names_the_model_version_and_signature(stub):
    response = stub.Predict(_request(output_filter=["personalized"]), timeout=10)
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("toy", 1, "serving_default")
    assert set(response.outputs) == {"personalized"}


@pytest.mark.parametrize(
    ("request_arguments", "code", "message"),
    [
        ({"name": ""}, "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        ({"name": "other"}, "NOT_FOUND", "Servable not found for request: Latest(other)"),
        ({"version": 7}, "NOT_FOUND", "Servable not found for request: Specific(toy, 7)"),
        ({"signature_name": "s"}, "FAILED_PRECONDITION", 'Serving signature key "s" not found.'),
        ({"client_id": ["a"]}, "INVALID_ARGUMENT", "Missing but required: {x}."),
        ({"client_id": ["a"], "x": [0.0], "z": [0.0]}, "INVALID_ARGUMENT", "Sent extra: {z}."),
        ({"client_id": ["a"], "y": [0.0]}, "INVALID_ARGUMENT", "input tensor alias not found in signature: y."),
        ({"client_id": ["a"], "x": np.zeros((1, 3, 2))}, "INVALID_ARGUMENT", "float32 but float64 is provided"),
        ({"client_id": ["a"], "x": np.zeros(1025, np.float32)}, "RESOURCE_EXHAUSTED", "1025 elements"),
        ({"output_filter": ["y"]}, "INVALID_ARGUMENT", "output tensor alias not found in signature: y"),
        ({"output_filter": ["personalized"] * 2}, "INVALID_ARGUMENT", "duplicate output tensor alias: personalized"),
    ],
)
def test_requests_that_are_refused(stub, request_arguments, code, message):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(_request(**request_arguments), timeout=10)
    assert caught.value.code().name == code
    assert message in caught.value.details()


@pytest.mark.parametrize(
    ("sizes", "code"),
    [([1 << 20, 1 << 20], "RESOURCE_EXHAUSTED"), ([-1], "INVALID_ARGUMENT"), ([7], "INVALID_ARGUMENT")],
)
def test_tensors_whose_shape_is_a_lie_are_refused(stub, sizes, code):
    request = _request()
    tensor = request.inputs["x"]
    tensor.Clear()
    tensor.dtype = tf.float32.as_datatype_enum
    tensor.tensor_content = b"\0" * 4
    for size in sizes:
        tensor.tensor_shape.dim.add().size = size
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(request, timeout=10)
    assert caught.value.code().name == code


def test_oversized_message_is_refused(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(_request(client_id=["a" * (1 << 17)], x=np.zeros((1, 3, 2), np.float32)), timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_version_label_is_unknown(stub):
    request = _request()
    request.model_spec.version_label = "stable"
    with pytest.raises(grpc.RpcError, match="Unrecognized servable version label: stable"):
        stub.Predict(request, timeout=10)


def test_metadata(stub):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "toy"
    response = stub.GetModelMetadata(request, timeout=10)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert {"serving_default", "predict"} <= set(signatures.signature_def)
    request.metadata_field.append("f")
    with pytest.raises(grpc.RpcError, match="Metadata field f is not supported"):
        stub.GetModelMetadata(request, timeout=10)


def test_status(channel):
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    request = get_model_status_pb2.GetModelStatusRequest()
    with pytest.raises(grpc.RpcError, match="Missing ModelSpec"):
        stub.GetModelStatus(request, timeout=10)
    request.model_spec.name = "toy"
    (status,) = stub.GetModelStatus(request, timeout=10).model_version_status
    assert status.version == 1
    assert status.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
    request.model_spec.version.value = 7
    with pytest.raises(grpc.RpcError, match="Could not find version 7 of model toy"):
        stub.GetModelStatus(request, timeout=10)
