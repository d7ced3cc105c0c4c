"""Calls a server over gRPC. Importing this module imports TensorFlow, because requests have TensorFlow's messages."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf.message import Message

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from serving.client import answers
from serving.client.answers import SIGNATURE_FIELD, ModelMetadata, VersionState
from serving.client.calls import Deadline, ServerError, UnavailableError, call_with_retries
from serving.client.model_client import Batch, ModelClient, Version
from serving.saved_model.layout import CLASSIFY, PREDICT, ModelSpec
from serving.saved_model.warmup import example
from serving.tf_serving import to_dict

# A server that restarts is found again within this time, not gRPC's default of up to two minutes.
_FIRST_RECONNECT_MILLISECONDS, _LONGEST_RECONNECT_MILLISECONDS = 100, 1000

Answer = TypeVar("Answer")


@dataclasses.dataclass(eq=False)
class GrpcClient(ModelClient[Message]):
    """Calls the gRPC API over one channel.

    `credentials` are channel credentials, such as `grpc.ssl_channel_credentials()`; with None, nothing is encrypted.
    """

    _: dataclasses.KW_ONLY
    credentials: grpc.ChannelCredentials | None = None

    def __post_init__(self):
        super().__post_init__()
        arguments = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MILLISECONDS),
            ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MILLISECONDS),
            # Model servers are near: a proxy meant for the web would only fail to find them.
            ("grpc.enable_http_proxy", 0),
        ]
        if self.credentials is None:
            self._channel = grpc.insecure_channel(self.address, options=arguments)
        else:
            self._channel = grpc.secure_channel(self.address, self.credentials, options=arguments)
        self._predictions = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)

    def status(self, model_name: str, *, version: int | None = None) -> list[VersionState]:
        """Returns the states of versions; see `ModelClient.status`."""
        spec = _spec(ModelSpec(model_name, version), "")
        request = get_model_status_pb2.GetModelStatusRequest(model_spec=spec)
        response = self._send(self._models.GetModelStatus, request)
        return self._checked(lambda: answers.version_states(to_dict(response)))

    def metadata(self, model_name: str, **version: Unpack[Version]) -> ModelMetadata:
        """Returns the signatures of a version; see `ModelClient.metadata`."""
        spec = _spec(ModelSpec(model_name, **version), "")
        request = get_model_metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=[SIGNATURE_FIELD])
        response = self._send(self._predictions.GetModelMetadata, request)
        return self._checked(lambda: answers.metadata(to_dict(response)))

    def reload_config(self, config: Message) -> None:
        """Replaces the server's list of models with the list in `config`, and waits until new models have loaded.

        The server unloads models that are not in `config`.

        Raises:
          ServerError: the server cannot be reached in time or refuses the configuration.
        """
        request = model_management_pb2.ReloadConfigRequest(config=config)
        # Where the configuration is refused, the call itself fails, with the status that is in the answer too.
        self._send(self._models.HandleReloadConfigRequest, request)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def _encode(self, method: str, spec: ModelSpec, signature_name: str, batch: Batch) -> tuple[Message, int]:
        if method == PREDICT:
            dtype = tf.float32 if isinstance(batch.values, np.ndarray) else tf.string
            inputs = {
                "client_id": tf.make_tensor_proto(batch.client_ids, tf.string),
                batch.key: tf.make_tensor_proto(batch.values, dtype),
            }
            request = predict_pb2.PredictRequest(model_spec=_spec(spec, signature_name), inputs=inputs)
        else:
            build = classification_pb2.ClassificationRequest if method == CLASSIFY else regression_pb2.RegressionRequest
            request = build(model_spec=_spec(spec, signature_name))
            pairs = zip(batch.client_ids, batch.values, strict=True)
            request.input.example_list.examples.extend(example(client_id, np.asarray(x)) for client_id, x in pairs)
        return request, request.ByteSize()

    def _call(self, method: str, spec: ModelSpec, payload: Message, deadline: Deadline) -> tuple[np.ndarray, ...]:
        calls = {PREDICT: self._predictions.Predict, CLASSIFY: self._predictions.Classify}
        response = self._send(calls.get(method, self._predictions.Regress), payload, deadline)
        return self._checked(lambda: _arrays(method, response))

    def _send(self, call: Callable, request: Message, deadline: Deadline | None = None) -> Any:
        def attempt(seconds: float) -> Message:
            try:
                return call(request, timeout=seconds)
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or "no message"
                if code == grpc.StatusCode.UNAVAILABLE:
                    raise UnavailableError(self.address, code.name, details) from error
                raise ServerError(self.address, code.name, details) from error

        deadline = deadline or Deadline(self.timeout_seconds)
        return call_with_retries(attempt, self.address, deadline, self.max_attempts)

    def _checked(self, read: Callable[[], Answer]) -> Answer:
        try:
            return read()
        except (KeyError, TypeError, ValueError) as error:
            raise self._unlike_a_personal_model() from error


def _spec(spec: ModelSpec, signature_name: str) -> Message:
    message = model_pb2.ModelSpec(name=spec.name, signature_name=signature_name)
    if spec.version is not None:
        message.version.value = spec.version
    if spec.label is not None:
        message.version_label = spec.label
    return message


def _arrays(method: str, response: Any) -> tuple[np.ndarray, ...]:
    if method == PREDICT:
        outputs = dict(response.outputs)
        return tf.make_ndarray(outputs[answers.answers_name(outputs)]), tf.make_ndarray(outputs["personalized"])
    if method == CLASSIFY:
        results = response.result.classifications
        classes = [[one.label for one in result.classes] for result in results]
        scores = [[one.score for one in result.classes] for result in results]
        return np.array(classes, np.str_), np.array(scores, np.float32)
    return (np.array([one.value for one in response.result.regressions], np.float32),)
