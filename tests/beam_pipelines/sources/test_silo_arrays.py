"""The silo file: what is written comes back, the same bytes each time, and never half a file."""

import numpy as np
import pytest

from beam_pipelines.sources.silo_files import SiloArrays, read_silo_arrays, write_silo_arrays


def silos():
    x = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    yield SiloArrays("b", x, np.array([0, 1, 2, 3]), np.array([False, False, False, True]))
    yield SiloArrays("a", x.astype(np.float64), np.array([[0.5], [1], [2], [3]]))


def test_silos_come_back_in_their_order(tmp_path):
    path = tmp_path / "new" / "silos.npz"
    write_silo_arrays(path, silos())
    for written, read in zip(silos(), read_silo_arrays(path), strict=True):
        assert read.name == written.name and read.x.dtype == written.x.dtype
        np.testing.assert_array_equal(read.x, written.x)
        np.testing.assert_array_equal(read.y, written.y)
        np.testing.assert_array_equal(read.is_test, written.is_test)
    with np.load(path) as archive:
        assert set(archive) == {"b/x", "b/y", "b/is_test", "a/x", "a/y"}


def test_same_bytes_again(tmp_path):
    for name in "12":
        write_silo_arrays(tmp_path / name, silos())
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_interrupted_writing_leaves_what_was_there(tmp_path):
    path = tmp_path / "silos.npz"
    write_silo_arrays(path, silos())
    before = path.read_bytes()

    def interrupted():
        yield next(silos())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_silo_arrays(path, interrupted())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
