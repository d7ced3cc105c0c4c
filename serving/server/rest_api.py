"""The REST API without HTTP: what each route answers, in TensorFlow Serving's bodies and errors."""

import numpy as np

from serving.errors import RequestError, invalid_argument
from serving.saved_model.signatures import CLASSES_KEY, SCORES_KEY, VALUES_KEY, Signature, Tensors
from serving.server import rest_routes
from serving.server.examples import examples_tensor
from serving.server.json_documents import parse, signature_name, write
from serving.server.json_examples import parse_examples
from serving.server.json_inputs import parse_inputs
from serving.server.json_outputs import format_outputs
from serving.server.limits import Limits
from serving.server.loaded_version import LoadedVersion
from serving.server.manager import ModelManager
from serving.server.metrics import Observation
from serving.server.model_messages import metadata_json, status_json
from serving.server.off_loop import LARGE_BYTES, off_loop
from serving.server.rest_routes import Route


class RestApi:
    """Answers requests whose path and body have been read. Belongs to one event loop."""

    def __init__(self, manager: ModelManager, limits: Limits):
        """Keeps what answers and what is accepted."""
        self._manager = manager
        self._limits = limits

    async def answer(self, route: Route, body: bytes, observation: Observation) -> bytes:
        """Returns the JSON body of the answer.

        Args:
          route: what is asked for.
          body: of the request; only POST requests have one.
          observation: where the model that answers is noted, and its run timed.

        Raises:
          RequestError: with the code and message that TensorFlow Serving would send.
        """
        if route.method == rest_routes.STATUS:
            answer = status_json(self._manager, route.spec)
            observation.model_name = route.spec.name
            return answer
        if route.method == rest_routes.METADATA:
            with self._manager.acquire(route.spec) as loaded:
                observation.model_name = loaded.name
                return metadata_json(loaded)
        if route.method == rest_routes.PREDICT:
            return await self._predict(route, body, observation)
        return await self._on_examples(route, body, observation)

    async def _predict(self, route: Route, body: bytes, observation: Observation) -> bytes:
        is_large = len(body) > LARGE_BYTES
        document = await off_loop(is_large, parse, body)
        name = signature_name(document)
        with self._manager.acquire(route.spec) as loaded:
            observation.model_name = loaded.name
            inputs = await off_loop(is_large, parse_inputs, document, _signature(loaded, name).definition)
            outputs = await observation.timed(loaded.run(name, inputs))
        return await off_loop(is_large, format_outputs, outputs, rows="instances" in document)

    async def _on_examples(self, route: Route, body: bytes, observation: Observation) -> bytes:
        name, examples = await off_loop(len(body) > LARGE_BYTES, _read_examples, body, self._limits.max_bytes)
        with self._manager.acquire(route.spec) as loaded:
            observation.model_name = loaded.name
            if route.method == rest_routes.CLASSIFY:
                return _format_classes(await observation.timed(loaded.classify(name, examples)))
            outputs = await observation.timed(loaded.regress(name, examples))
            return _format_results(outputs[VALUES_KEY].ravel())


def _read_examples(body: bytes, max_bytes: int) -> tuple[str, np.ndarray]:
    """The signature that a body asks for, and its examples."""
    document = parse(body)
    name = signature_name(document)
    context, examples = parse_examples(document)
    return name, examples_tensor(context, examples, max_bytes)


def _signature(loaded: LoadedVersion, name: str) -> Signature:
    try:
        return loaded.servable.predict_signature(name)
    except RequestError as error:
        # Over REST TensorFlow Serving looks for the inputs first, and has other words for this.
        missing = name or "serving_default"
        raise invalid_argument(f'Serving signature name: "{missing}" not found in signature def') from error


def _format_classes(outputs: Tensors) -> bytes:
    """Pairs of label and score for each class of each example; an empty label, or 0, where the model has none."""
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


def _format_results(values: np.ndarray) -> bytes:
    return write({"results": values}, finite=bool(np.isfinite(values).all()))
