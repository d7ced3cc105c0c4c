"""Serves TensorFlow Serving's gRPC services `PredictionService` and `ModelService` on an asyncio loop.

The handler of a method parses the bytes of a request. If a method raises an error, the call ends with a gRPC status.
"""

import asyncio
import contextlib
import dataclasses
import logging
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    predict_pb2,
    regression_pb2,
)

from serving.errors import INTERNAL_ERROR, RequestError, invalid_argument, log_failure
from serving.saved_model.layout import CLASSIFY, REGRESS
from serving.saved_model.servable import DEFAULT_SIGNATURE
from serving.saved_model.signatures import CLASSES_KEY, SCORES_KEY, VALUES_KEY, Tensors
from serving.saved_model.warmup import read_examples
from serving.server.loaded_version import LoadedVersion
from serving.server.manager import SIGNATURE_DEF, ModelManager, metadata_response, requested_spec, status_response
from serving.server.metrics import Metrics, Observation
from serving.server.options import Limits
from serving.server.tensors import examples_tensor, fill, to_arrays
from serving.tf_serving import from_proto
from tff_pdp.errors import ServingError

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

_LOGGER = logging.getLogger(__name__)

# A message travels percent-encoded, up to three times as long, in metadata of which clients accept 8 KiB.
_MAX_MESSAGE_BYTES = 2_500

Method = Callable[[Any], Awaitable[Message]]


def method_handler(request_type: type[Message], method: Method) -> grpc.RpcMethodHandler:
    """Builds the gRPC handler of `method`, which gets requests of the class `request_type`.

    After a `RequestError`, the call ends with the error's code and message; after any other error, with INTERNAL and a
    message without values. Bytes that cannot be parsed cause INVALID_ARGUMENT; gRPC itself would send UNKNOWN.
    """

    async def call(message: bytes, context: grpc.aio.ServicerContext) -> Message:
        try:
            return await method(request_type.FromString(message))
        except RequestError as error:
            code, text = error.code, error.message
        except DecodeError:
            code, text = grpc.StatusCode.INVALID_ARGUMENT, "The request is not a message of this method."
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log_failure(_LOGGER, "A gRPC request", error)
            code, text = grpc.StatusCode.INTERNAL, INTERNAL_ERROR
        await context.abort(code, text.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore"))
        raise AssertionError("abort returned")

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=operator.methodcaller("SerializeToString"))


