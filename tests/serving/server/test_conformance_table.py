"""What TensorFlow Serving answers, read in its source, request by request, over both protocols where both exist."""

import dataclasses
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)

X = np.zeros((1, 3, 2), np.float32)
ROW = {"client_id": "a", "x": X[0].tolist()}
COLUMNS = {"client_id": ["a"], "x": X.tolist()}
PREDICT = "/v1/models/toy:predict"


@dataclasses.dataclass
class Case:
    """One request and its answer.

    Attributes:
      code: the gRPC status.
      message: what the answer says; its beginning and end, where there are two.
      rpc: the request by gRPC, if there is one.
      rest: method, path and body of the request by REST, if there is one.
      http: the status over REST.
    """

    code: str
    message: str | tuple[str, str]
    rpc: Any = None
    rest: tuple | None = None
    http: int = 400


def predict(name="toy", version=None, label=None, signature_name="", output_filter=(), inputs=None):
    request = predict_pb2.PredictRequest(output_filter=output_filter)
    _fill_spec(request, name, version, label, signature_name)
    for key, value in ({"client_id": ["a"], "x": X} if inputs is None else inputs).items():
        request.inputs[key].CopyFrom(
            value if isinstance(value, tensor_pb2.TensorProto) else tf.make_tensor_proto(value)
        )
    return request


def classify(name="toy", signature_name="classify", request_class=classification_pb2.ClassificationRequest, examples=1):
    request = request_class()
    _fill_spec(request, name, None, None, signature_name)
    for _ in range(examples):
        request.input.example_list.examples.add()
    return request


def regress(**changes):
    return classify(request_class=regression_pb2.RegressionRequest, **changes)


def status(name="toy", version=None):
    request = get_model_status_pb2.GetModelStatusRequest()
    _fill_spec(request, name, version, None, "")
    return request


def metadata(name="toy", version=None, label=None, fields=("signature_def",)):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
    _fill_spec(request, name, version, label, "")
    return request


def reload(*entries):
    request = model_management_pb2.ReloadConfigRequest()
    request.config.model_config_list.SetInParent()
    for entry in entries:
        request.config.model_config_list.config.add(**{"model_platform": "tensorflow", "base_path": "/m", **entry})
    return request


def _fill_spec(request, name, version, label, signature_name):
    request.model_spec.name = name
    request.model_spec.signature_name = signature_name
    if version is not None:
        request.model_spec.version.value = version
    if label is not None:
        request.model_spec.version_label = label


def _undecodable():
    return tensor_pb2.TensorProto(dtype=tf.float32.as_datatype_enum, tensor_content=b"\0" * 7)


def _post(body, path=PREDICT):
    return "POST", path, body


def _malformed(method, path):
    return Case("INVALID_ARGUMENT", f"Malformed request: {method} {path}", rest=(method, path, b"{}"))


