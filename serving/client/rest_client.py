"""Calls a server over REST, with JSON; does not import TensorFlow."""

import base64
import dataclasses
import http.client
import json
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import orjson
import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, NewConnectionError, ProtocolError
from urllib3.exceptions import TimeoutError as HTTPTimeoutError
from urllib3.util import parse_url

from serving.client import answers
from serving.client.answers import ModelMetadata, VersionState
from serving.client.calls import UNAVAILABLE, Deadline, ServerError, UnavailableError, call_with_retries, timed_pool
from serving.client.model_client import Batch, ModelClient, Version
from serving.saved_model.layout import CLASSIFY, PREDICT, ModelSpec
from tff_pdp.errors import ServingError


def request(method: str, signature_name: str, batch: Batch) -> bytes:
    """Returns a request's JSON body: columns (key `inputs`) for `predict`, `examples` for `classify` and `regress`."""
    document: dict[str, Any] = {"signature_name": signature_name} if signature_name else {}
    if method == PREDICT:
        document["inputs"] = {"client_id": batch.client_ids, batch.key: _column(batch.values)}
    else:
        document["examples"] = [
            {"client_id": client_id, "x": np.ravel(example)}
            for client_id, example in zip(batch.client_ids, batch.values, strict=True)
        ]
    return _dumps(document, batch.values)


def read(body: bytes) -> Any:
    """Parses the body of an answer; raises ValueError if the body is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        # TensorFlow Serving writes NaN and Infinity, which are not JSON.
        return json.loads(body)


def arrays(method: str, document: Any) -> tuple[np.ndarray, ...]:
    """Returns the arrays in a parsed answer to `method`.

    The arrays are answers and `personalized` for `predict`, classes and scores for `classify`, values for `regress`.

    Raises:
      KeyError, TypeError, ValueError: the document is not the answer of a personal model.
    """
    if method == PREDICT:
        outputs = document["outputs"]
        return np.array(outputs[answers.answers_name(outputs)], np.float32), np.array(outputs["personalized"], bool)
    results = document["results"]
    if method == CLASSIFY:
        classes = [[label for label, _ in result] for result in results]
        scores = [[score for _, score in result] for result in results]
        return np.array(classes, np.str_), np.array(scores, np.float32)
    return (np.array(results, np.float32),)


def error_message(body: bytes) -> str:
    """Returns the message in an error's JSON body, or the first 1000 characters of another body, such as a proxy's."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", errors="replace")[:1000] or "no message"


def _column(values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values)
    return [{"b64": base64.b64encode(value).decode("ascii")} for value in values]


def _dumps(document: Mapping[str, Any], values: Any) -> bytes:
    if not isinstance(values, np.ndarray) or np.isfinite(values).all():
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson would send null for NaN, and the server would complain about that instead.
    return json.dumps(document, default=np.ndarray.tolist).encode()


# Number of connections that are kept open between calls; further threads open a connection for each call.
_KEPT_CONNECTIONS = 64
_READ_BYTES = 2**18
_HEADERS = {"Content-Type": "application/json"}
_SERVICE_UNAVAILABLE = 503


