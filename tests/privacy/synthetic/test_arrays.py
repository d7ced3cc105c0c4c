import io

import numpy as np
import pytest

from tff_pdp.errors import DataError
from tff_pdp.privacy.synthetic.arrays import read_arrays
from tff_pdp.privacy.synthetic.base import SyntheticExamples
from tff_pdp.privacy.synthetic.gaussian import DpGaussian

GENERATOR = DpGaussian(examples=2, num_classes=3, high=255)
X = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)


def read(tmp_path, generator=GENERATOR, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return read_arrays(tmp_path / "a.npz", generator)


def test_arrays_have_the_form_of_the_input(tmp_path):
    arrays = read(tmp_path, x=X, y=np.array([0, 2, 1, 0], np.uint8))
    assert (arrays.x == X).all() and arrays.y.tolist() == [0, 2, 1, 0] and arrays.y.dtype == np.int64
    content = arrays.to_bytes(SyntheticExamples(np.full((2, 2, 3), 7.6), np.array([1, 2])))
    with np.load(io.BytesIO(content)) as made:
        assert sorted(made) == ["x", "y"] and made["x"].dtype == np.uint8 and made["y"].dtype == np.uint8
        assert (made["x"] == 8).all() and made["y"].tolist() == [1, 2]
    assert content == arrays.to_bytes(SyntheticExamples(np.full((2, 2, 3), 7.6), np.array([1, 2])))


def test_without_labels_there_is_one_class_and_none_is_written(tmp_path):
    arrays = read(tmp_path, DpGaussian(examples=1), x=np.full((3, 2), 0.5, np.float32))
    assert arrays.y.tolist() == [0, 0, 0]
    with np.load(io.BytesIO(arrays.to_bytes(SyntheticExamples(np.zeros((1, 2)), np.zeros(1, int))))) as made:
        assert sorted(made) == ["x"] and made["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.zeros(4, int)}, "the array x is missing"),
        ({"x": np.zeros(4)}, "x must be numbers of shape"),
        ({"x": np.full((4, 2), "a")}, "x must be numbers of shape"),
        ({"x": X}, "the array y is missing, but there are 3 classes"),
        ({"x": X, "y": np.zeros(3, int)}, r"y must be whole numbers of shape \[4\]"),
        ({"x": X, "y": np.zeros(4)}, r"y must be whole numbers of shape \[4\], not float64"),
        ({"x": X, "y": np.array([0, 1, 3, 0])}, "y, row 3: the label is not one of the classes 0 to 2"),
        ({"x": X * 1.0 - 7, "y": np.zeros(4, int)}, "x, row 1: a value is missing, or not between 0 and 255"),
        ({"x": np.where(X == 20, np.nan, X), "y": np.zeros(4, int)}, "x, row 4: a value is missing, or not"),
        ({"x": np.array([[None]]), "y": np.zeros(1, int)}, "not an NPZ file of plain arrays"),
    ],
)
def test_what_is_not_allowed_is_named(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, **arrays)
    assert str(tmp_path / "a.npz") in str(caught.value)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the file"):
        read_arrays(tmp_path / "absent.npz", GENERATOR)
    for content in (b"", b"PK\3\4 no zip", b"text"):
        (tmp_path / "b.npz").write_bytes(content)
        with pytest.raises(DataError, match="not an NPZ file of plain arrays"):
            read_arrays(tmp_path / "b.npz", GENERATOR)
    np.save(tmp_path / "c.npy", X)
    with pytest.raises(DataError, match="not an NPZ file"):
        read_arrays(tmp_path / "c.npy", GENERATOR)