CASES = {
    "bad verb": _malformed("POST", "/v1/models/toy:explode"),
    "verb in capitals": _malformed("POST", "/v1/models/toy:PREDICT"),
    "bad path": _malformed("GET", "/v1/anything"),
    "slash at the end": _malformed("GET", "/v1/models/toy/"),
    "wrong method": _malformed("GET", PREDICT),
    "post without verb": _malformed("POST", "/v1/models/toy"),
    "other method": _malformed("DELETE", "/v1/models/toy"),
    "version that is no number": _malformed("GET", "/v1/models/toy/versions/one"),
    "outside the API": Case("", "Not found", rest=("GET", "/v2/models/toy", None), http=404),
    "no model name": Case("INVALID_ARGUMENT", "Missing model name in request.", rest=("GET", "/v1/models", None)),
    "unknown model": Case(
        "NOT_FOUND",
        "Servable not found for request: Latest(other)",
        predict(name="other"),
        _post({"instances": [ROW]}, "/v1/models/other:predict"),
        404,
    ),
    "unknown version": Case(
        "NOT_FOUND",
        "Servable not found for request: Specific(toy, 7)",
        predict(version=7),
        _post({"instances": [ROW]}, "/v1/models/toy/versions/7:predict"),
        404,
    ),
    "a path as a name": Case(
        "NOT_FOUND",
        "Servable not found for request: Latest(../../etc)",
        predict(name="../../etc"),
        _post({"instances": [ROW]}, "/v1/models/..%2f..%2fetc:predict"),
        404,
    ),
    "unknown model, classify": Case(
        "NOT_FOUND",
        "Servable not found for request: Latest(other)",
        classify(name="other"),
        _post({"examples": [{}]}, "/v1/models/other:classify"),
        404,
    ),
    "unknown model, regress": Case(
        "NOT_FOUND",
        "Servable not found for request: Latest(other)",
        regress(name="other"),
        _post({"examples": [{}]}, "/v1/models/other:regress"),
        404,
    ),
    "metadata of an unknown version": Case(
        "NOT_FOUND",
        "Servable not found for request: Specific(toy, 7)",
        metadata(version=7),
        ("GET", "/v1/models/toy/versions/7/metadata", None),
        404,
    ),
    "status of an unknown model": Case(
        "NOT_FOUND",
        "Could not find any versions of model other",
        status(name="other"),
        ("GET", "/v1/models/other", None),
        404,
    ),
    "status of an unknown version": Case(
        "NOT_FOUND",
        "Could not find version 7 of model toy",
        status(version=7),
        ("GET", "/v1/models/toy/versions/7", None),
        404,
    ),
    "version beyond int64": Case(
        "INVALID_ARGUMENT",
        f"Failed to convert version: {2**63} to numeric.",
        rest=("GET", f"/v1/models/toy/versions/{2**63}", None),
    ),
    "unknown label": Case(
        "INVALID_ARGUMENT",
        "Unrecognized servable version label: canary",
        predict(label="canary"),
        _post({"instances": [ROW]}, "/v1/models/toy/labels/canary:predict"),
    ),
    "metadata of an unknown label": Case(
        "INVALID_ARGUMENT",
        "Unrecognized servable version label: canary",
        metadata(label="canary"),
        ("GET", "/v1/models/toy/labels/canary/metadata", None),
    ),
    "empty name": Case("INVALID_ARGUMENT", "ModelSpec has no name specified.", predict(name="")),
    "predict without a spec": Case("INVALID_ARGUMENT", "Missing ModelSpec", predict_pb2.PredictRequest()),
    "classify without a spec": Case(
        "INVALID_ARGUMENT", "Missing ModelSpec", classification_pb2.ClassificationRequest()
    ),
    "regress without a spec": Case("INVALID_ARGUMENT", "Missing ModelSpec", regression_pb2.RegressionRequest()),
    "status without a spec": Case(
        "INVALID_ARGUMENT", "Missing ModelSpec", get_model_status_pb2.GetModelStatusRequest()
    ),
    "metadata without a spec": Case(
        "INVALID_ARGUMENT", "Missing ModelSpec", get_model_metadata_pb2.GetModelMetadataRequest()
    ),
    "unknown signature": Case(
        "FAILED_PRECONDITION", 'Serving signature key "s" not found.', predict(signature_name="s")
    ),
    "unknown signature over REST": Case(
        "INVALID_ARGUMENT",
        'Serving signature name: "s" not found in signature def',
        rest=_post({"signature_name": "s", "instances": [ROW]}),
    ),
    "missing input": Case(
        "INVALID_ARGUMENT",
        "input size does not match signature: 1!=2 len({x}) != len({client_id,x}). Sent extra: {}. "
        "Missing but required: {client_id}.",
        predict(inputs={"x": X}),
    ),
    "missing input over REST": Case(
        "INVALID_ARGUMENT",
        "Missing named input: client_id in 'inputs' object.",
        rest=_post({"inputs": {"x": X.tolist()}}),
    ),
    "extra input": Case(
        "INVALID_ARGUMENT",
        "input size does not match signature: 3!=2 len({client_id,x,z}) != len({client_id,x}). Sent extra: {z}. "
        "Missing but required: {}.",
        predict(inputs={"client_id": ["a"], "x": X, "z": X}),
    ),
    "wrong input name": Case(
        "INVALID_ARGUMENT",
        "input tensor alias not found in signature: xx. Inputs expected to be in the set {client_id,x}.",
        predict(inputs={"client_id": ["a"], "xx": X}),
    ),
    "unknown output": Case(
        "INVALID_ARGUMENT",
        "output tensor alias not found in signature: y Outputs expected to be in the set {personalized,probabilities}.",
        predict(output_filter=["y"]),
    ),
    "repeated output": Case(
        "INVALID_ARGUMENT",
        "duplicate output tensor alias: personalized",
        predict(output_filter=["personalized", "personalized"]),
    ),
    "undecodable tensor": Case(
        "INVALID_ARGUMENT", "tensor parsing error: x", predict(inputs={"client_id": ["a"], "x": _undecodable()})
    ),
    "wrong dtype": Case(
        "INVALID_ARGUMENT",
        ("Expects arg[", "is provided"),
        predict(inputs={"client_id": ["a"], "x": X.astype(np.float64)}),
    ),
    "wrong shape": Case(
        "INVALID_ARGUMENT",
        ("input x has shape [1, 2, 3]", ""),
        predict(inputs={"client_id": ["a"], "x": X.reshape(1, 2, 3)}),
        _post({"inputs": {"client_id": ["a"], "x": X.reshape(1, 2, 3).tolist()}}),
    ),
    "batch sizes that differ": Case(
        "INVALID_ARGUMENT",
        ("assertion failed: [client_id and the examples must have the same batch size", ""),
        predict(inputs={"client_id": ["a", "b"], "x": X}),
        _post({"inputs": {"client_id": ["a", "b"], "x": X.tolist()}}),
    ),
    "too many elements": Case(
        "RESOURCE_EXHAUSTED",
        "input x has 1025 elements; this server accepts 1024",
        predict(inputs={"client_id": ["a"], "x": np.zeros(1025, np.float32)}),
    ),
    "empty body": Case("INVALID_ARGUMENT", "JSON Parse error: The document is empty", rest=_post(b"")),
    "bad JSON": Case(
        "INVALID_ARGUMENT", "JSON Parse error: Expecting value at offset: 15", rest=_post(b'{"instances": [')
    ),
    "bad JSON for an unknown model": Case(
        "INVALID_ARGUMENT", ("JSON Parse error", ""), rest=_post(b"{", "/v1/models/other:predict")
    ),
    "nested too deeply": Case("INVALID_ARGUMENT", "JSON Parse error: nested too deeply", rest=_post(b"[" * 30000)),
    "not an object": Case("INVALID_ARGUMENT", "JSON Value: [1] Is not object", rest=_post([1])),
    "neither key": Case("INVALID_ARGUMENT", "Missing 'inputs' or 'instances' key", rest=_post({})),
    "both keys": Case(
        "INVALID_ARGUMENT",
        ("JSON Value: {", "expecting only one of 'inputs' or 'instances' keys to exist "),
        rest=_post({"inputs": {}, "instances": []}),
    ),
    "no instances": Case(
        "INVALID_ARGUMENT", ("JSON Value: {", "No values in 'instances' array"), rest=_post({"instances": []})
    ),
    "instances that are no list": Case(
        "INVALID_ARGUMENT",
        ("JSON Value: {", "Expecting 'instances' to be an list/array"),
        rest=_post({"instances": {}}),
    ),
    "plain instances for two inputs": Case(
        "INVALID_ARGUMENT",
        "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
        "tensorinfo_map",
        rest=_post({"instances": [1]}),
    ),
    "plain inputs for two inputs": Case(
        "INVALID_ARGUMENT",
        "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
        "tensorinfo_map",
        rest=_post({"inputs": [1]}),
    ),
    "element without a key": Case(
        "INVALID_ARGUMENT",
        ("Failed to process element: 1 of 'instances' list. JSON object: {", "keys must be equal to: client_id,x"),
        rest=_post({"instances": [ROW, {"client_id": "a"}]}),
    ),
    "element with a key too many": Case(
        "INVALID_ARGUMENT",
        ("Failed to process element: 0 key: z of 'instances' list.", "does not have named input: z"),
        rest=_post({"instances": [{**ROW, "z": 1}]}),
    ),
    "wrong type": Case(
        "INVALID_ARGUMENT",
        'JSON Value: "q" Type: String is not of expected type: float',
        rest=_post({"inputs": {"client_id": ["a"], "x": ["q"]}}),
    ),
    "number for a string": Case(
        "INVALID_ARGUMENT",
        ("Failed to process element: 0 key: client_id", "JSON Value: 7 Type: Number is not of expected type: string"),
        rest=_post({"instances": [{**ROW, "client_id": 7}]}),
    ),
    "ragged": Case(
        "INVALID_ARGUMENT",
        "Encountered list at unexpected size: 1 at level: 1 expected size: 2",
        rest=_post({"inputs": {"client_id": ["a"], "x": [[0, 0], [0], [0, 0]]}}),
    ),
    "sizes that differ": Case(
        "INVALID_ARGUMENT",
        ("Failed to process element: 1 key: x", "Expecting tensor size: 6 but got: 4"),
        rest=_post({"instances": [ROW, {**ROW, "x": [[0, 0], [0, 0]]}]}),
    ),
    "shapes that differ": Case(
        "INVALID_ARGUMENT",
        ("Failed to process element: 1 key: x", "Expecting shape [3,2] but got: [2,3]"),
        rest=_post({"instances": [ROW, {**ROW, "x": [[0, 0, 0], [0, 0, 0]]}]}),
    ),
    "bad base64": Case(
        "INVALID_ARGUMENT",
        "Unable to base64 decode",
        rest=_post({"inputs": {"client_id": [{"b64": "?"}], "x": X.tolist()}}),
    ),
    "number too big for a double": Case(
        "INVALID_ARGUMENT",
        "JSON Parse error: Number too big to be stored in double.",
        rest=_post(b'{"instances": [1e999]}'),
    ),
    "NaN reaches the model": Case(
        "INVALID_ARGUMENT",
        ("x must be finite", ""),
        predict(inputs={"client_id": ["a"], "x": X * np.nan}),
        _post(b'{"inputs": {"client_id": ["a"], "x": [[[NaN, 0], [0, 0], [0, 0]]]}}'),
    ),
    "infinity reaches the model": Case(
        "INVALID_ARGUMENT",
        ("x must be finite", ""),
        predict(inputs={"client_id": ["a"], "x": X + np.inf}),
        _post(b'{"inputs": {"client_id": ["a"], "x": [[[-Infinity, 1e39], [0, 0], [0, 0]]]}}'),
    ),
    "no examples": Case("INVALID_ARGUMENT", "Input is empty.", classify(examples=0)),
    "no examples to regress": Case(
        "INVALID_ARGUMENT", "Input is empty.", regress(name="line", signature_name="regress", examples=0)
    ),
    "no examples over REST": Case(
        "INVALID_ARGUMENT",
        ("JSON Value: {", "'examples' value is an empty array"),
        rest=_post({"examples": []}, "/v1/models/toy:classify"),
    ),
    "examples are missing": Case(
        "INVALID_ARGUMENT",
        "JSON Value: {} When method is classify, key 'examples' is expected and was not found",
        rest=_post({}, "/v1/models/toy:classify"),
    ),
    "examples that are no list": Case(
        "INVALID_ARGUMENT",
        ("JSON Value: {", "Expecting 'examples' value to be an list/array"),
        rest=_post({"examples": 7}, "/v1/models/toy:regress"),
    ),
    "example that is no object": Case(
        "INVALID_ARGUMENT",
        "Example must be JSON object but got JSON Array",
        rest=_post({"examples": [[1]]}, "/v1/models/toy:classify"),
    ),
    "feature of two kinds": Case(
        "INVALID_ARGUMENT",
        "Unexpected element type in feature: x expecting type: int64",
        rest=_post({"examples": [{"x": [1, 1.5]}]}, "/v1/models/toy:classify"),
    ),
    "feature that is nested": Case(
        "INVALID_ARGUMENT",
        "Feature: x has element with unexpected JSON type: Array",
        rest=_post({"examples": [{"x": [[1.5]]}]}, "/v1/models/toy:classify"),
    ),
    "feature that is null": Case(
        "INVALID_ARGUMENT",
        "Feature: x has element with unexpected JSON type: Null",
        rest=_post({"examples": [{"x": None}]}, "/v1/models/toy:classify"),
    ),
    "feature beyond int64": Case(
        "INVALID_ARGUMENT",
        "Feature: x has uint64_t element. Only int64_t is supported.",
        rest=_post({"examples": [{"x": 2**63}]}, "/v1/models/toy:classify"),
    ),
    "no such signature to classify": Case(
        "INVALID_ARGUMENT",
        "No signature was found with the name: s",
        classify(signature_name="s"),
        _post({"signature_name": "s", "examples": [{}]}, "/v1/models/toy:classify"),
    ),
    "the default signature does not classify": Case(
        "INVALID_ARGUMENT",
        "Expected one input Tensor.",
        classify(signature_name=""),
        _post({"examples": [{}]}, "/v1/models/toy:classify"),
    ),
    "a classifier does not regress": Case(
        "INVALID_ARGUMENT",
        "Expected one output Tensor.",
        regress(),
        _post({"signature_name": "classify", "examples": [{}]}, "/v1/models/toy:regress"),
    ),
    "a regression does not classify": Case(
        "INVALID_ARGUMENT",
        ('Expected classification signature outputs to contain at least one of "classes" or "scores".', ""),
        classify(name="line", signature_name="regress"),
        _post({"signature_name": "regress", "examples": [{}]}, "/v1/models/line:classify"),
    ),
    "metadata of something else": Case("INVALID_ARGUMENT", "Metadata field f is not supported", metadata(fields=["f"])),
    "metadata of nothing": Case(
        "INVALID_ARGUMENT", "GetModelMetadataRequest must specify at least one metadata_field", metadata(fields=[])
    ),
    "reload: a name twice": Case(
        "INVALID_ARGUMENT",
        "Illegal to list model m multiple times in config list",
        reload({"name": "m"}, {"name": "m"}),
    ),
    "reload: a relative path": Case(
        "INVALID_ARGUMENT",
        "Expected model m to have an absolute path or URI; got base_path()=here",
        reload({"name": "m", "base_path": "here"}),
    ),
    "reload: no platform": Case(
        "INVALID_ARGUMENT", ("Illegal setting neither", ""), reload({"name": "m", "model_platform": ""})
    ),
    "reload: not a list": Case(
        "INVALID_ARGUMENT",
        "ServerModelConfig type not supported by HandleReloadConfigRequest. Only ModelConfigList is currently "
        "supported",
        model_management_pb2.ReloadConfigRequest(),
    ),
    "reload: a folder of somebody else": Case(
        "PERMISSION_DENIED", ("Model m is at /etc", ""), reload({"name": "m", "base_path": "/etc"})
    ),
}


