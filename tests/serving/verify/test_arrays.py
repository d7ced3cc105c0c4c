import numpy as np

from serving.verify.answers import load_arrays, save_arrays


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "file": np.array(True),
        "empty": np.zeros((0, 4), np.int64),
    }
    save_arrays(tmp_path / "a.npz", arrays)
    loaded = load_arrays(tmp_path / "a.npz")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_strings_keep_their_bytes_and_shape(tmp_path):
    strings = np.array([["é", b"\x00\xff\x00"], ["", b"a,b\n"]], object)
    save_arrays(tmp_path / "a.npz", {"s": strings, "u": np.array(["é", "ab"]), "none": np.array([], object)})
    loaded = load_arrays(tmp_path / "a.npz")
    assert loaded["s"].tolist() == [["é".encode(), b"\x00\xff\x00"], [b"", b"a,b\n"]]
    assert loaded["u"].tolist() == ["é".encode(), b"ab"]
    assert loaded["none"].shape == (0,)
    # No pickle: the file opens where NumPy is told to refuse them.
    with np.load(tmp_path / "a.npz", allow_pickle=False) as members:
        assert all(members[name].dtype != object for name in members.files)
