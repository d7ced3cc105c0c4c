import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    predict_pb2,
    regression_pb2,
)

from serving.server import grpc_server as prediction_service
from tests.rounding import assert_within, gamma
from tests.serving.conftest import MAX_BYTES


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


def test_a_label_stands_for_its_version(stub):
    request = _request()
    request.model_spec.version_label = "stable"
    assert stub.Predict(request, timeout=10).model_spec.version.value == 1


def test_answers_are_in_typed_fields_as_tensorflow_serving_sends_them(stub):
    outputs = stub.Predict(_request(), timeout=10).outputs
    assert len(outputs["probabilities"].float_val) == 4
    assert list(outputs["personalized"].bool_val) == [True]


def test_classify(stub, exporter, serialized):
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name, request.model_spec.signature_name = "toy", "classify"
    request.input.example_list.examples.extend([serialized("alice", exporter.x[0]), serialized("", exporter.x[1])])
    response = stub.Classify(request, timeout=10)
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("toy", 1, "classify")
    rows = [row.classes for row in response.result.classifications]
    assert [[one.label for one in row] for row in rows] == [["0", "1", "2", "3"]] * 2
    scores = [[one.score for one in row] for row in rows]
    np.testing.assert_allclose(scores, exporter.expected(["alice", ""], exporter.x[:2]), atol=exporter.rounding())


def test_regress_with_a_context_that_all_examples_share(stub, exporter, serialized):
    request = regression_pb2.RegressionRequest()
    request.model_spec.name, request.model_spec.signature_name = "line", "regress"
    examples = request.input.example_list_with_context
    examples.context.features.feature["client_id"].bytes_list.value.append(b"ten")
    for x in exporter.x[:2]:
        examples.examples.add().features.feature["x"].float_list.value.extend(x.ravel().tolist())
    values = [one.value for one in stub.Regress(request, timeout=10).result.regressions]
    x = exporter.x[:2].astype(np.float64)
    # Six products, their sum with the bias; of terms that may cancel.
    bounds = gamma(2 + x[0].size) * (np.abs(x).sum(axis=(1, 2)) + 1) * 10
    assert_within(values, (x.sum(axis=(1, 2)) + 1) * 10, bounds)


def test_a_context_is_not_copied_beyond_the_limit_of_messages(stub):
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name, request.model_spec.signature_name = "toy", "classify"
    examples = request.input.example_list_with_context
    examples.context.features.feature["note"].bytes_list.value.append(b"x" * (MAX_BYTES // 3))
    for _ in range(3):
        examples.examples.add()
    with pytest.raises(grpc.RpcError, match="3 examples with a context of") as caught:
        stub.Classify(request, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_multi_inference_is_not_offered(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.MultiInference(inference_pb2.MultiInferenceRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_fault_of_the_server_is_logged_without_the_values_of_the_request(stub, monkeypatch, caplog):
    async def fail(protos, max_elements):
        raise AttributeError(f"cannot read {protos}")

    monkeypatch.setattr(prediction_service, "to_arrays", fail)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(_request(client_id=["secret patient"], x=np.zeros((1, 3, 2), np.float32)), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "Internal error; see the server's log."
    assert "AttributeError" in caplog.text
    assert "secret patient" not in caplog.text


def test_metadata(stub):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "toy"
    response = stub.GetModelMetadata(request, timeout=10)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert {"serving_default", "predict"} <= set(signatures.signature_def)


def test_status(model_stub):
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "toy"
    (status,) = model_stub.GetModelStatus(request, timeout=10).model_version_status
    assert status.version == 1
    assert status.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
