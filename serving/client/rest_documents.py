"""What the REST API is sent and answers: JSON documents, and the arrays in them."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from serving.client import answers
from serving.client.model_client import CLASSIFY, PREDICT, Batch


def request(method: str, signature_name: str, batch: Batch) -> bytes:
    """The body of a request: columns for `predict`, examples for `classify` and `regress`."""
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
    """The document in an answer.

    Raises:
      ValueError: it holds none.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        # TensorFlow Serving writes NaN and Infinity, which are not JSON.
        return json.loads(body)


def arrays(method: str, document: Any) -> tuple[np.ndarray, ...]:
    """The arrays in the answer to `request`, as `ModelClient._call` wants them.

    Raises:
      KeyError, TypeError or ValueError: it is no answer of a personal model.
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
    """What the server said, which is JSON if it is one that serves models."""
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
