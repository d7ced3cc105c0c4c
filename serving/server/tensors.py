"""Converts TensorProto messages and examples to arrays, and arrays to TensorProto messages.

TensorFlow's general converters would take most of a request's time. Large requests are decoded in a thread, so that
the event loop can answer other requests at the same time.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from serving.errors import RequestError, invalid_argument

# Message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

# By type: the dtype, and the field that holds values where they are not raw bytes.
_VALUE_FIELDS: dict[int, tuple[np.dtype, str]] = {
    dtype.as_datatype_enum: (np.dtype(dtype.as_numpy_dtype), field)
    for field, dtypes in {
        "float_val": [tf.float32],
        "double_val": [tf.float64],
        "int_val": [tf.int8, tf.int16, tf.int32, tf.uint8, tf.uint16],
        "int64_val": [tf.int64],
        "uint32_val": [tf.uint32],
        "uint64_val": [tf.uint64],
        "bool_val": [tf.bool],
        "half_val": [tf.half, tf.bfloat16],
        "scomplex_val": [tf.complex64],
        "dcomplex_val": [tf.complex128],
    }.items()
    for dtype in dtypes
}
_TYPES = {dtype: (number, field) for number, (dtype, field) in _VALUE_FIELDS.items()}
_BOOL = np.dtype(np.bool_)
# These travel as the integers of their bits.
_SIXTEEN_BIT_FLOATS = tuple(dtype for dtype, field in _VALUE_FIELDS.values() if field == "half_val")


async def to_arrays(protos: Mapping[str, tensor_pb2.TensorProto], max_elements: int) -> dict[str, np.ndarray]:
    """Decodes a request's input tensors as TensorFlow Serving does; uses a thread if the tensors have many elements.

    If a message has fewer values than its shape has elements, the missing elements are copies of the last value, or
    zeros if there is no value. So a few bytes could encode any number of elements. Therefore a tensor may have at most
    `max_elements` elements.

    Returns:
      Arrays by key, with the tensors' dtypes and shapes. Arrays may be read-only. Strings are `bytes` objects.

    Raises:
      RequestError: RESOURCE_EXHAUSTED if a tensor has too many elements, INVALID_ARGUMENT if a message is malformed.
    """
    shapes = {key: _shape(key, proto, max_elements) for key, proto in protos.items()}
    is_large = sum(map(math.prod, shapes.values())) > LARGE_ELEMENTS
    return await off_loop(is_large, lambda: {key: _decoded(key, proto, shapes[key]) for key, proto in protos.items()})


def fill(proto: tensor_pb2.TensorProto, array: np.ndarray) -> None:
    """Writes an array into an empty message; like TensorFlow Serving, writes values to the field for the dtype.

    Raises:
      TypeError: the array has a dtype that outputs of signatures cannot have.
    """
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if array.dtype == object:
        proto.dtype = types_pb2.DT_STRING
        proto.string_val.extend(array.ravel().tolist())
        return
    if array.dtype not in _TYPES:
        raise TypeError(f"A tensor of dtype {array.dtype} cannot be sent.")
    proto.dtype, field = _TYPES[array.dtype]
    getattr(proto, field).extend(_to_values(array.ravel()))


def _shape(key: str, proto: tensor_pb2.TensorProto, max_elements: int) -> tuple[int, ...]:
    shape = tuple([dimension.size for dimension in proto.tensor_shape.dim])
    if proto.tensor_shape.unknown_rank or min(shape, default=0) < 0:
        raise _malformed(key)
    if math.prod(shape) > max_elements:
        raise RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"input {key} has {math.prod(shape)} elements; this server accepts {max_elements}",
        )
    return shape


def _decoded(key: str, proto: tensor_pb2.TensorProto, shape: tuple[int, ...]) -> np.ndarray:
    num_elements = math.prod(shape)
    try:
        if proto.dtype == types_pb2.DT_STRING:
            return _strings(proto, num_elements).reshape(shape)
        dtype, field = _VALUE_FIELDS[proto.dtype]
        content = proto.tensor_content
        if content and dtype is _BOOL:
            # Any byte may come; only 0 and 1 are valid booleans in memory.
            return (np.frombuffer(content, np.uint8) != 0).reshape(shape)
        if content:
            return np.frombuffer(content, dtype).reshape(shape)
        return _filled(_from_values(getattr(proto, field), dtype), num_elements).reshape(shape)
    # An unknown type, bytes or values that do not fit: TensorFlow Serving has one message for all of them.
    except (KeyError, ValueError, OverflowError, IndexError) as error:
        raise _malformed(key) from error


def _from_values(values: Iterable, dtype: np.dtype) -> np.ndarray:
    listed = list(values)
    if dtype.kind == "c":
        # Real and imaginary parts take turns.
        return np.array(listed, dtype.type().real.dtype).view(dtype)
    if dtype in _SIXTEEN_BIT_FLOATS:
        return np.array(listed, np.int64).astype(np.uint16).view(dtype)
    if dtype.kind in "iu":
        # The field may be wider than the type: higher bits are dropped, as a cast in C++ does.
        return np.array(listed, np.uint64 if dtype == np.uint64 else np.int64).astype(dtype)
    return np.array(listed, dtype)


def _to_values(flat: np.ndarray) -> list:
    if flat.dtype.kind == "c":
        return flat.view(flat.real.dtype).tolist()
    if flat.dtype in _SIXTEEN_BIT_FLOATS:
        return flat.view(np.uint16).tolist()
    return flat.tolist()


def _filled(values: np.ndarray, num_elements: int) -> np.ndarray:
    """Returns the first `num_elements` of the values, repeating the last where there are fewer."""
    missing = num_elements - len(values)
    if missing <= 0:
        return values[:num_elements]
    last = values[-1:] if len(values) else np.zeros(1, values.dtype)
    return np.concatenate([values, np.repeat(last, missing)])


def _strings(proto: tensor_pb2.TensorProto, num_elements: int) -> np.ndarray:
    values = _packed_strings(proto.tensor_content, num_elements) if proto.tensor_content else list(proto.string_val)
    if len(values) < num_elements:
        values += [values[-1] if values else b""] * (num_elements - len(values))
    array = np.empty(num_elements, object)
    array[:] = values[:num_elements]
    return array


def _packed_strings(content: bytes, num_elements: int) -> list[bytes]:
    """Reads raw bytes of strings: the length of each as a variable-length integer, then all the text."""
    lengths, at = [], 0
    for _ in range(num_elements):
        length = shift = 0
        while True:
            byte = content[at]
            at, length, shift = at + 1, length | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
            if shift > 35:
                raise ValueError("a length has too many bytes")
        lengths.append(length)
    if at + sum(lengths) != len(content):
        raise ValueError("lengths do not add up to the content")
    values = []
    for length in lengths:
        values.append(content[at : at + length])
        at += length
    return values


def _malformed(key: str) -> RequestError:
    return invalid_argument(f"tensor parsing error: {key}")


def examples_tensor(context: bytes, examples: Sequence[bytes], max_bytes: int) -> np.ndarray:
    """Returns serialised examples, each merged with the shared features in `context`, as an array of bytes `[n]`.

    Raises:
      RequestError: RESOURCE_EXHAUSTED if all copies of the context together, one for each example, have more than
        `max_bytes` bytes; even a small request may need many copies.
    """
    if len(context) * len(examples) > max_bytes:
        raise RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{len(examples)} examples with a context of {len(context)} bytes each; this server accepts {max_bytes} "
            "bytes of contexts in all",
        )
    array = np.empty(len(examples), object)
    # Serialised messages are merged by writing one after the other.
    array[:] = [context + example for example in examples]
    return array


# Sizes that take about a millisecond; handing them to a thread takes a tenth of that.
LARGE_BYTES = 128 * 1024
LARGE_ELEMENTS = 128 * 1024

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def off_loop(
    is_large: bool,
    function: Callable[Parameters, Result],
    *arguments: Parameters.args,
    **options: Parameters.kwargs,
) -> Result:
    """Calls a function: in another thread if `is_large`, so that the event loop is not blocked; else in this thread."""
    if is_large:
        return await asyncio.to_thread(function, *arguments, **options)
    return function(*arguments, **options)
