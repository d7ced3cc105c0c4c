"""States that workers write and read as files: whole or refused, by the index of a round, on any file system."""

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.far_values import ResultValues
from tff_pdp.errors import DataError
from tff_pdp.training.client_store.state_files import StateFiles

DEFAULT = {"weights": {"kernel": np.array([1.0, 2.0], np.float32)}, "steps": np.int32(3)}
TYPE = _tff.to_type(
    _tff.StructWithPythonType(
        [
            ("weights", _tff.StructWithPythonType([("kernel", _tff.TensorType(np.float32, [2]))], dict)),
            ("steps", _tff.TensorType(np.int32)),
        ],
        dict,
    )
)


def columns(*numbers):
    kernel = np.array([[number, -number] for number in numbers], np.float32)
    return {"weights": {"kernel": kernel}, "steps": np.array(numbers, np.int32)}


def kept_at_workers(numbers, parts):
    """Results that two workers store, each a part of the clients."""

    def keep(writer):
        for part, positions in enumerate(parts):
            of_part = columns(*np.array(numbers)[positions])
            writer.write(part, [of_part["weights"]["kernel"], of_part["steps"]])
        return [np.array(positions) for positions in parts]

    return ResultValues(TYPE, np.arange(len(numbers)), bring=lambda rows: None, keep=keep)


@pytest.fixture(params=["", "memory://states"])
def root(request):
    yield request.param
    if request.param:
        import fsspec

        fsspec.filesystem("memory").rm("/states", recursive=True)


def steps(store, places=range(4)):
    return store.read(list(places))["steps"].tolist()


def test_states_are_the_default_until_they_are_written(tmp_path, root):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4, root=root)
    assert steps(store) == [3, 3, 3, 3]
    written = store.write(1, [2, 0, 1], kept_at_workers([20, 0, 10], [[0, 2], [1]]))
    assert steps(written) == [0, 10, 20, 3]
    np.testing.assert_array_equal(written.read([2])["weights"]["kernel"], [[20, -20]])
    # A store is the states after one round, and stays so.
    assert steps(store) == [3, 3, 3, 3]


def test_values_of_this_process_are_written_as_well(tmp_path, root):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4, root=root)
    store = store.write(1, [3, 1], ClientValues.from_columns(TYPE, columns(30, 10)))
    assert steps(store) == [3, 10, 3, 30]


def test_descriptions_are_read_where_they_are_used(tmp_path, root):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4, root=root)
    store = store.write(1, [3, 1], kept_at_workers([30, 10], [[0], [1]]))
    described = store.describe([1, 2, 3], TYPE).select([2, 0])
    read = described.recipe.load(None, described.rows, TYPE)
    assert [int(state["steps"]) for state in read] == [30, 10]
    assert [int(state["steps"]) for state in described] == [30, 10]


def test_a_saved_round_is_opened_again_and_later_rounds_are_gone(tmp_path, root):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4, root=root)
    for number in (1, 2, 3):
        store = store.write(number, [number], kept_at_workers([number], [[0]]))
        if number < 3:
            store.save()
    again = StateFiles.open(tmp_path / "states")
    assert (again.round_number, steps(again)) == (2, [3, 1, 2, 3])
    assert steps(StateFiles.open(tmp_path / "states", 1)) == [3, 1, 3, 3]
    with pytest.raises(DataError, match="no states of round 3"):
        StateFiles.open(tmp_path / "states", 3)


def test_only_files_that_a_kept_round_needs_stay(tmp_path):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4)
    for number in (1, 2, 3):
        store = store.write(number, [0, number], kept_at_workers([number, 10 * number], [[0], [1]]))
        store.save()
    store.prune(3)
    names = sorted(path.name for path in (tmp_path / "states").glob("*.states"))
    # Client 0 has its newest state of round 3; clients 1 and 2 of rounds 1 and 2.
    assert names == [f"round_{number:06d}_000_{part:05d}.states" for number, part in ((1, 1), (2, 1), (3, 0), (3, 1))]
    assert steps(StateFiles.open(tmp_path / "states")) == [3, 10, 20, 30]
    with pytest.raises(DataError, match="no states of round 2"):
        StateFiles.open(tmp_path / "states", 2)


def test_rounds_drawn_anew_have_files_of_their_own(tmp_path):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4)
    first = store.write(1, [0], kept_at_workers([1], [[0]]))
    anew = StateFiles.open(tmp_path / "states", 0, attempt=1).write(1, [0], kept_at_workers([9], [[0]]))
    # A worker of the earlier attempt that writes late changes nothing.
    assert (steps(first, [0]), steps(anew, [0])) == ([1], [9])


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4)
    store = store.write(1, [0, 1], kept_at_workers([1, 2], [[0, 1]]))
    (path,) = (tmp_path / "states").glob("*.states")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(content if damage == "bit" else content[:-3])
    with pytest.raises(DataError, match=path.name):
        store.read([0, 1])


def test_a_swapped_row_and_a_damaged_index_are_refused(tmp_path):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4).write(1, [0, 1], kept_at_workers([1, 2], [[0, 1]]))
    store.save()
    (path,) = (tmp_path / "states").glob("*.states")
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[half:] + content[:half])
    with pytest.raises(DataError, match="damaged"):
        store.read([0])
    index = tmp_path / "states" / "index_000001.bin"
    index.write_bytes(index.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match="index_000001"):
        StateFiles.open(tmp_path / "states")


def test_files_can_be_read_by_the_owner_alone(tmp_path):
    store = StateFiles.create(tmp_path / "states", DEFAULT, 4).write(1, [0], kept_at_workers([1], [[0]]))
    (path,) = store.folder.glob("*.states")
    assert path.stat().st_mode & 0o077 == 0
    assert store.folder.stat().st_mode & 0o077 == 0


def test_states_without_content_take_no_file(tmp_path):
    store = StateFiles.create(tmp_path / "states", {}, 4).write(1, [0], kept_at_workers([1], [[0]]))
    assert not list(store.folder.glob("*.states"))
    assert tf.nest.flatten(store.read([0, 1])) == []