def _cases(protocol):
    return [pytest.param(case, id=name) for name, case in CASES.items() if getattr(case, protocol) is not None]


def _check_message(case, message):
    if isinstance(case.message, str):
        assert message == case.message
    else:
        start, end = case.message
        assert message.startswith(start)
        assert message.endswith(end)


@pytest.mark.parametrize("case", _cases("rpc"))
def test_grpc(stub, model_stub, case):
    calls = {
        predict_pb2.PredictRequest: stub.Predict,
        classification_pb2.ClassificationRequest: stub.Classify,
        regression_pb2.RegressionRequest: stub.Regress,
        get_model_metadata_pb2.GetModelMetadataRequest: stub.GetModelMetadata,
        get_model_status_pb2.GetModelStatusRequest: model_stub.GetModelStatus,
        model_management_pb2.ReloadConfigRequest: model_stub.HandleReloadConfigRequest,
    }
    with pytest.raises(grpc.RpcError) as caught:
        calls[type(case.rpc)](case.rpc, timeout=10)
    assert caught.value.code().name == case.code
    _check_message(case, caught.value.details())


@pytest.mark.parametrize("case", _cases("rest"))
def test_rest(call, case):
    status, answer = call(*case.rest)
    assert status == case.http
    assert answer.keys() == {"error"}
    _check_message(case, answer["error"])


