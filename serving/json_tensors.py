"""JSON bodies of the REST API: row (`instances`) and columnar (`inputs`) tensors, both ways."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from serving.errors import invalid_argument
from serving.loader import check_input_names

_MAX_QUOTED_CHARACTERS = 256


def parse_body(body: bytes) -> dict[str, Any]:
    """Parses the body of a predict request into its JSON object.

    Raises:
      RequestError: INVALID_ARGUMENT if it is not JSON, not an object, or has not exactly one of the two input keys.
    """
    if not body.strip():
        raise invalid_argument("JSON Parse error: The document is empty")
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        raise invalid_argument(f"JSON Parse error: {error.msg} at offset: {error.pos}") from error
    except UnicodeDecodeError as error:
        raise invalid_argument(f"JSON Parse error: not UTF-8 at offset: {error.start}") from error
    except (RecursionError, ValueError) as error:
        raise invalid_argument("JSON Parse error: nested too deeply, or a number with too many digits") from error
    if not isinstance(document, dict):
        raise invalid_argument(f"JSON Value: {_quote(document)} Is not object")
    if "inputs" in document and "instances" in document:
        raise invalid_argument("Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist")
    if "inputs" not in document and "instances" not in document:
        raise invalid_argument("Missing 'inputs' or 'instances' key")
    if not isinstance(document.get("signature_name", ""), str):
        raise invalid_argument("'signature_name' key must be a string value.")
    return document


def parse_inputs(document: dict[str, Any], signature: meta_graph_pb2.SignatureDef) -> dict[str, np.ndarray]:
    """Turns the inputs of a parsed body into arrays of the dtypes that the signature declares.

    Raises:
      RequestError: INVALID_ARGUMENT with the key, element or shape that is wrong.
    """
    if "instances" in document:
        columns = _columns_of_rows(document["instances"], sorted(signature.inputs))
    else:
        columns = document["inputs"]
        if not isinstance(columns, dict) or _is_bytes(columns):
            if len(signature.inputs) != 1:
                raise invalid_argument(
                    "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
                    "tensorinfo_map"
                )
            columns = {key: columns for key in signature.inputs}
    check_input_names(signature, columns)
    return {key: _to_array(value, tf.as_dtype(signature.inputs[key].dtype)) for key, value in columns.items()}


def format_outputs(outputs: Mapping[str, np.ndarray], *, rows: bool) -> bytes:
    """Writes the answer in the format of the request; a single output is written without its key.

    NaN and infinities are written as such, like TensorFlow Serving does, though strict JSON has no words for them.
    """
    columns = {key: _to_json(array) for key, array in outputs.items()}
    if not rows:
        document = {"outputs": columns if len(columns) > 1 else next(iter(columns.values()))}
    elif len(columns) == 1:
        document = {"predictions": next(iter(columns.values()))}
    else:
        keys = list(columns)
        document = {"predictions": [dict(zip(keys, row, strict=True)) for row in zip(*columns.values(), strict=True)]}
    return json.dumps(document).encode()


def _columns_of_rows(instances: Any, keys: list[str]) -> dict[str, Any]:
    if not isinstance(instances, list):
        raise invalid_argument("Expecting 'instances' to be an list/array")
    if not instances:
        raise invalid_argument("No values in 'instances' array")
    if not isinstance(instances[0], dict) or _is_bytes(instances[0]):
        if len(keys) != 1:
            raise invalid_argument(
                "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
                "tensorinfo_map"
            )
        return {keys[0]: instances}
    for index, element in enumerate(instances):
        if not isinstance(element, dict) or sorted(element) != keys:
            raise invalid_argument(
                f"Failed to process element: {index} of 'instances' list. JSON object: {_quote(element)} keys must be "
                f"equal to: {','.join(keys)}"
            )
    return {key: [element[key] for element in instances] for key in keys}


def _to_array(value: Any, dtype: tf.DType) -> np.ndarray:
    """Builds an array from nested lists; its shape is that of the first element at each level."""
    shape = _shape_of(value)
    leaves: list[Any] = []
    if shape:
        _collect(value, shape, 1, dtype, leaves)
    else:
        leaves.extend(_leaves([value], dtype))
    numpy_dtype = object if dtype == tf.string else dtype.as_numpy_dtype
    try:
        # A number beyond float32 becomes infinite here and is refused by the graph, as one that was sent infinite.
        with np.errstate(over="ignore"):
            return np.array(leaves, numpy_dtype).reshape(shape)
    except OverflowError as error:
        raise invalid_argument(f"JSON Value: a number does not fit the expected type: {dtype.name}") from error


def _shape_of(value: Any) -> tuple[int, ...]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _collect(values: list, shape: tuple[int, ...], level: int, dtype: tf.DType, leaves: list[Any]) -> None:
    """Appends the leaves of `values` in order, and refuses lists that are ragged."""
    if len(values) != shape[level - 1]:
        raise invalid_argument(
            f"Encountered list at unexpected size: {len(values)} at level: {level} expected size: {shape[level - 1]}"
        )
    if level == len(shape):
        leaves.extend(_leaves(values, dtype))
        return
    for value in values:
        if not isinstance(value, list):
            raise invalid_argument(
                f"JSON Value: {_quote(value)} Type: {_type_name(value)} is not of expected type: Array"
            )
        _collect(value, shape, level + 1, dtype, leaves)


def _leaves(values: list, dtype: tf.DType) -> list:
    allowed = _allowed_types(dtype)
    # One pass in C over the usual case, numbers only; images have thousands of them.
    if not set(map(type, values)) <= allowed:
        for value in values:
            if type(value) not in allowed and not (dtype == tf.string and _is_bytes(value)):
                raise invalid_argument(
                    f"JSON Value: {_quote(value)} Type: {_type_name(value)} is not of expected type: {dtype.name}"
                )
    return [_decode(value) for value in values] if dtype == tf.string else values


def _allowed_types(dtype: tf.DType) -> set[type]:
    if dtype == tf.string:
        return {str}
    if dtype == tf.bool:
        return {bool}
    return {int, float} if dtype.is_floating else {int}


def _decode(value: str | dict[str, str]) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", errors="surrogatepass")
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_argument("Unable to base64 decode") from error


def _is_bytes(value: Any) -> bool:
    """True for `{"b64": "..."}`, how JSON carries bytes."""
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def _to_json(array: np.ndarray) -> list:
    if array.dtype == object:
        return np.vectorize(lambda value: value.decode("utf-8", errors="replace"), otypes=[object])(array).tolist()
    return array.tolist()


def _type_name(value: Any) -> str:
    names = {dict: "Object", list: "Array", str: "String", bool: "Bool", type(None): "Null"}
    return names.get(type(value), "Number")


def _quote(value: Any) -> str:
    return json.dumps(value)[:_MAX_QUOTED_CHARACTERS]
