"""TensorFlow Serving's gRPC PredictionService: runs signatures and describes them."""

from typing import Any

import grpc
import numpy as np

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    inference_pb2,
    input_pb2,
    predict_pb2,
    regression_pb2,
)

from serving.errors import RequestError, invalid_argument
from serving.saved_model.servable import DEFAULT_SIGNATURE
from serving.saved_model.signatures import CLASSES_KEY, SCORES_KEY, VALUES_KEY
from serving.server.examples import examples_tensor
from serving.server.grpc_methods import method_handler
from serving.server.limits import Limits
from serving.server.loaded_version import LoadedVersion
from serving.server.manager import ModelManager
from serving.server.metrics import Metrics
from serving.server.model_messages import SIGNATURE_DEF, metadata_response, requested_spec
from serving.server.tensors import fill, to_arrays

_ENTRYPOINT = "GRPC"


class PredictionService:
    """Runs signatures and describes them.

    Attributes:
      methods: what gRPC calls, by name.
    """

    def __init__(self, manager: ModelManager, metrics: Metrics, limits: Limits):
        self._manager = manager
        self._metrics = metrics
        self._limits = limits
        self.methods = {
            "Predict": method_handler(predict_pb2.PredictRequest, self._predict),
            "Classify": method_handler(classification_pb2.ClassificationRequest, self._classify),
            "Regress": method_handler(regression_pb2.RegressionRequest, self._regress),
            "GetModelMetadata": method_handler(get_model_metadata_pb2.GetModelMetadataRequest, self._metadata),
            "MultiInference": method_handler(inference_pb2.MultiInferenceRequest, self._multi_inference),
        }

    async def _predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        """Runs one signature on the tensors of the request."""
        with (
            self._metrics.request(_ENTRYPOINT, "Predict") as observation,
            self._manager.acquire(requested_spec(request)) as loaded,
        ):
            observation.model_name = loaded.name
            inputs = await to_arrays(request.inputs, self._limits.max_elements)
            signature_name = request.model_spec.signature_name
            outputs = await observation.timed(loaded.run(signature_name, inputs, tuple(request.output_filter)))
            response = predict_pb2.PredictResponse()
            _fill_spec(response, loaded, signature_name)
            for key, array in outputs.items():
                fill(response.outputs[key], array)
            return response

    async def _classify(
        self, request: classification_pb2.ClassificationRequest
    ) -> classification_pb2.ClassificationResponse:
        """Labels and scores of the examples of the request."""
        with (
            self._metrics.request(_ENTRYPOINT, "Classify") as observation,
            self._manager.acquire(requested_spec(request)) as loaded,
        ):
            observation.model_name = loaded.name
            signature_name = request.model_spec.signature_name
            outputs = await observation.timed(loaded.classify(signature_name, self._examples(request.input)))
            response = classification_pb2.ClassificationResponse()
            _fill_spec(response, loaded, signature_name)
            _fill_classes(response.result, outputs)
            return response

    async def _regress(self, request: regression_pb2.RegressionRequest) -> regression_pb2.RegressionResponse:
        """One value for each example of the request."""
        with (
            self._metrics.request(_ENTRYPOINT, "Regress") as observation,
            self._manager.acquire(requested_spec(request)) as loaded,
        ):
            observation.model_name = loaded.name
            signature_name = request.model_spec.signature_name
            outputs = await observation.timed(loaded.regress(signature_name, self._examples(request.input)))
            response = regression_pb2.RegressionResponse()
            _fill_spec(response, loaded, signature_name)
            for value in outputs[VALUES_KEY].ravel().tolist():
                response.result.regressions.add().value = value
            return response

    async def _metadata(
        self, request: get_model_metadata_pb2.GetModelMetadataRequest
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        """Returns the signatures of a loaded version."""
        spec = requested_spec(request)
        for field in request.metadata_field:
            if field != SIGNATURE_DEF:
                raise invalid_argument(f"Metadata field {field} is not supported")
        if not request.metadata_field:
            raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
        with self._manager.acquire(spec) as loaded:
            return metadata_response(loaded)

    async def _multi_inference(self, request: inference_pb2.MultiInferenceRequest) -> Any:
        """Not offered: it serves models with several heads in one graph, which exports do not have."""
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, "MultiInference is not implemented by this server")

    def _examples(self, message: input_pb2.Input) -> np.ndarray:
        if message.WhichOneof("kind") == "example_list_with_context":
            listed, context = message.example_list_with_context, message.example_list_with_context.context
        else:
            listed, context = message.example_list, None
        examples = [example.SerializeToString() for example in listed.examples]
        return examples_tensor(context.SerializeToString() if context else b"", examples, self._limits.max_bytes)


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
