"""Clients of an exported model, for the embedded server and TensorFlow Serving alike."""

import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Sequence

import grpc
import numpy as np

from tff_pdp.errors import ServingError

DEFAULT_TIMEOUT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer for a batch.

    Attributes:
      answers: float32, probabilities `[batch, num_classes]`, or a regression's values `[batch]`.
      personalized: bool `[batch]`; false where the client is unknown and the global model answered.
    """

    answers: np.ndarray
    personalized: np.ndarray


class RestClient:
    """Calls the REST API. Needs no TensorFlow."""

    def __init__(self, address: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS):
        """Does not connect yet.

        Args:
          address: `host:port`, or a URL such as `https://models.example.org`.
          timeout_seconds: how long one request may take.
        """
        self._url = (address if "://" in address else f"http://{address}").rstrip("/")
        self._timeout_seconds = timeout_seconds
        # Model servers are near: a proxy meant for the web would only fail to find them.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def predict(self, model_name: str, client_ids: Sequence[str], x: np.ndarray) -> Prediction:
        """Predicts each example with the weights of its client.

        Args:
          model_name: the name the model is served under.
          client_ids: one id for each example; an empty one asks for the global model.
          x: float32 `[batch, *input_shape]`.

        Raises:
          ServingError: if the server cannot be reached in time or refuses the request.
        """
        inputs = {"client_id": list(client_ids), "x": np.asarray(x, np.float32).tolist()}
        url = f"{self._url}/v1/models/{urllib.parse.quote(model_name, safe='')}:predict"
        request = urllib.request.Request(
            url, json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                outputs = json.load(response)["outputs"]
                return Prediction(
                    np.array(outputs[_answers_name(outputs)], np.float32), np.array(outputs["personalized"], bool)
                )
        except urllib.error.HTTPError as error:
            raise ServingError(f"{url} answered {error.code}: {_error_message(error)}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ServingError(f"{url} cannot be reached: {reason}. Is the server running?") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ServingError(f"{url} did not answer like a personalised model of this package.") from error


class GrpcClient:
    """Calls the gRPC API. Close it, or use it as a context manager."""

    def __init__(self, address: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS):
        """Opens a channel, which connects on the first request.

        Args:
          address: `host:port`.
          timeout_seconds: the deadline of one request.
        """
        # Imported here because it brings TensorFlow in, which a REST client should not have to wait for.
        from tensorflow_serving.apis import prediction_service_pb2_grpc

        self._address = address
        self._timeout_seconds = timeout_seconds
        # The limit on answers is 4 MiB by default, which a large batch exceeds.
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._stub = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)

    def predict(self, model_name: str, client_ids: Sequence[str], x: np.ndarray) -> Prediction:
        """Predicts each example with the weights of its client; as `RestClient.predict`.

        Raises:
          ServingError: if the server cannot be reached before the deadline or refuses the request.
        """
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()  # pyright: ignore[reportAttributeAccessIssue]
        request.model_spec.name = model_name
        request.inputs["client_id"].CopyFrom(tf.make_tensor_proto(list(client_ids), tf.string))
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.asarray(x, np.float32)))
        try:
            outputs = dict(self._stub.Predict(request, timeout=self._timeout_seconds).outputs)
        except grpc.RpcError as error:
            raise ServingError(f"{self._address} answered {error.code().name}: {error.details()}") from error
        try:
            answers, personalized = outputs[_answers_name(outputs)], outputs["personalized"]
        except KeyError as error:
            raise ServingError(f"{self._address} did not answer like a personalised model of this package.") from error
        return Prediction(tf.make_ndarray(answers), tf.make_ndarray(personalized))

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def __enter__(self) -> "GrpcClient":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _answers_name(outputs: Collection[str]) -> str:
    """What the answers are called: a regression's, or else a classifier's."""
    return "values" if "values" in outputs else "probabilities"


def _error_message(error: urllib.error.HTTPError) -> str:
    """What the server said, which is JSON if it is one of ours."""
    body = error.read().decode("utf-8", errors="replace")
    try:
        return json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body or error.reason
