"""Answers REST requests, independently of HTTP: finds routes, and builds TensorFlow Serving's bodies and errors."""

import dataclasses
import re
import urllib.parse

import numpy as np

from serving.errors import RequestError, invalid_argument
from serving.saved_model.layout import CLASSIFY, MAX_VERSION, PREDICT, ModelSpec
from serving.saved_model.signatures import CLASSES_KEY, SCORES_KEY, VALUES_KEY, Signature, Tensors
from serving.server.json_documents import format_outputs, parse, signature_name, write
from serving.server.json_inputs import parse_examples, parse_inputs
from serving.server.loaded_version import LoadedVersion
from serving.server.manager import ModelManager, metadata_json, status_json
from serving.server.metrics import Observation
from serving.server.options import Limits
from serving.server.tensors import LARGE_BYTES, examples_tensor, off_loop

STATUS, METADATA = "status", "metadata"

_API_PREFIX = "/v1/"
# A name is a key to compare, never a path to open; it may hold anything but the characters that end it.
_VERSION = r"(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
_PATHS = {
    "POST": re.compile(rf"/v1/models/(?P<name>[^/:]+){_VERSION}:(?P<method>predict|classify|regress)", re.IGNORECASE),
    "GET": re.compile(rf"/v1/models(?:/(?P<name>[^/:]+))?{_VERSION}(?:/(?P<method>metadata))?", re.IGNORECASE),
}


@dataclasses.dataclass(frozen=True)
class Route:
    """The method of a request (`predict`, `classify`, `regress`, `status` or `metadata`), and its model and version."""

    method: str
    spec: ModelSpec


def is_in_api(path: str) -> bool:
    """Returns whether a path begins with the prefix of the API, `/v1/`; the rest of the path may be malformed."""
    return path.lower().startswith(_API_PREFIX)


def find_route(http_method: str, path: str) -> Route:
    """Returns the route for an HTTP method (in capitals) and a path (percent-encoded, without its query).

    Raises:
      RequestError: INVALID_ARGUMENT if the API does not have the path or the method.
    """
    match = _PATHS[http_method].fullmatch(path) if http_method in _PATHS else None
    method = (match["method"] or STATUS) if match else ""
    if match is None or method != method.lower():
        raise invalid_argument(f"Malformed request: {http_method} {path}")
    if match["name"] is None:
        raise invalid_argument("Missing model name in request.")
    label = match["label"]
    return Route(
        method,
        ModelSpec(
            urllib.parse.unquote(match["name"]),
            _to_version(match["version"]),
            None if label is None else urllib.parse.unquote(label),
        ),
    )


def _to_version(digits: str | None) -> int | None:
    if digits is None:
        return None
    # Compared as text first: Python refuses to turn thousands of digits into an int, zeros included.
    significant = digits.lstrip("0") or "0"
    if len(significant) > len(str(MAX_VERSION)) or int(significant) > MAX_VERSION:
        raise invalid_argument(f"Failed to convert version: {digits} to numeric.")
    return int(significant)


@dataclasses.dataclass(frozen=True)
class RestApi:
    """Answers requests whose route is known and whose body has been read. Use it on one event loop."""

    manager: ModelManager
    limits: Limits

    async def answer(self, route: Route, body: bytes, observation: Observation) -> bytes:
        """Returns the JSON body of the answer; records the model's name and the time of the run in `observation`.

        Raises:
          RequestError: the request fails; code and message are those that TensorFlow Serving would send.
        """
        if route.method == STATUS:
            answer = status_json(self.manager, route.spec)
            observation.model_name = route.spec.name
            return answer
        if route.method == METADATA:
            with self.manager.acquire(route.spec) as loaded:
                observation.model_name = loaded.name
                return metadata_json(loaded)
        if route.method == PREDICT:
            return await self._predict(route, body, observation)
        return await self._on_examples(route, body, observation)

    async def _predict(self, route: Route, body: bytes, observation: Observation) -> bytes:
        is_large = len(body) > LARGE_BYTES
        document = await off_loop(is_large, parse, body)
        name = signature_name(document)
        with self.manager.acquire(route.spec) as loaded:
            observation.model_name = loaded.name
            inputs = await off_loop(is_large, parse_inputs, document, _signature(loaded, name).definition)
            outputs = await observation.timed(loaded.run(name, inputs))
        return await off_loop(is_large, format_outputs, outputs, rows="instances" in document)

    async def _on_examples(self, route: Route, body: bytes, observation: Observation) -> bytes:
        name, examples = await off_loop(len(body) > LARGE_BYTES, _read_examples, body, self.limits.max_bytes)
        with self.manager.acquire(route.spec) as loaded:
            observation.model_name = loaded.name
            outputs = await observation.timed(loaded.on_examples(route.method, name, examples))
            if route.method == CLASSIFY:
                return _format_classes(outputs)
            values = outputs[VALUES_KEY].ravel()
            return write({"results": values}, finite=bool(np.isfinite(values).all()))


def _read_examples(body: bytes, max_bytes: int) -> tuple[str, np.ndarray]:
    document = parse(body)
    name = signature_name(document)
    context, examples = parse_examples(document)
    return name, examples_tensor(context, examples, max_bytes)


def _signature(loaded: LoadedVersion, name: str) -> Signature:
    try:
        return loaded.servable.signature(name)
    except RequestError as error:
        # Over REST TensorFlow Serving looks for the inputs first, and has other words for this.
        missing = name or "serving_default"
        raise invalid_argument(f'Serving signature name: "{missing}" not found in signature def') from error


def _format_classes(outputs: Tensors) -> bytes:
    """Writes a label and a score for each class of each example; an empty label, or 0, where the model has none."""
    labels, scores = outputs.get(CLASSES_KEY), outputs.get(SCORES_KEY)
    if labels is None:
        labels = np.full_like(scores, b"", object)
    if scores is None:
        scores = np.zeros(labels.shape, np.float32)
    results = [
        [[label.decode(errors="replace"), score] for label, score in zip(*pair, strict=True)]
        for pair in zip(labels, scores, strict=True)
    ]
    return write({"results": results}, finite=bool(np.isfinite(scores).all()))
