"""The gRPC API: PredictionService.Predict and GetModelMetadata, ModelService.GetModelStatus."""

import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import TypeVar

import grpc
import numpy as np
import tensorflow as tf

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
# The modules `prediction_service_pb2` and `model_service_pb2` cannot be imported under protobuf 4, and are not needed.
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from serving.errors import RequestError, invalid_argument
from serving.loader import Servable
from serving.manager import ModelManager
from tff_pdp.errors import ServingError

_METADATA_FIELD = "signature_def"
_NUM_THREADS = 8
_STOP_SECONDS = 2.0

Response = TypeVar("Response")


@contextlib.contextmanager
def running_grpc_server(
    manager: ModelManager, host: str, port: int, *, max_bytes: int, max_elements: int
) -> Iterator[tuple[grpc.Server, int]]:
    """Yields a gRPC server bound to `host:port`, to be started by the caller, and its port; stops it at the end.

    Args:
      manager: what answers.
      host: address to listen on.
      port: 0 for any free one.
      max_bytes: largest message accepted.
      max_elements: most elements in one input tensor.

    Raises:
      ServingError: if the port is taken.
    """
    _check_port(host, port)
    with futures.ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grpc") as executor:
        server = grpc.server(
            executor,
            options=[
                # On by default, which lets two servers share a port, each getting some of the requests.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", -1),
            ],
        )
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
            PredictionService(manager, max_elements), server
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(manager), server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ServingError(_port_message(host, port, "refused by gRPC")) from error
        try:
            yield server, bound
        finally:
            server.stop(_STOP_SECONDS).wait()


def _check_port(host: str, port: int) -> None:
    """Tries the port with a plain socket: gRPC itself would print its own lines before it fails."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ServingError(_port_message(host, port, reason)) from error


def _port_message(host: str, port: int, reason: str) -> str:
    return f"gRPC port {port} on {host} cannot be used ({reason}); choose another, or 0."


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Predict and GetModelMetadata; the other methods answer UNIMPLEMENTED."""

    def __init__(self, manager: ModelManager, max_elements: int):
        self._manager = manager
        self._max_elements = max_elements

    def Predict(self, request: predict_pb2.PredictRequest, context: grpc.ServicerContext):
        """Runs one signature on the tensors of the request."""
        return _answer(context, lambda: self._predict(request))

    def GetModelMetadata(self, request: get_model_metadata_pb2.GetModelMetadataRequest, context: grpc.ServicerContext):
        """Returns the signatures of a loaded version."""
        return _answer(context, lambda: self._metadata(request))

    def _predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        name = request.model_spec.name
        version, servable = self._manager.servable(name, requested_version(request.model_spec))
        inputs = {key: self._to_array(key, proto) for key, proto in request.inputs.items()}
        outputs = servable.predict(request.model_spec.signature_name, inputs, request.output_filter)
        response = predict_pb2.PredictResponse()
        response.model_spec.name = name
        response.model_spec.version.value = version
        response.model_spec.signature_name = request.model_spec.signature_name or "serving_default"
        for key, array in outputs.items():
            response.outputs[key].CopyFrom(tf.make_tensor_proto(array))
        return response

    def _to_array(self, key: str, proto) -> np.ndarray:
        sizes = [dimension.size for dimension in proto.tensor_shape.dim]
        # A shape may promise more elements than the message carries; the rest would be filled in, at any size.
        if any(size < 0 for size in sizes):
            raise invalid_argument(f"tensor parsing error: {key}")
        if math.prod(sizes) > self._max_elements:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"input {key} has {math.prod(sizes)} elements; this server accepts {self._max_elements}",
            )
        try:
            return tf.make_ndarray(proto)
        except (TypeError, ValueError, KeyError) as error:
            raise invalid_argument(f"tensor parsing error: {key}") from error

    def _metadata(self, request: get_model_metadata_pb2.GetModelMetadataRequest):
        for field in request.metadata_field:
            if field != _METADATA_FIELD:
                raise invalid_argument(f"Metadata field {field} is not supported")
        if not request.metadata_field:
            raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
        version, servable = self._manager.servable(request.model_spec.name, requested_version(request.model_spec))
        return metadata_response(request.model_spec.name, version, servable)


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """GetModelStatus; the other methods answer UNIMPLEMENTED."""

    def __init__(self, manager: ModelManager):
        self._manager = manager

    def GetModelStatus(self, request: get_model_status_pb2.GetModelStatusRequest, context: grpc.ServicerContext):
        """Returns the states of one version, or of all that were seen."""
        return _answer(context, lambda: self._status(request))

    def _status(self, request: get_model_status_pb2.GetModelStatusRequest):
        if not request.HasField("model_spec"):
            raise invalid_argument("Missing ModelSpec")
        return status_response(self._manager, request.model_spec.name, requested_version(request.model_spec))


def requested_version(model_spec: model_pb2.ModelSpec) -> int | None:
    """Returns the version a request names, or `None` for the latest.

    Raises:
      RequestError: INVALID_ARGUMENT for a label, as this server has none.
    """
    choice = model_spec.WhichOneof("version_choice")
    if choice == "version_label" and model_spec.version_label:
        raise invalid_argument(f"Unrecognized servable version label: {model_spec.version_label}")
    return model_spec.version.value if choice == "version" else None


def metadata_response(
    model_name: str, version: int, servable: Servable
) -> get_model_metadata_pb2.GetModelMetadataResponse:
    """Builds the metadata message of a loaded version: its signatures."""
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.model_spec.name = model_name
    response.model_spec.version.value = version
    signatures = get_model_metadata_pb2.SignatureDefMap()
    for name, signature in servable.signatures.items():
        signatures.signature_def[name].CopyFrom(signature)
    response.metadata[_METADATA_FIELD].Pack(signatures)
    return response


def status_response(
    manager: ModelManager, model_name: str, version: int | None
) -> get_model_status_pb2.GetModelStatusResponse:
    """Builds the status message of one version, or of all for `None`.

    Raises:
      RequestError: NOT_FOUND for an unknown model or version.
    """
    response = get_model_status_pb2.GetModelStatusResponse()
    for status in manager.statuses(model_name, version):
        entry = response.model_version_status.add()
        entry.version = status.version
        entry.state = get_model_status_pb2.ModelVersionStatus.State.Value(status.state)
        if status.error:
            entry.status.error_code = grpc.StatusCode.UNKNOWN.value[0]
            entry.status.error_message = status.error
    return response


def _answer(context: grpc.ServicerContext, handle: Callable[[], Response]) -> Response:
    try:
        return handle()
    except RequestError as error:
        context.abort(error.code, error.message)
        raise  # Not reached: abort raises.