@dataclasses.dataclass(frozen=True)
class _Services:
    """Runs and describes signatures, reports the states of models, and changes the list of served models."""

    manager: ModelManager
    metrics: Metrics
    limits: Limits

    def handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """Returns gRPC's handlers by the names of service and method."""
        return {
            "PredictionService": {
                "Predict": method_handler(predict_pb2.PredictRequest, self._predict),
                "Classify": method_handler(classification_pb2.ClassificationRequest, self._classify),
                "Regress": method_handler(regression_pb2.RegressionRequest, self._regress),
                "GetModelMetadata": method_handler(get_model_metadata_pb2.GetModelMetadataRequest, self._metadata),
                "MultiInference": method_handler(inference_pb2.MultiInferenceRequest, self._multi_inference),
            },
            "ModelService": {
                "GetModelStatus": method_handler(get_model_status_pb2.GetModelStatusRequest, self._status),
                "HandleReloadConfigRequest": method_handler(model_management_pb2.ReloadConfigRequest, self._reload),
            },
        }

    async def _status(self, request: Any) -> Message:
        """Returns the state of one version, or the states of all versions that were seen."""
        return status_response(self.manager, requested_spec(request))

    async def _reload(self, request: Any) -> Message:
        """Serves the models of the request, and no others; returns when they are loaded."""
        await self.manager.reload(from_proto(request.config))
        return model_management_pb2.ReloadConfigResponse()

    @contextlib.contextmanager
    def _acquired(self, api: str, request: Any) -> Iterator[tuple[Observation, LoadedVersion]]:
        with self.metrics.request("GRPC", api) as observation, self.manager.acquire(requested_spec(request)) as loaded:
            observation.model_name = loaded.name
            yield observation, loaded

    async def _predict(self, request: Any) -> Message:
        """Runs one signature on the tensors of the request."""
        with self._acquired("Predict", request) as (observation, loaded):
            inputs = await to_arrays(request.inputs, self.limits.max_elements)
            signature_name = request.model_spec.signature_name
            outputs = await observation.timed(loaded.run(signature_name, inputs, tuple(request.output_filter)))
            response = _response(predict_pb2.PredictResponse, loaded, signature_name)
            for key, array in outputs.items():
                fill(response.outputs[key], array)
            return response

    async def _classify(self, request: Any) -> Message:
        """Returns labels and scores of the examples of the request."""
        with self._acquired("Classify", request) as (observation, loaded):
            outputs = await observation.timed(self._on_examples(CLASSIFY, request, loaded))
            signature_name = request.model_spec.signature_name
            response = _response(classification_pb2.ClassificationResponse, loaded, signature_name)
            _fill_classes(response.result, outputs)
            return response

    async def _regress(self, request: Any) -> Message:
        """Returns one value for each example of the request."""
        with self._acquired("Regress", request) as (observation, loaded):
            outputs = await observation.timed(self._on_examples(REGRESS, request, loaded))
            response = _response(regression_pb2.RegressionResponse, loaded, request.model_spec.signature_name)
            for value in outputs[VALUES_KEY].ravel().tolist():
                response.result.regressions.add().value = value
            return response

    async def _metadata(self, request: Any) -> Message:
        """Returns the signatures of a loaded version."""
        spec = requested_spec(request)
        for field in request.metadata_field:
            if field != SIGNATURE_DEF:
                raise invalid_argument(f"Metadata field {field} is not supported")
        if not request.metadata_field:
            raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
        with self.manager.acquire(spec) as loaded:
            return metadata_response(loaded)

    async def _multi_inference(self, request: Any) -> Message:
        """Refuses all requests: they are for graphs with several heads, which exports do not have."""
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, "MultiInference is not implemented by this server")

    def _on_examples(self, method: str, request: Any, loaded: LoadedVersion) -> Awaitable[Tensors]:
        examples = examples_tensor(*read_examples(request.input), self.limits.max_bytes)
        return loaded.on_examples(method, request.model_spec.signature_name, examples)


def _response(kind: Callable[[], Any], loaded: LoadedVersion, signature_name: str) -> Any:
    response = kind()
    response.model_spec.name = loaded.name
    response.model_spec.version.value = loaded.version
    response.model_spec.signature_name = signature_name or DEFAULT_SIGNATURE
    return response


def _fill_classes(result: classification_pb2.ClassificationResult, outputs: Tensors) -> None:
    labels, scores = outputs.get(CLASSES_KEY), outputs.get(SCORES_KEY)
    num_examples, num_classes = next(array.shape for array in (labels, scores) if array is not None)
    for example in range(num_examples):
        classes = result.classifications.add().classes
        for number in range(num_classes):
            added = classes.add()
            if labels is not None:
                added.label = labels[example, number].decode(errors="replace")
            if scores is not None:
                added.score = scores[example, number]


@contextlib.asynccontextmanager
async def running_grpc_server(
    manager: ModelManager, metrics: Metrics, host: str, port: int, limits: Limits
) -> AsyncIterator[int]:
    """Serves gRPC on `host:port` while the block runs, then waits for running requests; yields the port's number.

    Raises:
      ServingError: the port is in use.
    """
    server = grpc.aio.server(
        options=[
            # On by default; it lets two servers share a port, each with some of the requests.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.max_bytes),
            ("grpc.max_send_message_length", -1),
        ],
    )
    services = _Services(manager, metrics, limits).handlers()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(f"tensorflow.serving.{name}", one) for name, one in services.items()]
    )
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise ServingError(
            f"gRPC port {port} on {host} cannot be used (refused by gRPC); choose another, or 0."
        ) from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(limits.grace_seconds)
