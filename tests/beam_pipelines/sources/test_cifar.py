"""Reading CIFAR-10 and CIFAR-100: archives, folders, and damaged or dangerous files."""

import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from beam_pipelines.sources.cifar import read_cifar10, read_cifar100
from tests.beam_pipelines.sources.raw_images import cifar10_batch, write_cifar10, write_cifar100
from tff_pdp.errors import DataError


def write_archive(folder, path):
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"cifar-10-batches-py/{file.name}")
    return path


@pytest.mark.parametrize("archived", [False, True])
def test_batches_in_a_folder_or_in_the_archive(tmp_path, archived):
    folder, train, test = write_cifar10(tmp_path / "batches")
    (folder / "batches.meta").write_bytes(b"not read")
    source = write_archive(folder, tmp_path / "cifar.tar.gz") if archived else folder
    cifar10 = read_cifar10(str(source))
    np.testing.assert_array_equal(cifar10.train.x, train)
    np.testing.assert_array_equal(cifar10.test.x, test)
    assert cifar10.train.x.dtype == np.uint8 and cifar10.train.y.dtype == np.int64
    assert cifar10.train.y.tolist() == [*range(10)] * 10 and cifar10.test.y.tolist() == [*range(10)] * 3
    names = [file["name"] for file in cifar10.origin]
    assert names == (["cifar.tar.gz"] if archived else ["data_batch_1", "data_batch_2", "test_batch"])


def test_a_pickle_written_by_python_2(tmp_path):
    """Python 2 wrote bytes as protocol 2's strings, which today's pickle module does not write any more."""
    folder, train, _ = write_cifar10(tmp_path, train=(1, 1))

    def string(content):
        return b"T" + len(content).to_bytes(4, "little") + content

    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n(I1\nI3072\nt"
    array += b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\n"
    array += string(train[0].transpose(2, 0, 1).tobytes())
    (folder / "data_batch_1").write_bytes(b"\x80\x02}(U\x04data" + array + b"tbU\x06labels](I7\neu.")
    cifar10 = read_cifar10(str(folder))
    np.testing.assert_array_equal(cifar10.train.x[0], train[0])
    assert cifar10.train.y.tolist() == [7, 0]


class Dangerous:
    def __reduce__(self):
        return (os.mkdir, ("made_by_a_pickle",))


def test_a_pickle_may_not_name_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _, _ = write_cifar10(tmp_path / "batches")
    batch, _ = cifar10_batch(0, 3)
    (folder / "data_batch_1").write_bytes(pickle.dumps({**batch, b"more": Dangerous()}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_1: not a batch.*posix\.mkdir, which is not allowed"):
        read_cifar10(str(folder))
    assert not Path("made_by_a_pickle").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": np.zeros((3, 3072), np.float32)}, "the array's data are not unsigned bytes"),
        ({b"data": np.zeros((3, 100), np.uint8)}, "cannot reshape array"),
        ({b"data": [1, 2]}, "has no attribute 'to_numpy'"),
        ({b"labels": [1, 2]}, "each image needs one label"),
        ({b"labels": [1, 2, 10]}, "an integer from 0 to 9"),
        ({b"labels": [1, 2, 0.5]}, "an integer from 0 to 9"),
    ],
)
def test_batches_of_another_form(tmp_path, change, message):
    folder, _, _ = write_cifar10(tmp_path)
    (folder / "test_batch").write_bytes(pickle.dumps({**cifar10_batch(0, 3)[0], **change}, protocol=2))
    with pytest.raises(DataError, match=rf"test_batch: .*{message}"):
        read_cifar10(str(folder))


def test_truncated_and_missing(tmp_path):
    folder, _, _ = write_cifar10(tmp_path / "batches")
    path = write_archive(folder, tmp_path / "cifar.tar.gz")
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(DataError, match=r"cifar\.tar\.gz: not a tar archive, or truncated or damaged"):
        read_cifar10(str(path))
    (folder / "data_batch_2").write_bytes((folder / "data_batch_2").read_bytes()[:5000])
    with pytest.raises(DataError, match="data_batch_2: not a batch of CIFAR-10, truncated or damaged"):
        read_cifar10(str(folder))
    for name in ("data_batch_1", "data_batch_2"):
        (folder / name).unlink()
    with pytest.raises(DataError, match=r"no data_batch_\\d\+ in it"):
        read_cifar10(str(folder))
    with pytest.raises(DataError, match=r"no such file or folder; .* data.kind tfds reads CIFAR of TensorFlow"):
        read_cifar10(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("archived", [False, True])
def test_cifar100_has_its_fine_labels(tmp_path, archived):
    folder, train, test = write_cifar100(tmp_path / "batches")
    (folder / "meta").write_bytes(b"not read")
    source = write_archive(folder, tmp_path / "cifar.tar.gz") if archived else folder
    cifar100 = read_cifar100(str(source))
    np.testing.assert_array_equal(cifar100.train.x, train)
    np.testing.assert_array_equal(cifar100.test.x, test)
    assert cifar100.train.y.tolist() == [*range(100)] * 2 and cifar100.test.y.tolist() == [*range(100)]
    assert cifar100.num_classes == 100
    message = r"no data_batch_\\d\+ in it; data.input must be the python version of CIFAR-10$"
    with pytest.raises(DataError, match=message):
        read_cifar10(str(source))


def test_real_subsets(real_data):
    cifar10 = read_cifar10(str(real_data / "cifar10" / "cifar-10-python-subset.tar.gz"))
    cifar100 = read_cifar100(str(real_data / "cifar100" / "cifar-100-python-subset.tar.gz"))
    for dataset in (cifar10, cifar100):
        assert dataset.train.x.shape == (8000, 32, 32, 3) and dataset.test.x.shape == (2000, 32, 32, 3)
        assert set(dataset.train.y) == set(dataset.test.y) == set(range(dataset.num_classes))
