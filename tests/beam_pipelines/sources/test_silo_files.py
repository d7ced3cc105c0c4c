"""Silo files through the job: each format, each thing that can be wrong with it, and the real School and Vehicle."""

import functools
import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from beam_pipelines.dataset.clients import run_client_dataset_job
from beam_pipelines.options import ClientDatasetOptions, RawData
from beam_pipelines.sources.silo_files import SiloArrays, list_silo_files, read_silos, write_silo_arrays
from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.data.manifest import SPLITS, Tally
from tff_pdp.errors import DataError


def cells(*members):
    cell = np.empty((1, len(members)), object)
    for number, member in enumerate(members):
        cell[0, number] = member
    return cell


def write_mat(path, x, y, **options):
    scipy.io.savemat(path, {"X": cells(*x), "Y": cells(*y)}, **options)
    return path


@pytest.fixture
def prepare(tmp_path):
    def run(path, input_shape=(3,), num_classes=2, label_shift=0.0, label_scale=1.0, **changes):
        folder, files = list_silo_files(Path(path))
        how = {"num_classes": num_classes, "label_shift": label_shift, "label_scale": label_scale}
        reader = functools.partial(read_silos, **how)
        fields = {"min_examples_per_client": 1, "num_shards": 2, "max_bad_fraction": 1.0, "test_fraction": 0.0}
        fields |= {"validation_fraction": 0.0, **changes}
        fields |= {"input_shape": input_shape, "num_classes": num_classes, "overwrite": True}
        options = ClientDatasetOptions(path, tmp_path / "clients", **fields)
        raw = RawData("silo_files", folder, files, reader, are_images=False)
        run_client_dataset_job(raw, options)
        return ClientDataset.open(tmp_path / "clients", verify=True)

    return run


def rows(dataset, client, split="train"):
    examples = dataset.load(client, split)
    return sorted((tuple(x), float(y)) for x, y in zip(examples.x, examples.y, strict=True))


X = [np.array([[1, 2, 3], [4, 5, 250]], np.uint8), np.array([[7, 8, 9]], np.uint8)]
Y = [np.array([[1], [70]], np.uint8), np.array([[8]], np.uint8)]


@pytest.mark.parametrize("transposed", [False, True])
def test_mat_cells_of_a_regression(prepare, tmp_path, transposed):
    x, y = cells(*X), cells(*Y)
    scipy.io.savemat(tmp_path / "a.mat", {"X": x.T if transposed else x, "Y": y.T if transposed else y})
    dataset = prepare(tmp_path / "a.mat", num_classes=0, label_shift=-1.0, label_scale=1 / 69)
    assert dataset.client_ids == ("silo_000", "silo_001")
    assert rows(dataset, "silo_000") == [((1, 2, 3), 0), ((4, 5, 250), 1)]
    assert rows(dataset, "silo_001") == [((7, 8, 9), float(np.float32(7 / 69)))]
    features = dataset.manifest.features
    assert (features.shape, features.num_classes, features.y_dtype) == ((3,), 0, "float32")
    assert dataset.load("silo_000", "test").y.dtype == np.float32


def test_mat_labels_of_two_classes(prepare, tmp_path):
    y = [np.array([[-1.0], [1.0]]), np.array([[1.0]])]
    dataset = prepare(write_mat(tmp_path / "a.mat", X, y, do_compression=True))
    assert rows(dataset, "silo_000") == [((1, 2, 3), 0), ((4, 5, 250), 1)]
    assert rows(dataset, "silo_001") == [((7, 8, 9), 1)]
    assert dataset.load("silo_000", "train").y.dtype == np.int64


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_json_with_nested_labels(prepare, tmp_path, name):
    user_data = {"b": {"y": [[-1], [1]], "x": [[1, 2, 3], [4, 5, 6]]}, "a": {"x": [[7, 8, 9]], "y": [[-1.0]]}}
    content = json.dumps({"users": ["b", "a"], "num_samples": [2, 1], "user_data": user_data}).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    dataset = prepare(tmp_path / name)
    assert dataset.client_ids == ("a", "b")
    assert rows(dataset, "b") == [((1, 2, 3), 0), ((4, 5, 6), 1)]
    assert rows(dataset, "a") == [((7, 8, 9), 0)]


