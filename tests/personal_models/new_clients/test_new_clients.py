"""Examples of new clients: what is read, and what is refused with file and row."""

import numpy as np
import pytest

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import DataError
from tff_pdp.models.dense import build_linear, build_linear_regression
from tff_pdp.personal_models.new_clients.examples import read_new_clients

MODEL = build_linear((2,), 3)
GOOD = {"x": np.arange(8.0).reshape(4, 2), "y": np.array([0, 1, 2, 0])}


@pytest.fixture
def saved(tmp_path):
    def save(**arrays):
        path = tmp_path / "clinic.npz"
        np.savez(path, **arrays)
        return path

    return save


def test_a_file_holds_one_clients_training_examples(saved):
    new = read_new_clients(saved(**GOOD), ["clinic"], MODEL)
    assert new.client_ids == ("clinic",)
    assert new.num_examples == {"clinic": 4}
    np.testing.assert_array_equal(new.train[0].x, GOOD["x"].astype(np.float32))
    np.testing.assert_array_equal(new.train[0].y, GOOD["y"])
    assert (new.train[0].x.dtype, new.train[0].y.dtype) == (np.float32, np.int64)
    assert new.held_out[0].x.shape == (0, 2)


def test_labels_of_a_regression_are_numbers(saved):
    model = build_linear_regression((2,), 0)
    new = read_new_clients(saved(x=GOOD["x"], y=[0.5, -1, 2, 7]), ["clinic"], model)
    np.testing.assert_array_equal(new.train[0].y, np.array([0.5, -1, 2, 7], np.float32))
    with pytest.raises(DataError, match=r"clinic\.npz: row 2 of y \(counted from 0\) is not a finite number"):
        read_new_clients(saved(x=GOOD["x"], y=[0.5, -1, np.nan, 7]), ["clinic"], model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": np.array([0, 1, 3, 4])}, r"row 2 of y \(counted from 0\) is not a class from 0 to 2, like 1 more"),
        ({"y": np.array([0, -1, 0, 0])}, "row 1 of y"),
        ({"y": np.array([0, 0.5, 0, 0])}, "row 1 of y"),
        ({"y": np.array([0, np.nan, 0, 0])}, "row 1 of y"),
        ({"y": np.zeros((4, 1), int)}, r"y has shape \(4, 1\); with x of 4 rows it must be \[4\]"),
        ({"y": np.array(["a", "b", "c", "d"])}, "y is <U1; it must have numbers"),
        ({"x": np.zeros((4, 3))}, r"x has shape \(4, 3\); the model needs \[n, 2\]"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "with n at least 1"),
        ({"x": np.array([[0, 0], [0, 0], [0, 0], [np.inf, 0]])}, "row 3 of x .* has a value that is not finite"),
        ({"x": np.array([[0, 0], [0, 1e39], [0, 0], [0, 0]])}, "row 1 of x"),
        ({"y": np.array([0, 1, 2, 0], object)}, "cannot be read"),
    ],
)
def test_a_file_is_refused_by_its_name_and_row(saved, changed, message):
    with pytest.raises(DataError, match=message) as error:
        read_new_clients(saved(**{**GOOD, **changed}), ["clinic"], MODEL)
    assert "clinic.npz" in str(error.value)


def test_a_file_lacks_an_array_or_is_none(saved, tmp_path):
    with pytest.raises(DataError, match="has no array 'y'"):
        read_new_clients(saved(x=GOOD["x"]), ["clinic"], MODEL)
    text = tmp_path / "clinic.csv"
    text.write_text("1,2\n")
    with pytest.raises(DataError, match=r"clinic\.csv cannot be read"):
        read_new_clients(text, ["clinic"], MODEL)
    single = tmp_path / "single.npy"
    np.save(single, GOOD["x"])
    with pytest.raises(DataError, match=r"single\.npy cannot be read"):
        read_new_clients(single, ["clinic"], MODEL)
    with pytest.raises(DataError, match=r"nowhere\.npz cannot be read"):
        read_new_clients(tmp_path / "nowhere.npz", ["clinic"], MODEL)


@pytest.mark.parametrize("client_ids", [(), ("a", "b")])
def test_a_file_is_of_exactly_one_client(saved, client_ids):
    with pytest.raises(DataError, match="exactly one --client-id"):
        read_new_clients(saved(**GOOD), client_ids, MODEL)


def test_a_dataset_gives_training_examples_to_fit_and_all_others_to_report(client_folder):
    dataset = ClientDataset.open(client_folder)
    model = build_linear((8, 8, 1), 10)
    new = read_new_clients(client_folder, [], model)
    assert new.client_ids == dataset.client_ids
    for place, client_id in enumerate(dataset.client_ids):
        np.testing.assert_array_equal(new.train[place].x, dataset.load(client_id, "train").x)
        held_out = [dataset.load(client_id, split).y for split in ("validation", "test")]
        np.testing.assert_array_equal(new.held_out[place].y, np.concatenate(held_out))
    last = dataset.client_ids[-1]
    assert read_new_clients(client_folder, [last], model).client_ids == (last,)
    with pytest.raises(DataError, match="no client 'nobody'"):
        read_new_clients(client_folder, ["nobody"], model)
    with pytest.raises(DataError, match="more than once"):
        read_new_clients(client_folder, [last, last], model)
    with pytest.raises(DataError, match=r"shape \(8, 8, 1\) in 10 classes, but the model is for \(2,\) in 3"):
        read_new_clients(client_folder, [], MODEL)
