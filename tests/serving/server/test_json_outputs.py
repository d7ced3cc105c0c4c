import json

import numpy as np
import pytest

from serving.errors import RequestError
from serving.server.json_documents import format_outputs


def test_one_output_has_no_key_and_several_have():
    y, z = np.array([[1, 2], [3, 4]], np.int32), np.array([True, False])
    assert json.loads(format_outputs({"y": y}, rows=True)) == {"predictions": [[1, 2], [3, 4]]}
    assert json.loads(format_outputs({"y": y}, rows=False)) == {"outputs": [[1, 2], [3, 4]]}
    both = {"y": y, "z": z}
    assert json.loads(format_outputs(both, rows=False)) == {"outputs": {"y": [[1, 2], [3, 4]], "z": [True, False]}}
    rows = [{"y": [1, 2], "z": True}, {"y": [3, 4], "z": False}]
    assert json.loads(format_outputs(both, rows=True)) == {"predictions": rows}


@pytest.mark.parametrize("rows", [True, False])
def test_float32_is_written_in_its_own_digits_with_and_without_values_that_are_not_finite(rows):
    finite = np.array([[0.1, 16777216], [1e-8, -0.2]], np.float32)
    assert b"[[0.1,16777216.0],[1e-8,-0.2]]" in format_outputs({"y": finite}, rows=rows)
    rest = np.array([[0.1, np.nan], [np.inf, -np.inf]], np.float32)
    assert b"[[0.1,NaN],[Infinity,-Infinity]]" in format_outputs({"y": rest}, rows=rows)
    one = np.array([0.1, np.nan], np.float32)
    assert format_outputs({"y": one, "z": one}, rows=True) == b'{"predictions":[{"y":0.1,"z":0.1},{"y":NaN,"z":NaN}]}'


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array(0.1, np.float32), b"0.1"),
        (np.array([2**64 - 1], np.uint64), b"[18446744073709551615]"),
        (np.array([1 / 3]), b"[0.3333333333333333]"),
        (np.zeros((0, 2), np.float32), b"[]"),
        (np.array([["é".encode(), b"\xff"]], object), '[["é","\ufffd"]]'.encode()),
        (np.array(b"a", object), b'"a"'),
        (np.asfortranarray(np.array([[1, 2], [3, 4]], np.float32)), b"[[1.0,2.0],[3.0,4.0]]"),
    ],
)
def test_values(array, expected):
    assert format_outputs({"y": array}, rows=False) == b'{"outputs":' + expected + b"}"


def test_strings_of_an_output_called_bytes_are_base64():
    array = np.array([b"\xff"], object)
    assert format_outputs({"y_bytes": array}, rows=False) == b'{"outputs":[{"b64":"/w=="}]}'


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"y": np.float32(1)}, "Tensor name: y has no shape information "),
        ({"y": np.zeros(2), "z": np.zeros(3)}, "Tensor name: z has inconsistent batch size: 3 expecting: 2"),
        ({"y": np.zeros(2, np.float16)}, "Failed to write JSON value for tensor type: float16"),
    ],
)
def test_outputs_that_cannot_be_rows_are_refused(outputs, message):
    with pytest.raises(RequestError, match=message):
        format_outputs({key: np.asarray(array) for key, array in outputs.items()}, rows=True)
