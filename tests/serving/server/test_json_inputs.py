import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from serving.errors import RequestError
from serving.server.json_documents import parse, quote, signature_name
from serving.server.json_inputs import parse_inputs


def _signature(**dtypes):
    signature = meta_graph_pb2.SignatureDef()
    for key, dtype in dtypes.items():
        signature.inputs[key].dtype = dtype.as_datatype_enum
    return signature


def _read(body, **dtypes):
    return parse_inputs(parse(body), _signature(**dtypes))


@pytest.mark.parametrize(
    ("dtype", "text", "expected"),
    [
        (tf.float32, b"[[1, 2.5], [-0.0, 1e-50]]", np.array([[1, 2.5], [-0.0, 0]], np.float32)),
        (tf.float32, b"[NaN, Infinity, -Infinity, 1e39]", np.array([np.nan, np.inf, -np.inf, np.inf], np.float32)),
        (tf.float64, b"[1e39, 18446744073709551616]", np.array([1e39, 2.0**64])),
        (tf.int8, b"[-128, 127]", np.array([-128, 127], np.int8)),
        (tf.uint8, b"[0, 255]", np.array([0, 255], np.uint8)),
        (tf.int64, b"[-9223372036854775808, 9223372036854775807]", np.array([-(2**63), 2**63 - 1])),
        (tf.uint64, b"[18446744073709551615]", np.array([2**64 - 1], np.uint64)),
        (tf.bool, b"[[true], [false]]", np.array([[True], [False]])),
        (
            tf.string,
            b'["a\\u00e9", {"b64": "/w=="}, {"b64": "/w"}]',
            np.array(["aé".encode(), b"\xff", b"\xff"], object),
        ),
        (tf.int32, b"7", np.array(7, np.int32)),
        (tf.float32, b"[[], []]", np.zeros((2, 0), np.float32)),
        (tf.float32, b"[]", np.zeros(0, np.float32)),
    ],
)
def test_columns_become_arrays_of_the_declared_dtype(dtype, text, expected):
    array = _read(b'{"inputs": {"x": ' + text + b"}}", x=dtype)["x"]
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_a_single_input_needs_no_key_and_columns_nobody_asked_for_are_ignored():
    for body in (b'{"inputs": [1, 2]}', b'{"instances": [1, 2]}', b'{"inputs": {"x": [1, 2], "y": "?"}}'):
        np.testing.assert_array_equal(_read(body, x=tf.int32)["x"], [1, 2])
    assert _read(b'{"inputs": {"b64": "YQ=="}}', x=tf.string)["x"].item() == b"a"


