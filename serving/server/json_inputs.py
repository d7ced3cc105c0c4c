"""Converts the inputs of a REST request: rows (key `instances`), columns (key `inputs`) or `examples`."""

import base64
import binascii
import itertools
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from serving.errors import RequestError, invalid_argument
from serving.server.json_documents import format_error, is_base64, quote, type_name

# NumPy's limit.
_MAX_DIMENSIONS = 32
_SERVING_TYPE_NAMES = {tf.float32: "float", tf.float64: "double"}
_FLOATS = (tf.float32, tf.float64)
_INTEGERS = (tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint32, tf.uint64)


def parse_inputs(document: dict[str, Any], signature: meta_graph_pb2.SignatureDef) -> dict[str, np.ndarray]:
    """Converts the inputs in a parsed body to arrays, by key, with the dtypes that the signature declares.

    If the signature has only one input, the values may be given without the input's key, in rows and in columns.
    Columns that the signature lacks are ignored.

    Raises:
      RequestError: INVALID_ARGUMENT if an input is wrong; the message names the key, element or shape. UNIMPLEMENTED if
        JSON cannot express an input's dtype.
    """
    if "instances" in document and "inputs" in document:
        raise format_error(
            document, "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
        )
    dtypes = {key: tf.as_dtype(signature.inputs[key].dtype) for key in sorted(signature.inputs)}
    if "instances" in document:
        return _from_rows(document, dtypes)
    if "inputs" in document:
        return _from_columns(document["inputs"], dtypes)
    raise invalid_argument("Missing 'inputs' or 'instances' key")


def _from_columns(columns: Any, dtypes: dict[str, tf.DType]) -> dict[str, np.ndarray]:
    if not isinstance(columns, dict) or is_base64(columns):
        if len(dtypes) != 1:
            raise invalid_argument(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
                "tensorinfo_map"
            )
        columns = dict.fromkeys(dtypes, columns)
    arrays = {}
    for key, dtype in dtypes.items():
        if key not in columns:
            raise invalid_argument(f"Missing named input: {key} in 'inputs' object.")
        array = _to_array(columns[key], dtype)
        if array is None:
            _check(columns[key], _shape_of(columns[key]), dtype)
            raise AssertionError("a column that cannot be read has no fault")
        arrays[key] = array
    return arrays


def _from_rows(document: dict[str, Any], dtypes: dict[str, tf.DType]) -> dict[str, np.ndarray]:
    rows = document["instances"]
    if not isinstance(rows, list):
        raise format_error(document, "Expecting 'instances' to be an list/array")
    if not rows:
        raise format_error(document, "No values in 'instances' array")
    if not _is_object(rows[0]):
        if len(dtypes) != 1:
            raise invalid_argument(
                "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
                "tensorinfo_map"
            )
        ((key, dtype),) = dtypes.items()
        array = _to_array(rows, dtype)
        if array is None:
            _check_plain_rows(rows, dtype)
            raise AssertionError("rows that cannot be read have no fault")
        return {key: array}
    if all(isinstance(row, dict) and row.keys() == dtypes.keys() for row in rows):
        arrays = {key: _to_array([row[key] for row in rows], dtype) for key, dtype in dtypes.items()}
        read = {key: array for key, array in arrays.items() if array is not None}
        if len(read) == len(dtypes):
            return read
    _check_rows(rows, dtypes)
    raise AssertionError("rows that cannot be read have no fault")


def _to_array(value: Any, dtype: tf.DType) -> np.ndarray | None:
    """Builds an array from nested lists; None if a list is ragged or a value has another type, see `_check`."""
    shape, values = [], [value]
    # Level by level, so that each pass over the values runs in C.
    while values and isinstance(values[0], list):
        if set(map(type, values)) != {list} or len(lengths := set(map(len, values))) != 1:
            return None
        shape.extend(lengths)
        values = list(itertools.chain.from_iterable(values))
    if len(shape) > _MAX_DIMENSIONS:
        return None
    array = _leaves(values, dtype)
    return None if array is None else array.reshape(shape)


def _leaves(values: list, dtype: tf.DType) -> np.ndarray | None:
    types = set(map(type, values))
    if dtype == tf.string:
        return _strings(values) if types <= {str, dict} else None
    if dtype == tf.bool:
        return np.array(values, np.bool_) if types <= {bool} else None
    if dtype in _FLOATS:
        if not types <= {int, float}:
            return None
        # A number beyond float32 becomes infinite here, as in TensorFlow Serving.
        with np.errstate(over="ignore"):
            return np.array(values, dtype.as_numpy_dtype)
    if dtype in _INTEGERS:
        fits = types <= {int} and (not values or (min(values) >= dtype.min and max(values) <= dtype.max))
        return np.array(values, dtype.as_numpy_dtype) if fits else None
    raise RequestError(
        grpc.StatusCode.UNIMPLEMENTED,
        f"Conversion of JSON Value: {quote(values[0] if values else None)} to type: {dtype.name}",
    )


def _strings(values: list[str | dict]) -> np.ndarray | None:
    if not all(isinstance(value, str) or is_base64(value) for value in values):
        return None
    array = np.empty(len(values), object)
    array[:] = [to_bytes(value) for value in values]
    return array


