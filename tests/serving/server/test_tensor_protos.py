import asyncio
import threading

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from serving.errors import RequestError
from serving.server import tensors as tensor_protos
from serving.server.tensors import LARGE_ELEMENTS, fill, to_arrays

# Each with values that other types of the same width would read differently.
ARRAYS = [
    np.array([[1.5, -2.25], [np.inf, 3e-40]], np.float32),
    np.array([1 / 3, -1e300]),
    np.array([-128, 127], np.int8),
    np.array([-(2**15), 2**15 - 1], np.int16),
    np.array([-(2**31), 2**31 - 1], np.int32),
    np.array([-(2**63), 2**63 - 1], np.int64),
    np.array([0, 255], np.uint8),
    np.array([0, 65535], np.uint16),
    np.array([0, 2**32 - 1], np.uint32),
    np.array([0, 2**64 - 1], np.uint64),
    np.array([[True], [False]]),
    np.array([1.5, -0.25, np.inf], np.float16),
    np.array([1.5, -0.25, np.inf]).astype(tf.bfloat16.as_numpy_dtype),
    np.array([1 + 2j, complex(np.inf, -3)], np.complex64),
    np.array([1 + 2j, -1e300j]),
    np.array([["é".encode(), b""], [b"\xff\x00", b"x"]], object),
    np.array(3.5, np.float32),
    np.zeros((0, 3), np.float32),
    np.array(b"scalar", object),
]


def to_array(key, proto, max_elements):
    return asyncio.run(to_arrays({key: proto}, max_elements))[key]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_every_dtype_both_ways_agrees_with_tensorflow(array):
    proto = tf.make_tensor_proto(array)
    read = to_array("x", proto, 100)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)

    written = tensor_pb2.TensorProto()
    fill(written, array)
    assert written.dtype == proto.dtype
    assert not written.tensor_content
    # make_ndarray cannot read the bits of sixteen-bit floats together with a shape of more than one.
    np.testing.assert_array_equal(np.asarray(tf.make_ndarray(written)), array)
    np.testing.assert_array_equal(to_array("x", written, 100), array)


def _tensor(sizes, dtype=tf.float32, **values):
    proto = tensor_pb2.TensorProto(dtype=dtype.as_datatype_enum, **values)
    for size in sizes:
        proto.tensor_shape.dim.add().size = size
    return proto


def test_values_left_out_are_the_last_one_and_further_ones_are_dropped():
    np.testing.assert_array_equal(to_array("x", _tensor([2, 2], float_val=[1, 7]), 4), [[1, 7], [7, 7]])
    np.testing.assert_array_equal(to_array("x", _tensor([3]), 4), [0, 0, 0])
    np.testing.assert_array_equal(to_array("x", _tensor([2], float_val=[1, 2, 3]), 4), [1, 2])
    assert to_array("x", _tensor([3], tf.string, string_val=[b"a"]), 4).tolist() == [b"a"] * 3
    assert to_array("x", _tensor([2], tf.string), 4).tolist() == [b"", b""]


def test_strings_packed_as_raw_bytes_are_read():
    long = b"x" * 300
    # 300 = 0b10_0101100: the low seven bits first, marked by the high bit.
    content = b"\x02" + b"\xac\x02" + b"\x00" + b"ab" + long
    assert to_array("x", _tensor([3], tf.string, tensor_content=content), 4).tolist() == [b"ab", long, b""]


@pytest.mark.parametrize(
    "proto",
    [
        _tensor([-1], float_val=[1]),
        _tensor([2], tensor_content=b"\0" * 4),
        _tensor([1], tensor_content=b"\0" * 5),
        tensor_pb2.TensorProto(),
        tensor_pb2.TensorProto(dtype=9999),
        _tensor([1], tf.resource),
        _tensor([1] * 40, float_val=[1]),
        _tensor([1], tf.complex64, scomplex_val=[1]),
        _tensor([1], tf.string, tensor_content=b"\x05ab"),
        _tensor([1], tf.string, tensor_content=b"\x80"),
        _tensor([1], tf.string, tensor_content=b"\xff" * 12),
    ],
)
def test_malformed_tensors_have_one_message(proto):
    with pytest.raises(RequestError, match=r"^tensor parsing error: x$") as caught:
        to_array("x", proto, 100)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_rank_is_malformed():
    proto = _tensor([], float_val=[1])
    proto.tensor_shape.unknown_rank = True
    with pytest.raises(RequestError, match="tensor parsing error"):
        to_array("x", proto, 100)


def test_a_few_bytes_that_stand_for_many_elements_are_refused_before_they_are_made():
    with pytest.raises(RequestError, match=f"{2**62} elements") as caught:
        to_array("x", _tensor([2**31, 2**31], float_val=[1]), 100)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_elements_are_made_off_the_event_loop(monkeypatch):
    threads = []
    original = tensor_protos._decoded
    monkeypatch.setattr(
        tensor_protos, "_decoded", lambda *arguments: threads.append(threading.current_thread()) or original(*arguments)
    )
    protos = {"x": _tensor([LARGE_ELEMENTS], float_val=[7]), "y": _tensor([1], float_val=[8])}
    arrays = asyncio.run(to_arrays(protos, 2 * LARGE_ELEMENTS))
    assert (arrays["x"].size, arrays["x"][-1], arrays["y"].tolist()) == (LARGE_ELEMENTS, 7, [8])
    assert threading.main_thread() not in threads
    asyncio.run(to_arrays({"y": protos["y"]}, 1))
    assert threads[-1] is threading.main_thread()


def test_a_dtype_that_cannot_be_sent_is_an_error_of_the_model():
    with pytest.raises(TypeError, match="cannot be sent"):
        fill(tensor_pb2.TensorProto(), np.zeros(1, "datetime64[s]"))
