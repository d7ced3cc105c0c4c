"""TensorFlow Serving's gRPC PredictionService: runs signatures and describes them."""

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
# The module `prediction_service_pb2` cannot be imported under protobuf 4, and is not needed.
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    input_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from serving.errors import invalid_argument
from serving.saved_model.servable import DEFAULT_SIGNATURE
from serving.saved_model.signatures import CLASSES_KEY, SCORES_KEY, VALUES_KEY
from serving.server.grpc_answers import answer
from serving.server.limits import Limits
from serving.server.loaded_version import LoadedVersion
from serving.server.manager import ModelManager
from serving.server.metrics import Metrics
from serving.server.model_messages import SIGNATURE_DEF, metadata_response, requested_spec
from serving.server.tensor_protos import fill, to_array

_ENTRYPOINT = "GRPC"


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Runs signatures and describes them."""

    def __init__(self, manager: ModelManager, metrics: Metrics, limits: Limits):
        self._manager = manager
        self._metrics = metrics
        self._limits = limits

    async def Predict(self, request: predict_pb2.PredictRequest, context: grpc.aio.ServicerContext):
        """Runs one signature on the tensors of the request."""
        return await answer(context, self._predict(request))

    async def Classify(self, request: classification_pb2.ClassificationRequest, context: grpc.aio.ServicerContext):
        """Labels and scores of the examples of the request."""
        return await answer(context, self._classify(request))

    async def Regress(self, request: regression_pb2.RegressionRequest, context: grpc.aio.ServicerContext):
        """One value for each example of the request."""
        return await answer(context, self._regress(request))

    async def MultiInference(self, request: Any, context: grpc.aio.ServicerContext):
        """Not offered: it serves models with several heads in one graph, which exports do not have."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "MultiInference is not implemented by this server")

    async def GetModelMetadata(
        self, request: get_model_metadata_pb2.GetModelMetadataRequest, context: grpc.aio.ServicerContext
    ):
        """Returns the signatures of a loaded version."""
        return await answer(context, self._metadata(request))

    async def _predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        with (
            self._metrics.request(_ENTRYPOINT, "Predict") as observation,
            self._manager.acquire(requested_spec(request)) as loaded,
        ):
            observation.model_name = loaded.name
            inputs = {key: to_array(key, proto, self._limits.max_elements) for key, proto in request.inputs.items()}
            signature_name = request.model_spec.signature_name
            with self._metrics.runtime(loaded.name, observation.api):
                outputs = await loaded.run(signature_name, inputs, tuple(request.output_filter))
            response = predict_pb2.PredictResponse()
            _fill_spec(response, loaded, signature_name)
            for key, array in outputs.items():
                fill(response.outputs[key], array)
            return response

    async def _classify(
        self, request: classification_pb2.ClassificationRequest
    ) -> classification_pb2.ClassificationResponse:
        with (
            self._metrics.request(_ENTRYPOINT, "Classify") as observation,
            self._manager.acquire(requested_spec(request)) as loaded,
        ):
            observation.model_name = loaded.name
            signature_name = request.model_spec.signature_name
            with self._metrics.runtime(loaded.name, observation.api):
                outputs = await loaded.classify(signature_name, _examples(request.input))
            response = classification_pb2.ClassificationResponse()
            _fill_spec(response, loaded, signature_name)
            _fill_classes(response.result, outputs)
            return response

    async def _regress(self, request: regression_pb2.RegressionRequest) -> regression_pb2.RegressionResponse:
        with (
            self._metrics.request(_ENTRYPOINT, "Regress") as observation,
            self._manager.acquire(requested_spec(request)) as loaded,
        ):
            observation.model_name = loaded.name
            signature_name = request.model_spec.signature_name
            with self._metrics.runtime(loaded.name, observation.api):
                outputs = await loaded.regress(signature_name, _examples(request.input))
            response = regression_pb2.RegressionResponse()
            _fill_spec(response, loaded, signature_name)
            for value in outputs[VALUES_KEY].ravel().tolist():
                response.result.regressions.add().value = value
            return response

    async def _metadata(self, request: get_model_metadata_pb2.GetModelMetadataRequest):
        spec = requested_spec(request)
        for field in request.metadata_field:
            if field != SIGNATURE_DEF:
                raise invalid_argument(f"Metadata field {field} is not supported")
        if not request.metadata_field:
            raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
        with self._manager.acquire(spec) as loaded:
            return metadata_response(loaded)


def _examples(message: input_pb2.Input) -> np.ndarray:
    """The serialised examples of a request, bytes `[n]`, each after the context that they share."""
    if message.WhichOneof("kind") == "example_list_with_context":
        examples: Sequence[Any] = message.example_list_with_context.examples
        context = message.example_list_with_context.context.SerializeToString()
    else:
        examples, context = message.example_list.examples, b""
    array = np.empty(len(examples), object)
    # Serialised messages are merged by writing one after the other.
    array[:] = [context + example.SerializeToString() for example in examples]
    return array


def _fill_spec(response: Any, loaded: LoadedVersion, signature_name: str) -> None:
    response.model_spec.name = loaded.name
    response.model_spec.version.value = loaded.version
    response.model_spec.signature_name = signature_name or DEFAULT_SIGNATURE


def _fill_classes(result: classification_pb2.ClassificationResult, outputs: dict[str, np.ndarray]) -> None:
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
