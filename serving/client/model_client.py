"""Defines the base class of both clients, which checks requests, splits batches and joins the answers."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import numpy as np

from serving.client.answers import Classification, ModelMetadata, Prediction, Regression, VersionState
from serving.client.calls import Deadline
from serving.client_ids import encode_id
from serving.saved_model.layout import CLASSIFY, IMAGES_SIGNATURE, PREDICT, REGRESS, ModelSpec
from tff_pdp.errors import ServingError

# The largest batch that servers configured by this package accept.
DEFAULT_MAX_BATCH_SIZE = 64

Payload = TypeVar("Payload")
Client = TypeVar("Client", bound="ModelClient")


class Version(TypedDict, total=False):
    """The version that a request addresses, by number or by label; the newest version if both are None."""

    version: int | None
    label: str | None


@dataclasses.dataclass(frozen=True)
class Batch:
    """The clients' ids of a request, and one example for each id.

    With the key `x`, `values` has examples, float32 `[n, *input_shape]`. With the key `image_bytes`, `values` has
    PNG or JPEG images.
    """

    client_ids: Sequence[str]
    key: str
    values: np.ndarray | Sequence[bytes]

    def __len__(self) -> int:
        return len(self.client_ids)

    def part(self, start: int, stop: int) -> "Batch":
        """Returns a batch of the examples with the numbers `start` to `stop - 1`."""
        return Batch(self.client_ids[start:stop], self.key, self.values[start:stop])


@dataclasses.dataclass(eq=False)
class ModelClient(abc.ABC, Generic[Payload]):
    """Sends requests to personalised models of this package, on the embedded server or on TensorFlow Serving.

    Many threads may use one client. Close the client, or use it as a context manager.

    A batch above `max_batch_size` or `max_message_bytes` is sent in parts, one after another, and the answers are
    joined in order. While one version replaces another, different versions may answer the parts: name a version if
    all answers must come from one version.

    A request is sent again if no server is reached, the connection breaks before the answer, or the server answers
    `UNAVAILABLE`; it is sent at most `max_attempts` times, and not after the call's deadline. Other errors are final.

    Attributes:
      address: server's `host:port`, or for REST a URL such as `https://models.example.org`. The first call connects.
      timeout_seconds: time limit of one call, with all its retries and parts.
      client_id_hash: function from a client's id to its id in the export, usually a `serving.client_ids.ClientIdHash`;
        None if callers pass the ids of the export.
      max_batch_size: largest number of examples in one request.
      max_message_bytes: largest size of a request, and largest size of an answer, in bytes.
      max_attempts: largest number of times that one request is sent.

    Raises:
      ServingError: a limit is not positive.
    """

    address: str
    timeout_seconds: float = 10.0
    _: dataclasses.KW_ONLY
    client_id_hash: Callable[[str], str] | None = None
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_message_bytes: int = 64 * 2**20
    max_attempts: int = 4

    def __post_init__(self):
        if self.timeout_seconds <= 0 or min(self.max_batch_size, self.max_message_bytes, self.max_attempts) < 1:
            raise ServingError("timeout_seconds, max_batch_size, max_message_bytes and max_attempts must be positive.")

    def predict(
        self, model_name: str, client_ids: Sequence[str], x: np.ndarray, **version: Unpack[Version]
    ) -> Prediction:
        """Predicts each example with the weights of its client.

        Args:
          model_name: model's name in requests.
          client_ids: one id for each example; the global model answers for an empty id.
          x: examples, float32 `[n, *input_shape]`.
          **version: version that answers, such as `version=3` or `label="stable"`; by default the newest version.

        Raises:
          ServerError: the server cannot be reached in time or refuses the request.
          ServingError: the batch is empty, the numbers of ids and examples differ, an id is not valid Unicode, or one
            example is larger than `max_message_bytes`.
        """
        batch = self._batch(client_ids, "x", _numbers(x))
        return Prediction(*self._joined(PREDICT, ModelSpec(model_name, **version), "", batch))

    def predict_images(
        self, model_name: str, client_ids: Sequence[str], images: Sequence[bytes], **version: Unpack[Version]
    ) -> Prediction:
        """Predicts images (contents of PNG or JPEG files); other arguments and errors are those of `predict`."""
        if not all(isinstance(image, bytes) for image in images):
            raise ServingError("Images must be bytes of image files (PNG or JPEG); for arrays of pixels, call predict.")
        batch = self._batch(client_ids, "image_bytes", images)
        return Prediction(*self._joined(PREDICT, ModelSpec(model_name, **version), IMAGES_SIGNATURE, batch))

    def classify(
        self, model_name: str, client_ids: Sequence[str], x: np.ndarray, **version: Unpack[Version]
    ) -> Classification:
        """Classifies each example, sent as `tf.Example`; arguments and errors are those of `predict`."""
        batch = self._batch(client_ids, "x", _numbers(x))
        return Classification(*self._joined(CLASSIFY, ModelSpec(model_name, **version), CLASSIFY, batch))

    def regress(
        self, model_name: str, client_ids: Sequence[str], x: np.ndarray, **version: Unpack[Version]
    ) -> Regression:
        """Predicts the value of each example, sent as `tf.Example`; arguments and errors are those of `predict`."""
        batch = self._batch(client_ids, "x", _numbers(x))
        return Regression(*self._joined(REGRESS, ModelSpec(model_name, **version), REGRESS, batch))

    @abc.abstractmethod
    def status(self, model_name: str, *, version: int | None = None) -> list[VersionState]:
        """Returns the states of all versions that the server has seen, or of one version if `version` is given.

        Raises:
          ServerError: the server cannot be reached in time or does not know the model or version.
        """

    @abc.abstractmethod
    def metadata(self, model_name: str, **version: Unpack[Version]) -> ModelMetadata:
        """Returns the signatures of the newest version, or of the version that `version=` or `label=` names.

        Raises:
          ServerError: the server cannot be reached in time or has not loaded the model or version.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connections."""

    @abc.abstractmethod
    def _encode(self, method: str, spec: ModelSpec, signature_name: str, batch: Batch) -> tuple[Payload, int]:
        """Returns the request for a batch, and the size of the request in bytes."""

    @abc.abstractmethod
    def _call(self, method: str, spec: ModelSpec, payload: Payload, deadline: Deadline) -> tuple[np.ndarray, ...]:
        """Sends one request and returns the arrays of its answer, each `[n, ...]`.

        `predict` has answers and `personalized`, `classify` classes and scores, `regress` values.
        """

    def _batch(self, client_ids: Sequence[str], key: str, values: Any) -> Batch:
        if isinstance(client_ids, str) or not all(isinstance(one, str) for one in client_ids):
            raise ServingError(f"Client ids must be a list of texts, one for each example, not {client_ids!r:.100}.")
        number = 0 if isinstance(values, np.ndarray) and not values.ndim else len(values)
        if len(client_ids) != number or not number:
            raise ServingError(
                f"{len(client_ids)} client ids for {number} examples: send at least one example, and one id for each."
            )
        # Refuses invalid Unicode, for which each protocol has errors of its own.
        for client_id in client_ids:
            encode_id(client_id)
        ids = client_ids if self.client_id_hash is None else [self.client_id_hash(one) for one in client_ids]
        return Batch(list(ids), key, values)

    def _joined(self, method: str, spec: ModelSpec, signature_name: str, batch: Batch) -> list[np.ndarray]:
        deadline, answers = Deadline(self.timeout_seconds), []
        for start in range(0, len(batch), self.max_batch_size):
            part = batch.part(start, start + self.max_batch_size)
            for payload, size in self._fitting(method, spec, signature_name, part, start):
                arrays = self._call(method, spec, payload, deadline)
                if any(array.shape[:1] != (size,) for array in arrays):
                    raise self._unlike_a_personal_model()
                answers.append(arrays)
        return [np.concatenate(arrays) for arrays in zip(*answers, strict=True)]

    def _fitting(
        self, method: str, spec: ModelSpec, signature_name: str, batch: Batch, start: int
    ) -> Iterator[tuple[Payload, int]]:
        """Yields requests that are small enough and their numbers of examples; a larger request is halved."""
        payload, num_bytes = self._encode(method, spec, signature_name, batch)
        if num_bytes <= self.max_message_bytes:
            yield payload, len(batch)
            return
        if len(batch) == 1:
            raise ServingError(
                f"Example {start} makes a request of {num_bytes} bytes, above the limit of {self.max_message_bytes}: "
                "send a smaller example, or raise max_message_bytes here and the limit of the server."
            )
        middle = len(batch) // 2
        yield from self._fitting(method, spec, signature_name, batch.part(0, middle), start)
        yield from self._fitting(method, spec, signature_name, batch.part(middle, len(batch)), start + middle)

    def _unlike_a_personal_model(self) -> ServingError:
        return ServingError(f"{self.address} did not answer like a personalised model; check address and model.")

    def __enter__(self: Client) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbers(x: Any) -> np.ndarray:
    try:
        return np.asarray(x, np.float32)
    except (TypeError, ValueError) as error:
        raise ServingError(f"x must be an array of numbers, of one shape for all examples: {error}.") from error