def test_npz_with_and_without_test_examples(prepare, tmp_path):
    x = np.arange(60, dtype=np.float64).reshape(20, 3)
    is_test = np.arange(20) >= 15
    plain = SiloArrays("plain", x, np.arange(20)[:, np.newaxis] % 3)
    write_silo_arrays(tmp_path / "a.npz", [plain, SiloArrays("site/stated", x, np.arange(20) % 3, is_test)])
    dataset = prepare(tmp_path / "a.npz", num_classes=3, test_fraction=0.25, validation_fraction=0.2, exact_split=True)
    assert dataset.manifest.clients == {
        "plain": {"train": 11, "validation": 4, "test": 5},
        "site/stated": {"train": 12, "validation": 3, "test": 5},
    }
    assert [x[0] for x, _ in rows(dataset, "site/stated", "test")] == [45, 48, 51, 54, 57]


def test_folder_of_several_files(prepare, tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    write_mat(folder / "a.mat", X, Y)
    write_silo_arrays(folder / "b.npz", [SiloArrays("other", X[0], Y[0])])
    (folder / "notes.txt").touch()
    assert list_silo_files(folder) == (folder, ("a.mat", "b.npz"))
    assert prepare(folder, num_classes=0).client_ids == ("other", "silo_000", "silo_001")
    write_mat(folder / "c.mat", X, Y)
    with pytest.raises(DataError, match=r"raw: several \.mat files"):
        list_silo_files(folder)


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        list_silo_files(tmp_path / "nowhere.mat")
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match=r"no silo file; data\.input must be a \.mat, \.json"):
            list_silo_files(path)


# The second silo has one example, so nothing is left of it.
EMPTY = {"client_below_min_examples": Tally(1, 0)}


@pytest.mark.parametrize(
    ("x", "y", "num_classes", "dropped"),
    [
        ([X[0], X[1][:, :2]], Y, 0, {"wrong_feature_count": Tally(0, 1)} | EMPTY),
        ([X[0], np.array([[1, np.nan, 2]])], Y, 0, {"feature_not_finite": Tally(0, 1)} | EMPTY),
        ([X[0], np.array([[1, 1e300, 2]])], Y, 0, {"feature_not_finite": Tally(0, 1)} | EMPTY),
        (X, [Y[0], np.array([[np.nan]])], 0, {"label_not_a_finite_number": Tally(0, 1)} | EMPTY),
        (X, [np.array([[0.0], [1.0]]), np.array([[3.0]])], 2, {"label_out_of_range": Tally(0, 1)} | EMPTY),
        (X, [np.array([[0.0], [1.0]]), np.array([[0.5]])], 2, {"label_not_an_integer": Tally(0, 1)} | EMPTY),
        # In one silo, -1 and 0 cannot both be the first class.
        (X, [np.array([[-1], [0]]), np.array([[1]])], 2, {"label_out_of_range": Tally(0, 1)}),
        (X, [Y[0], Y[0]], 0, {"x_and_y_differ_in_length": Tally(1, 2)}),
        ([X[0], "text"], Y, 0, {"user_data_without_lists_x_and_y": Tally(1, 1)}),
        (X, [Y[0], np.array([[1, 2]])], 0, {"user_data_without_lists_x_and_y": Tally(1, 1)}),
        ([X[0], np.zeros((0, 0))], [Y[0], np.zeros((0, 0))], 0, EMPTY),
    ],
)
def test_what_cannot_be_used_is_kept_aside_and_counted(prepare, tmp_path, x, y, num_classes, dropped):
    manifest = prepare(write_mat(tmp_path / "a.mat", x, y), num_classes=num_classes).manifest
    assert manifest.dropped == dropped
    assert manifest.kept.examples == manifest.read.examples - sum(tally.examples for tally in dropped.values())


def test_too_much_of_it_fails(prepare, tmp_path):
    path = write_mat(tmp_path / "a.mat", X, Y)
    with pytest.raises(DataError, match=r"a\.mat: 100\.0% of 3 examples cannot be used.*wrong_feature_count"):
        prepare(path, input_shape=(4,), num_classes=0, max_bad_fraction=0.01)


def fails(prepare, path, message):
    with pytest.raises(DataError, match=message):
        prepare(path)


