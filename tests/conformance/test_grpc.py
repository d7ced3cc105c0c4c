"""The gRPC API in requests that our client does not send."""

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tests.conformance.models import CANARY, CLASSIFIER, TOLERANCE, classifier

# `test_rollout.py` alone starts a server in every change.
pytestmark = pytest.mark.all

X = np.array([[[[0.0], [0.5]], [[1.0], [0.25]]]], np.float32)


@pytest.fixture(scope="module")
def channel(addresses):
    with grpc.insecure_channel(addresses.grpc, options=[("grpc.enable_http_proxy", 0)]) as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


def _request(name=CLASSIFIER, signature_name="", output_filter=(), **inputs):
    request = predict_pb2.PredictRequest(output_filter=output_filter)
    request.model_spec.name = name
    request.model_spec.signature_name = signature_name
    for key, value in (inputs or {"client_id": ["alice"], "x": X}).items():
        request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    return request


def _refused(call, request) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        call(request, timeout=30)
    return raised.value


def test_the_answer_names_model_version_and_signature(stub):
    response = stub.Predict(_request(signature_name="predict", output_filter=["probabilities"]), timeout=30)
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == (CLASSIFIER, CANARY, "predict")
    assert set(response.outputs) == {"probabilities"}
    found = tf.make_ndarray(response.outputs["probabilities"])
    np.testing.assert_allclose(found, classifier(CANARY).expected(["alice"], X), atol=TOLERANCE)


def test_numbers_in_every_form_of_a_tensor(stub):
    packed = predict_pb2.PredictRequest()
    packed.model_spec.name = CLASSIFIER
    packed.inputs["client_id"].CopyFrom(tf.make_tensor_proto(["alice"]))
    tensor = packed.inputs["x"]
    tensor.dtype = tf.float32.as_datatype_enum
    tensor.tensor_shape.CopyFrom(tf.TensorShape(X.shape).as_proto())
    tensor.float_val.extend(X.ravel().tolist())
    answers = [
        tf.make_ndarray(stub.Predict(request, timeout=30).outputs["probabilities"]) for request in (_request(), packed)
    ]
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ({"name": ""}, "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        ({"name": "nothing"}, "NOT_FOUND", "Servable not found for request: Latest(nothing)"),
        ({"signature_name": "s"}, "FAILED_PRECONDITION", 'Serving signature key "s" not found.'),
        ({"client_id": ["a"]}, "INVALID_ARGUMENT", "Missing but required: {x}."),
        ({"client_id": ["a"], "x": X, "z": X}, "INVALID_ARGUMENT", "Sent extra: {z}."),
        ({"client_id": ["a"], "y": X}, "INVALID_ARGUMENT", "input tensor alias not found in signature: y."),
        ({"output_filter": ["y"]}, "INVALID_ARGUMENT", "output tensor alias not found in signature: y"),
        ({"output_filter": ["personalized"] * 2}, "INVALID_ARGUMENT", "duplicate output tensor alias: personalized"),
        ({"client_id": ["a"], "x": X.astype(np.float64)}, "INVALID_ARGUMENT", ""),
        ({"client_id": ["a"], "x": X[0]}, "INVALID_ARGUMENT", ""),
        ({"client_id": ["a", "b"], "x": X}, "INVALID_ARGUMENT", ""),
        ({"client_id": ["a"], "x": X * np.nan}, "INVALID_ARGUMENT", "x must be finite"),
    ],
)
def test_requests_that_are_refused(stub, arguments, code, message):
    error = _refused(stub.Predict, _request(**arguments))
    assert error.code().name == code
    assert message in error.details()


def test_a_tensor_whose_bytes_do_not_fit_its_shape(stub):
    request = _request()
    request.inputs["x"].tensor_content = b"123"
    assert _refused(stub.Predict, request).code() == grpc.StatusCode.INVALID_ARGUMENT


def test_classify_without_examples(stub):
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name = CLASSIFIER
    request.model_spec.signature_name = "classify"
    error = _refused(stub.Classify, request)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "Input is empty.")


def test_metadata_of_other_fields(stub):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["weights"])
    request.model_spec.name = CLASSIFIER
    error = _refused(stub.GetModelMetadata, request)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "Metadata field weights is not supported" in error.details()


def test_status_without_a_model(channel):
    call = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus
    error = _refused(call, get_model_status_pb2.GetModelStatusRequest())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "Missing ModelSpec" in error.details()