def test_rows_become_one_array_for_each_key():
    read = _read(b'{"instances": [{"a": "p", "b": [1, 2]}, {"b": [3, 4], "a": "q"}]}', a=tf.string, b=tf.float32)
    assert read["a"].tolist() == [b"p", b"q"]
    np.testing.assert_array_equal(read["b"], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("dtype", "text", "message"),
    [
        (tf.float32, b'[1, "q"]', 'JSON Value: "q" Type: String is not of expected type: float'),
        (tf.float32, b"[true]", "JSON Value: true Type: True is not of expected type: float"),
        (tf.float64, b"[null]", "JSON Value: null Type: Null is not of expected type: double"),
        (tf.float32, b'["1.5"]', 'JSON Value: "1.5" Type: String is not of expected type: float'),
        (tf.float32, b"[{}]", "JSON Value: {} Type: Object is not of expected type: float"),
        (tf.int32, b"[1.0]", "JSON Value: 1.0 Type: Number is not of expected type: int32"),
        (tf.int32, b"[2147483648]", "JSON Value: 2147483648 Type: Number is not of expected type: int32"),
        (tf.int8, b"[300]", "JSON Value: 300 Type: Number is not of expected type: int8"),
        (tf.uint64, b"[-1]", "JSON Value: -1 Type: Number is not of expected type: uint64"),
        (tf.int64, b"[9223372036854775808]", "Type: Number is not of expected type: int64"),
        (tf.int64, b"[18446744073709551616]", "Type: Number is not of expected type: int64"),
        (tf.bool, b"[1]", "JSON Value: 1 Type: Number is not of expected type: bool"),
        (tf.string, b"[7]", "JSON Value: 7 Type: Number is not of expected type: string"),
        (tf.string, b'[{"b64": 7}]', 'JSON Value: {"b64": 7} not formatted correctly for base64 data'),
        (tf.string, b'[{"b64": "?"}]', "Unable to base64 decode"),
        (tf.string, b'["\\ud800"]', "The surrogate pair in string is invalid."),
        (tf.float32, b"[[1, 2], [3]]", "Encountered list at unexpected size: 1 at level: 1 expected size: 2"),
        (tf.float32, b"[[1], 2]", "JSON Value: 2 found at incorrect level: 2 in the JSON DOM. Expected at level: 2"),
        (tf.float32, b"[1, [2]]", "Encountered list at unexpected level: 1 expected < 1"),
        (tf.float32, b"[" * 40 + b"]" * 40, "is nested in more than 32 lists"),
        (tf.float16, b"[1.5]", "Conversion of JSON Value: 1.5 to type: float16"),
    ],
)
def test_columns_that_are_refused(dtype, text, message):
    with pytest.raises(RequestError) as caught:
        _read(b'{"inputs": {"x": ' + text + b"}}", x=dtype)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            b'[{"a": "p", "b": 1}, {"a": "p", "b": "q"}]',
            "Failed to process element: 1 key: b of 'instances' list. Error: INVALID_ARGUMENT: "
            'JSON Value: "q" Type: String is not of expected type: float',
        ),
        (
            b'[{"a": "p", "b": 1, "c": 1}]',
            "Failed to process element: 0 key: c of 'instances' list. Error: INVALID_ARGUMENT: "
            "JSON object: does not have named input: c",
        ),
        (
            b'[{"a": "p", "b": [1, 2]}, {"a": "p", "b": [1]}]',
            "Failed to process element: 1 key: b of 'instances' list. Error: INVALID_ARGUMENT: "
            "Expecting tensor size: 2 but got: 1",
        ),
        (
            b'[{"a": "p", "b": [1, 2]}, {"a": "p", "b": [[1], [2]]}]',
            "Failed to process element: 1 key: b of 'instances' list. Error: INVALID_ARGUMENT: "
            "Expecting shape [2] but got: [2,1]",
        ),
        (
            b'[{"a": "p"}]',
            'Failed to process element: 0 of \'instances\' list. JSON object: {"a": "p"} keys must be equal to: a,b',
        ),
        (b'[{"a": "p", "b": 1}, [1]]', "Expecting object but got list at item 1 of input list"),
    ],
)
def test_rows_that_are_refused(rows, message):
    with pytest.raises(RequestError) as caught:
        _read(b'{"instances": ' + rows + b"}", a=tf.string, b=tf.float32)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            b"[1, true]",
            "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: "
            "JSON Value: true Type: True is not of expected type: float",
        ),
        (b'[1, {"x": 1}]', "Expecting value/list but got object at item 1 of input list"),
    ],
)
def test_plain_rows_that_are_refused(rows, message):
    with pytest.raises(RequestError) as caught:
        _read(b'{"instances": ' + rows + b"}", x=tf.float32)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON Parse error: The document is empty"),
        (b"  \n", "JSON Parse error: The document is empty"),
        (b'{"inputs": ', "JSON Parse error: Expecting value at offset: 11"),
        (b'  {"inputs": ', "JSON Parse error: Expecting value at offset: 13"),
        (b'{"inputs": 1e400}', "JSON Parse error: Number too big to be stored in double."),
        (b'{"inputs": 1' + b"0" * 5000 + b"}", "JSON Parse error: Number too big to be stored in double."),
        (b'{"a": "\xff"}', "JSON Parse error: Invalid encoding in string. at offset: 7"),
        (b"[" * 30000, "JSON Parse error: nested too deeply"),
        (b"[1]", "JSON Value: [1] Is not object"),
        (b'{"signature_name": 3}', "'signature_name' key must be a string value."),
    ],
)
def test_bodies_that_are_refused(body, message):
    with pytest.raises(RequestError) as caught:
        signature_name(parse(body))
    assert message in caught.value.message


def test_text_after_the_document_and_a_byte_order_mark_are_ignored():
    assert parse(b'{"a": 1} and more') == {"a": 1}
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_of_a_key_given_twice_the_last_counts():
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}


def test_what_is_quoted_is_cut_before_it_is_written_out():
    class Endless(list):
        def __iter__(self):
            while True:
                yield 1

    assert len(quote(Endless([1]))) == 256
    assert quote("x" * 10**6) == '"' + "x" * 255
    nested = []
    for _ in range(990):
        nested = [nested]
    assert quote(nested).startswith("[[[[")
