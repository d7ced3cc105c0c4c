import numpy as np
from tensorflow_serving.apis import predict_pb2

from serving.verify.fresh_process import save_arrays
from serving.verify.worker import load_arrays


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "file": np.array(True),
        "empty": np.zeros((0, 4), np.int64),
    }
    save_arrays(tmp_path / "a.pb", arrays)
    loaded = load_arrays(tmp_path / "a.pb")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_strings_keep_their_bytes_and_shape(tmp_path):
    strings = np.array([["é", b"\x00\xff\x00"], ["", b"a,b\n"]], object)
    save_arrays(tmp_path / "a.pb", {"s": strings, "u": np.array(["é", "ab"]), "none": np.array([], object)})
    loaded = load_arrays(tmp_path / "a.pb")
    assert loaded["s"].tolist() == [["é".encode(), b"\x00\xff\x00"], [b"", b"a,b\n"]]
    assert loaded["u"].tolist() == ["é".encode(), b"ab"]
    assert loaded["none"].shape == (0,)
    # No pickle: the file is a message.
    message = predict_pb2.PredictRequest.FromString((tmp_path / "a.pb").read_bytes())
    assert message.inputs["s"].string_val[1] == b"\x00\xff\x00"
