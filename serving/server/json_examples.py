"""JSON bodies of classify and regress requests: examples as objects of features, and the results."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from serving.errors import invalid_argument
from serving.server.json_documents import format_error, is_base64, type_name
from serving.server.json_inputs import to_bytes

_INT64_MAX = 2**63 - 1
_KIND_NAMES = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}


def parse_examples(document: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    """Turns the objects under `context` and `examples` into serialised `tf.train.Example` messages.

    Numbers with a point are floats, others int64; strings and base64 objects are bytes.

    Returns:
      The features that all examples share, and the examples.

    Raises:
      RequestError: INVALID_ARGUMENT with the feature that is wrong.
    """
    context = _serialized(document["context"]) if "context" in document else b""
    if "examples" not in document:
        raise format_error(document, "When method is classify, key 'examples' is expected and was not found")
    examples = document["examples"]
    if not isinstance(examples, list):
        raise format_error(document, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise format_error(document, "'examples' value is an empty array")
    return context, [_serialized(example) for example in examples]


def _serialized(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise invalid_argument(f"Example must be JSON object but got JSON {type_name(value)}")
    example = tf.train.Example()
    for name, content in value.items():
        to_bytes(name)  # Refuses what is no text, which the message would not take either.
        _fill(example.features.feature[name], name, content if isinstance(content, list) else [content])
    return example.SerializeToString()


def _fill(feature: tf.train.Feature, name: str, values: Sequence[Any]) -> None:
    """Adds the values to a feature, whose kind is that of the first."""
    kinds = {_kind(name, value) for value in values} if set(map(type, values)) != {float} else {"float_list"}
    if len(kinds) > 1:
        expected = _KIND_NAMES[_kind(name, values[0])]
        raise invalid_argument(f"Unexpected element type in feature: {name} expecting type: {expected}")
    for kind in kinds:
        read = [to_bytes(value) for value in values] if kind == "bytes_list" else values
        getattr(feature, kind).value.extend(read)


def _kind(name: str, value: Any) -> str:
    if isinstance(value, str) or is_base64(value):
        return "bytes_list"
    if isinstance(value, float):
        return "float_list"
    if not isinstance(value, int):
        raise invalid_argument(f"Feature: {name} has element with unexpected JSON type: {type_name(value)}")
    if value > _INT64_MAX:
        raise invalid_argument(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
    return "int64_list"