def test_every_route_names_its_version_by_number_label_or_not_at_all(call):
    body = {"instances": [ROW]}
    _, expected = call("POST", PREDICT, body)
    classified = call("POST", "/v1/models/toy:classify", {"signature_name": "classify", "examples": [{"x": [0.5] * 6}]})
    _, described = call("GET", "/v1/models/toy/metadata")
    _, states = call("GET", "/v1/models/toy")
    for version in ("/versions/1", "/labels/stable", "/versions/001"):
        assert call("POST", f"/v1/models/toy{version}:predict", body) == (200, expected)
        examples = {"signature_name": "classify", "examples": [{"x": [0.5] * 6}]}
        assert call("POST", f"/v1/models/toy{version}:classify", examples) == classified
        assert call("GET", f"/v1/models/toy{version}/metadata") == (200, described)
        assert call("GET", f"/v1/models/toy{version}") == (200, states)
    assert call("POST", "/V1/MODELS/toy:predict", body) == (200, expected)
    assert classified[0] == 200


def test_an_unknown_client_is_no_error(call, stub):
    _, answer = call("POST", PREDICT, {"instances": [{**ROW, "client_id": "nobody"}]})
    assert answer["predictions"][0]["personalized"] is False
    answer = stub.Predict(predict(inputs={"client_id": ["nobody"], "x": X}), timeout=10)
    assert list(answer.outputs["personalized"].bool_val) == [False]