def test_mat_without_the_cells(prepare, tmp_path):
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"X": cells(*X)})
    fails(prepare, path, r"a\.mat: no variable Y in it")
    scipy.io.savemat(path, {"x": cells(*X)})
    fails(prepare, path, r"a\.mat: no variable X and no variable Y in it")
    scipy.io.savemat(path, {"X": cells(*X), "Y": np.zeros((3, 1))})
    fails(prepare, path, r"a\.mat: Y must be a cell of shape \(1, m\) or \(m, 1\), not float64 of shape \(3, 1\)")
    scipy.io.savemat(path, {"X": np.concatenate([cells(*X), cells(*X)]), "Y": cells(*Y)})
    fails(prepare, path, r"a\.mat: X must be a cell of shape .*, not object of shape \(2, 2\)")
    scipy.io.savemat(path, {"X": cells(*X), "Y": cells(*Y, Y[0])})
    fails(prepare, path, r"a\.mat: X has 2 cells and Y has 3")


@pytest.mark.parametrize("do_compression", [False, True])
def test_truncated_mat(prepare, tmp_path, do_compression):
    path = write_mat(tmp_path / "a.mat", X, Y, do_compression=do_compression)
    content = path.read_bytes()
    for length in (0, 100, 127, 140, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"a\.mat: (not a MATLAB file|no variable)"):
            list(read_silos(path, 2))
    path.write_bytes(content[: len(content) // 2])
    fails(prepare, path, r"a\.mat: not a MATLAB file of version 5 to 7\.2, or truncated")


def test_mat_of_version_73(prepare, tmp_path):
    path = tmp_path / "a.mat"
    header = b"MATLAB 7.3 MAT-file, Platform: PCWIN64, Created on: Fri Apr 13 15:57:09 2012 HDF5 schema 1.00 ."
    path.write_bytes(header.ljust(512) + b"\x89HDF\r\n\x1a\n" + bytes(100))
    fails(prepare, path, r"a\.mat: a MATLAB file of version 7\.3 \(HDF5\).*'-v7'")


def test_damaged_npz(prepare, tmp_path):
    path = tmp_path / "a.npz"
    write_silo_arrays(path, [SiloArrays("a", X[0], Y[0])])
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    fails(prepare, path, r"a\.npz: not an \.npz file, or truncated or damaged")
    # In the middle of the first array: only its checksum tells.
    path.write_bytes(content.replace(X[0].tobytes(), bytes(6)))
    fails(prepare, path, r"a\.npz: not an \.npz file, or truncated or damaged: Bad CRC-32")
    path.write_bytes(pickle.dumps([1, 2]))
    fails(prepare, path, r"a\.npz: not an \.npz file")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a/x": X[0]}, "silo 'a' needs both a/x and a/y"),
        ({"x": X[0], "y": Y[0]}, r"unexpected array 'x\.npy'; allowed are <silo>/x"),
        ({"a/x": X[0], "a/y": Y[0], "a/z": Y[0]}, r"unexpected array 'a/z\.npy'"),
        ({"a/x": cells(1, 2), "a/y": Y[0]}, "Object arrays cannot be loaded"),
        ({}, "no silo in it"),
    ],
)
def test_npz_of_another_form(prepare, tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    fails(prepare, tmp_path / "a.npz", message)


def real_data(*parts):
    root = os.environ.get("TFF_PDP_DATA")
    if not root:
        pytest.skip("TFF_PDP_DATA is not set: no folder with real data")
    return Path(root, *parts)


def test_real_school(prepare):
    """With 30% for test, the 139 schools train on 15 to 175 pupils: the sizes that Liu et al. report."""
    dataset = prepare(
        real_data("school", "school.mat"),
        input_shape=(28,),
        num_classes=0,
        label_shift=-1.0,
        label_scale=1 / 69,
        test_fraction=0.3,
        exact_split=True,
        max_bad_fraction=0.0,
    )
    manifest = dataset.manifest
    assert manifest.read == manifest.kept == Tally(139, 15_362)
    train = [counts["train"] for counts in manifest.clients.values()]
    assert (min(train), max(train)) == (15, 175)
    labels = np.concatenate([dataset.load(client, split).y for client in dataset.client_ids for split in SPLITS])
    assert (labels.dtype, labels.min(), labels.max()) == (np.float32, 0, 1)


def test_real_vehicle(prepare):
    dataset = prepare(real_data("vehicle", "mytrain.json"), input_shape=(100,), test_fraction=0.25, exact_split=True)
    manifest = dataset.manifest
    assert manifest.read == manifest.kept == Tally(23, 1_860)
    assert manifest.clients["f_00000"] == {"train": 44, "validation": 0, "test": 15}
    assert {int(y) for client in dataset.client_ids for y in dataset.load(client, "train").y} == {0, 1}
