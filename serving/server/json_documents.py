"""Reads and writes JSON as TensorFlow Serving does: parses bodies, quotes values in error messages, writes answers."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from serving.errors import RequestError, invalid_argument

_MAX_QUOTED_CHARACTERS = 256
_JSON_SPACE = " \t\r\n"
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_LONGEST_INTEGER = len(str(_INT64_MIN))
_TYPE_NAMES = {dict: "Object", list: "Array", str: "String", type(None): "Null"}


def parse(body: bytes) -> dict[str, Any]:
    """Parses the body of a request into its JSON object.

    NaN and infinities are accepted, text after the object is ignored, and an integer beyond 64 bits becomes a float. If
    an object has a key twice, the last value is used; TensorFlow Serving uses the first.

    Raises:
      RequestError: INVALID_ARGUMENT if the body is not JSON, or is JSON but not an object.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = _parse_leniently(body)
    if not isinstance(document, dict):
        raise format_error(document, "Is not object")
    return document


def signature_name(document: dict[str, Any]) -> str:
    """Returns the name of the signature that a body asks for, or an empty string if it names none.

    Raises:
      RequestError: INVALID_ARGUMENT if the name is not a string.
    """
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise format_error(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return name


def write(document: Any, *, finite: bool) -> bytes:
    """Returns an answer as JSON: arrays become lists, and each float gets the fewest digits that identify it.

    Args:
      document: the answer.
      finite: whether all floats are finite. Otherwise writing is slower, and NaN and infinities are written as
        TensorFlow Serving does, although strict JSON does not have them.
    """
    if finite:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(document, default=_to_list, ensure_ascii=False, separators=(",", ":")).encode()


def is_base64(value: Any) -> bool:
    """Returns whether a value is a base64 object, `{"b64": "..."}`, the form of bytes in JSON."""
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def type_name(value: Any) -> str:
    """Returns the name of a value's JSON type in TensorFlow Serving's messages, such as `Array`."""
    if isinstance(value, bool):
        return "True" if value else "False"
    return _TYPE_NAMES.get(type(value), "Number")


def quote(value: Any) -> str:
    """Returns the first 256 characters of a value's JSON text, for error messages."""
    text = ""
    try:
        # In pieces, so that a large value is not written in full only to be cut.
        for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            text += piece[:_MAX_QUOTED_CHARACTERS]
            if len(text) >= _MAX_QUOTED_CHARACTERS:
                break
    except RecursionError:
        text += "..."
    return text[:_MAX_QUOTED_CHARACTERS]


def format_error(value: Any, problem: str) -> RequestError:
    """Builds the error INVALID_ARGUMENT that quotes a malformed value; the message ends with `problem`."""
    return invalid_argument(f"JSON Value: {quote(value)} {problem}")


def _parse_leniently(body: bytes) -> Any:
    """Parses JSON that TensorFlow Serving accepts and the fast parser refuses."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _parse_error("Invalid encoding in string.", error.start) from None
    stripped = text.lstrip(_JSON_SPACE)
    if not stripped:
        raise invalid_argument("JSON Parse error: The document is empty")
    try:
        return _LENIENT.raw_decode(stripped)[0]
    except json.JSONDecodeError as error:
        raise _parse_error(error.msg, error.pos + len(text) - len(stripped)) from None
    except RecursionError:
        raise invalid_argument("JSON Parse error: nested too deeply") from None


def _parse_error(reason: str, offset: int) -> RequestError:
    return invalid_argument(f"JSON Parse error: {reason} at offset: {offset}")


def _parse_integer(digits: str) -> int | float:
    if len(digits) <= _LONGEST_INTEGER and _INT64_MIN <= (number := int(digits)) <= _UINT64_MAX:
        return number
    return _parse_float(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if abs(number) == float("inf"):
        raise invalid_argument("JSON Parse error: Number too big to be stored in double.")
    return number


_LENIENT = json.JSONDecoder(parse_int=_parse_integer, parse_float=_parse_float)


def _to_list(value: np.ndarray | np.generic) -> Any:
    if value.dtype == np.float32:
        # The digits of the float itself, not those of the double it would become.
        return np.array([float(str(number)) for number in value.ravel()]).reshape(value.shape).tolist()
    return value.tolist()


_BYTES_SUFFIX = "_bytes"
# The dtypes that TensorFlow Serving writes, besides strings.
_DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool")


def format_outputs(outputs: Mapping[str, np.ndarray], *, rows: bool) -> bytes:
    """Writes outputs as rows (`predictions`) or columns (`outputs`); a single output is written without its key.

    Pass `rows` if the request had rows. Strings are written as text, but as base64 objects if the output's key ends
    with `_bytes`.

    Raises:
      RequestError: INVALID_ARGUMENT if outputs for rows differ in length, or JSON cannot express an output's dtype.
    """
    if rows:
        _check_batch_sizes(outputs)
    columns = {key: _to_column(key, array) for key, array in outputs.items()}
    finite = all(array.dtype.kind != "f" or np.isfinite(array).all() for array in outputs.values())
    if len(columns) == 1:
        document = {"predictions" if rows else "outputs": next(iter(columns.values()))}
    elif rows:
        keys = tuple(columns)
        document = {"predictions": [dict(zip(keys, row, strict=True)) for row in zip(*columns.values(), strict=True)]}
    else:
        document = {"outputs": columns}
    return write(document, finite=finite)


def _check_batch_sizes(outputs: Mapping[str, np.ndarray]) -> None:
    expected = -1
    for key, array in sorted(outputs.items()):
        if array.ndim == 0:
            raise invalid_argument(f"Tensor name: {key} has no shape information ")
        if expected >= 0 and len(array) != expected:
            raise invalid_argument(
                f"Tensor name: {key} has inconsistent batch size: {len(array)} expecting: {expected}"
            )
        expected = len(array)


def _to_column(key: str, array: np.ndarray) -> Any:
    if array.dtype == object:
        is_bytes, written = key.endswith(_BYTES_SUFFIX), np.empty(array.size, object)
        written[:] = [
            {"b64": base64.b64encode(value).decode()} if is_bytes else value.decode("utf-8", errors="replace")
            for value in array.ravel()
        ]
        return written.reshape(array.shape).tolist()
    if array.dtype.name not in _DTYPES:
        raise invalid_argument(f"Failed to write JSON value for tensor type: {array.dtype}")
    if array.dtype != np.float32 or array.size == 0:
        return array.tolist()
    # float32 values stay arrays, which are written fastest and with the digits of float32.
    return array.copy("C") if array.ndim else array[()]