def to_bytes(value: str | dict[str, str]) -> bytes:
    """Returns the UTF-8 bytes of a string, or the decoded bytes of a base64 object.

    Raises:
      RequestError: INVALID_ARGUMENT if the string has half a surrogate pair, or if the base64 is malformed.
    """
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise invalid_argument("JSON Parse error: The surrogate pair in string is invalid.") from error
    return _decode_base64(value["b64"])


def _decode_base64(text: str) -> bytes:
    # Spaces are ignored, and the padding may be missing.
    packed = "".join(text.split())
    try:
        return base64.b64decode(packed if "=" in packed else packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_argument("Unable to base64 decode") from error


def _is_object(row: Any) -> bool:
    return isinstance(row, dict) and not is_base64(row)


def _shape_of(value: Any) -> tuple[int, ...]:
    """Returns the shape of nested lists by the first element at each level."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _check_plain_rows(rows: list, dtype: tf.DType) -> None:
    first: list[Sequence[int]] = []
    for index, row in enumerate(rows):
        if _is_object(row):
            raise invalid_argument(f"Expecting value/list but got object at item {index} of input list")
        _check_row(f"{index}", row, dtype, first)


def _check_rows(rows: list, dtypes: dict[str, tf.DType]) -> None:
    """Finds the first fault of rows, in TensorFlow Serving's order: values first, then keys that are missing."""
    first: dict[str, list[Sequence[int]]] = {key: [] for key in dtypes}
    for index, row in enumerate(rows):
        if not _is_object(row):
            raise invalid_argument(f"Expecting object but got list at item {index} of input list")
        for key, value in row.items():
            place = f"{index} key: {key}"
            if key not in dtypes:
                raise _row_error(place, invalid_argument(f"JSON object: does not have named input: {key}"))
            _check_row(place, value, dtypes[key], first[key])
        if row.keys() != dtypes.keys():
            raise invalid_argument(
                f"Failed to process element: {index} of 'instances' list. JSON object: {quote(row)} keys must be "
                f"equal to: {','.join(dtypes)}"
            )


def _check_row(place: str, value: Any, dtype: tf.DType, first: list[Sequence[int]]) -> None:
    """Checks one value of one row, and that its shape is that of the first row, which is kept in `first`."""
    shape = _shape_of(value)
    try:
        _check(value, shape, dtype)
        expected = first[0] if first else shape
        first.append(shape)
        if np.prod(expected) != np.prod(shape):
            raise invalid_argument(f"Expecting tensor size: {np.prod(expected):.0f} but got: {np.prod(shape):.0f}")
        if expected != shape:
            raise invalid_argument(
                f"Expecting shape {str(list(expected)).replace(' ', '')} but got: {str(list(shape)).replace(' ', '')}"
            )
    except RequestError as error:
        raise _row_error(place, error) from error


def _row_error(place: str, error: RequestError) -> RequestError:
    reason = f"{error.code.name}: {error.message}"
    return invalid_argument(f"Failed to process element: {place} of 'instances' list. Error: {reason}")


def _check(value: Any, shape: Sequence[int], dtype: tf.DType, level: int = 0) -> None:
    """Refuses the first value of the wrong type, or the first list of the wrong length, after `_to_array` failed."""
    if len(shape) > _MAX_DIMENSIONS:
        raise invalid_argument(f"JSON Value: {quote(value)} is nested in more than {_MAX_DIMENSIONS} lists")
    if not isinstance(value, list):
        if level != len(shape):
            raise format_error(
                value, f"found at incorrect level: {level + 1} in the JSON DOM. Expected at level: {len(shape)}"
            )
        _check_leaf(value, dtype)
        return
    if level >= len(shape):
        raise invalid_argument(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise invalid_argument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for item in value:
        _check(item, shape, dtype, level + 1)


def _check_leaf(value: Any, dtype: tf.DType) -> None:
    if dtype == tf.string and isinstance(value, dict) and not is_base64(value):
        raise format_error(value, "not formatted correctly for base64 data")
    if _leaves([value], dtype) is None:
        name = _SERVING_TYPE_NAMES.get(dtype, dtype.name)
        raise format_error(value, f"Type: {type_name(value)} is not of expected type: {name}")


_INT64_MAX = 2**63 - 1
_KIND_NAMES = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}


def parse_examples(document: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    """Converts the values of `context` and `examples` in a body to serialised `tf.train.Example` messages.

    Numbers with a decimal point or an exponent become floats, and other numbers become int64. Strings and base64
    objects become bytes.

    Returns:
      The context, which has the features that all examples share (empty if there is none), and the examples.

    Raises:
      RequestError: INVALID_ARGUMENT if an example or feature is wrong; the message names the feature.
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
        to_bytes(name)  # Refuses half surrogate pairs, which the message would not take either.
        _fill(example.features.feature[name], name, content if isinstance(content, list) else [content])
    return example.SerializeToString()


def _fill(feature: tf.train.Feature, name: str, values: Sequence[Any]) -> None:
    """Adds the values to a feature, whose kind is the kind of the first value."""
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