@dataclasses.dataclass(eq=False)
class RestClient(ModelClient[bytes]):
    """Calls the REST API over connections that stay open between calls. Proxy settings of the environment are ignored.

    A call that opens a connection may take twice its time limit if the host's name is not resolved in time, or if the
    host's addresses do not answer.

    Raises:
      ServingError: a limit is not positive, or the address is malformed.
    """

    def __post_init__(self):
        super().__post_init__()
        self._url = (self.address if "://" in self.address else f"http://{self.address}").rstrip("/")
        try:
            self._pool = timed_pool(self._url, _KEPT_CONNECTIONS)
            self._prefix = parse_url(self._url).path or ""
        except (LocationParseError, ValueError) as error:
            raise ServingError(f"{self.address} is no address of a REST API: use host:port or a URL.") from error

    def status(self, model_name: str, *, version: int | None = None) -> list[VersionState]:
        """Returns the states of versions; see `ModelClient.status`."""
        return self._get(ModelSpec(model_name, version), "", answers.version_states)

    def metadata(self, model_name: str, **version: Unpack[Version]) -> ModelMetadata:
        """Returns the signatures of a version; see `ModelClient.metadata`."""
        return self._get(ModelSpec(model_name, **version), "/metadata", answers.metadata)

    def close(self) -> None:
        """Closes the connections."""
        self._pool.close()

    def _encode(self, method: str, spec: ModelSpec, signature_name: str, batch: Batch) -> tuple[bytes, int]:
        body = request(method, signature_name, batch)
        return body, len(body)

    def _call(self, method: str, spec: ModelSpec, payload: bytes, deadline: Deadline) -> tuple[np.ndarray, ...]:
        document = self._request("POST", _path(spec, f":{method}"), payload, deadline)
        try:
            return arrays(method, document)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unlike_a_personal_model() from error

    def _get(self, spec: ModelSpec, action: str, read: Callable[[Any], Any]) -> Any:
        document = self._request("GET", _path(spec, action), None, Deadline(self.timeout_seconds))
        try:
            return read(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServingError(f"{self._url} did not answer like TensorFlow Serving; check the address.") from error

    def _request(self, method: str, path: str, body: bytes | None, deadline: Deadline) -> Any:
        url = f"{self._url}{path}"

        def attempt(seconds: float) -> Any:
            status, answer = self._exchange(method, path, body, seconds, deadline)
            if status == _SERVICE_UNAVAILABLE:
                raise UnavailableError(url, str(status), error_message(answer))
            if status != 200:
                raise ServerError(url, str(status), error_message(answer))
            try:
                return read(answer)
            except ValueError as error:
                raise ServingError(f"{url} did not answer with JSON; check the address.") from error

        return call_with_retries(attempt, url, deadline, self.max_attempts)

    def _exchange(
        self, method: str, path: str, body: bytes | None, seconds: float, deadline: Deadline
    ) -> tuple[int, bytes]:
        """Sends one request, and returns the HTTP status and the body of its answer."""
        url = f"{self._url}{path}"
        try:
            response = self._pool.urlopen(
                method,
                f"{self._prefix}{path}",
                body,
                _HEADERS if body is not None else None,
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(total=seconds),
                preload_content=False,
            )
        except NewConnectionError as error:
            raise UnavailableError(url, UNAVAILABLE, str(error)) from error
        except ProtocolError as error:
            raise _not_answered(url, error) from error
        except HTTPTimeoutError as error:
            raise deadline.error(url) from error
        except HTTPError as error:
            raise ServingError(f"{url} cannot be reached: {error}.") from error
        try:
            return response.status, self._read(response)
        except HTTPTimeoutError as error:
            raise deadline.error(url) from error
        # The answer had begun, so the request may have been at fault: it is not sent again.
        except HTTPError as error:
            raise ServerError(url, UNAVAILABLE, f"the answer broke off: {error}") from error
        finally:
            # A connection whose answer was read to its end is back in the pool by now and stays open.
            response.close()

    def _read(self, response: urllib3.BaseHTTPResponse) -> bytes:
        body = bytearray()
        while chunk := response.read(_READ_BYTES, decode_content=False):
            body += chunk
            if len(body) > self.max_message_bytes:
                raise ServingError(
                    f"{self._url} answered with more than {self.max_message_bytes} bytes: send smaller batches, or "
                    "raise max_message_bytes."
                )
        return bytes(body)


def _not_answered(url: str, error: ProtocolError) -> ServingError:
    """Builds the error of a request that was sent and got no HTTP answer."""
    reason = error.args[-1]
    # A server that hung up may answer next time; any other failure would recur.
    if isinstance(reason, ConnectionError):
        return UnavailableError(url, UNAVAILABLE, str(error))
    if isinstance(reason, http.client.HTTPException):
        return ServingError(f"{url} does not answer as HTTP does ({reason!r:.100}): is it the port of the REST API?")
    return ServingError(f"{url} cannot be reached: {error}.")


def _path(spec: ModelSpec, action: str) -> str:
    path = f"/v1/models/{urllib.parse.quote(spec.name, safe='')}"
    if spec.version is not None:
        path += f"/versions/{spec.version}"
    if spec.label is not None:
        path += f"/labels/{urllib.parse.quote(spec.label, safe='')}"
    return path + action
