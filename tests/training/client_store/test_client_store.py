import collections
import contextlib
import itertools
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_pdp.errors import DataError
from tff_pdp.training.client_store.store import ClientStore

DTYPES = [
    np.dtype(name)
    for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8")
]


def number(value):
    """The smallest state that is not empty."""
    return collections.OrderedDict(x=np.array(value, np.int64))


def numbers(values):
    return {"x": np.array(values, np.int64)}


def read_numbers(store, places=None):
    return store.read(range(store.num_clients) if places is None else places)["x"].tolist()


def assert_same_bits(actual, expected):
    assert type(actual) is collections.OrderedDict
    assert list(actual) == list(expected)
    for key, member in expected.items():
        if isinstance(member, dict):
            assert_same_bits(actual[key], member)
        else:
            assert (actual[key].dtype, actual[key].shape) == (member.dtype, member.shape)
            assert actual[key].tobytes() == member.tobytes()


@pytest.fixture
def store(tmp_path):
    with ClientStore.create(tmp_path / "store", number(-1), 10, num_shards=3) as store:
        write_rounds(store)
        yield store


def write_rounds(store):
    store.write(1, range(6), numbers(range(10, 16)))
    store.write(3, [5, 0, 2], numbers([35, 30, 32]))
    store.write(4, [2, 3], numbers([42, 43]))


# What `read` gives of all clients after each of these rounds.
ROUNDS = {
    0: [-1] * 10,
    1: [10, 11, 12, 13, 14, 15, -1, -1, -1, -1],
    2: [10, 11, 12, 13, 14, 15, -1, -1, -1, -1],
    3: [30, 11, 32, 13, 14, 35, -1, -1, -1, -1],
    4: [30, 11, 42, 43, 14, 35, -1, -1, -1, -1],
}


def test_all_kinds_of_values_come_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    random = {dtype.str: np.frombuffer(rng.bytes(5 * 6 * dtype.itemsize), dtype).reshape(5, 2, 3) for dtype in DTYPES}
    random["|b1"] = rng.integers(0, 2, [5, 2, 3]).astype(bool)
    nan_with_payload = np.array([0x7FC12345, 0xFFC00001, 0x7F800001, 0x80000000, 1], np.uint32).view(np.float32)
    columns = collections.OrderedDict(
        random=collections.OrderedDict(random),
        special=np.array([np.nan, -np.nan, -0.0, np.inf, 5e-324]),
        scalar=nan_with_payload,
        flag=np.array([True, False, True, True, False]),
        empty=collections.OrderedDict(none=collections.OrderedDict(), nothing=np.zeros([5, 0, 3], np.float32)),
        strided=np.arange(60, dtype=np.int32).reshape(5, 4, 3).transpose(0, 2, 1),
        last=np.arange(5, dtype=np.float64),
    )
    default = _row(columns, 4)
    with ClientStore.create(tmp_path / "store", default, 100, num_shards=2) as store:
        store.write(1, [7, 3, 0, 99], _rows(columns, [0, 1, 2, 3]))
        assert_same_bits(store.read([7, 3, 0, 99, 50]), columns)
    with ClientStore.open(tmp_path / "store") as store:
        order = [3, 99, 3, 50, 7, 0]
        assert_same_bits(store.read(order), _rows(columns, [1, 3, 1, 4, 0, 2]))
        assert_same_bits(store.read([]), _rows(columns, []))
        alone = store.read([99])
        assert_same_bits(alone, _rows(columns, [3]))
        assert alone["special"].flags.aligned and alone["special"].flags.writeable


def _rows(columns, rows):
    """Those rows of a nest of columns."""
    if isinstance(columns, dict):
        return collections.OrderedDict((key, _rows(member, rows)) for key, member in columns.items())
    return np.ascontiguousarray(columns[rows])


def _row(columns, row):
    if isinstance(columns, dict):
        return collections.OrderedDict((key, _row(member, row)) for key, member in columns.items())
    return columns[row]


def test_what_was_read_or_written_is_no_part_of_the_store(store):
    columns = numbers([1])
    store.write(5, [0], columns)
    columns["x"][0] = 2
    first = store.read([0, 9])
    first["x"][:] = 3
    assert read_numbers(store, [0, 9]) == [1, -1]


def test_keys_may_come_in_any_order(tmp_path):
    default = collections.OrderedDict(b=np.float32(0), a=np.float32(0))
    with ClientStore.create(tmp_path / "store", default, 2) as store:
        store.write(1, [1], {"a": np.array([1], np.float32), "b": np.array([2], np.float32)})
        assert_same_bits(store.read([1]), {"b": np.array([2], np.float32), "a": np.array([1], np.float32)})


def test_a_state_may_be_empty_or_a_single_array(tmp_path):
    with ClientStore.create(tmp_path / "empty", collections.OrderedDict(), 3) as store:
        assert store.read([0, 1]) == {}
        store.write(1, [0, 1], {})
        assert store.round_number == 1
    with ClientStore.open(tmp_path / "empty") as store:
        assert store.read([2]) == {}
    with ClientStore.create(tmp_path / "array", np.zeros(2), 3) as store:
        store.write(1, [2], np.ones([1, 2]))
        np.testing.assert_array_equal(store.read([1, 2]), [[0, 0], [1, 1]])


def test_a_round_counts_from_when_it_is_written(store):
    assert store.round_number == 4
    assert read_numbers(store) == ROUNDS[4]
    store.write(np.int64(9), np.array([9]), numbers([99]))
    store.write(10, [], numbers([]))
    assert store.round_number == 10
    assert read_numbers(store) == [*ROUNDS[4][:9], 99]


@pytest.mark.parametrize(
    "columns, message",
    [
        ([1, 2], "columns: expected a mapping, not a list"),
        ({"y": np.zeros(2, np.int64)}, r"columns: expected the members \['x'\], not \['y'\]"),
        ({"x": {"y": np.zeros(2, np.int64)}}, "columns/x: expected an array, not a dict"),
        ({"x": np.zeros(2, np.int32)}, r"columns/x: expected int64 \[2\], not int32 \[2\]"),
        ({"x": np.zeros(2, ">i8")}, r"columns/x: expected int64 \[2\], not >i8 \[2\]"),
        ({"x": np.zeros(3, np.int64)}, r"columns/x: expected int64 \[2\], not int64 \[3\]"),
        ({"x": np.zeros([2, 1], np.int64)}, r"columns/x: expected int64 \[2\], not int64 \[2, 1\]"),
    ],
)
def test_columns_that_are_no_states_are_refused(store, columns, message):
    with pytest.raises(TypeError, match=message):
        store.write(5, [0, 1], columns)
    assert store.round_number == 4


def test_places_and_rounds_that_cannot_be_are_refused(store):
    with pytest.raises(ValueError, match=r"places occur more than once: \[3, 8\]"):
        store.write(5, [3, 8, 1, 8, 3], numbers(range(5)))
    for place in (-1, 10):
        with pytest.raises(ValueError, match=rf"clients' places must be 0 to 9, not \[{place}\]"):
            store.read([0, place])
        with pytest.raises(ValueError, match="0 to 9"):
            store.write(5, [place], numbers([0]))
    with pytest.raises(TypeError, match="integer"):
        store.read([0.5])
    for round_number in (0, 4):
        with pytest.raises(ValueError, match=f"round {round_number} is not later than the store's round 4"):
            store.write(round_number, [0], numbers([0]))
    assert read_numbers(store) == ROUNDS[4]


@pytest.mark.parametrize(
    "default, message",
    [
        ({"x": [1.0]}, "state/x: .* not of a list"),
        ({"x": np.array(["a"])}, "state/x: .* not of <U1"),
        ({"x": {"y": object()}}, "state/x/y: .* not of object"),
        ({1: np.zeros(2)}, r"state: keys .* not \[1\]"),
    ],
)
def test_defaults_that_cannot_be_kept_are_refused(tmp_path, default, message):
    with pytest.raises(TypeError, match=message):
        ClientStore.create(tmp_path / "store", default, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_clients, num_shards", [(0, 8), (3, 0)])
def test_a_store_has_clients_and_shards(tmp_path, num_clients, num_shards):
    with pytest.raises(ValueError, match="num_clients and num_shards must be at least 1"):
        ClientStore.create(tmp_path / "store", number(0), num_clients, num_shards=num_shards)


def test_rewinding_forgets_later_rounds(store):
    store.rewind(7)
    assert (store.round_number, read_numbers(store)) == (4, ROUNDS[4])
    store.rewind(3)
    assert (store.round_number, read_numbers(store)) == (3, ROUNDS[3])
    store.rewind(2)
    assert (store.round_number, read_numbers(store)) == (2, ROUNDS[2])
    store.write(3, [0], numbers([300]))
    assert read_numbers(store) == [300, *ROUNDS[1][1:]]
    store.rewind(0)
    assert (store.round_number, read_numbers(store)) == (0, ROUNDS[0])
    store.close()
    assert count_versions(store.folder) == 0


@pytest.mark.parametrize("oldest, kept", [(0, 11), (1, 11), (2, 11), (3, 8), (4, 6), (99, 6)])
def test_pruning_keeps_what_returning_needs(store, oldest, kept):
    store.prune(oldest)
    store.close()
    assert count_versions(store.folder) == kept
    oldest = min(oldest, 4)
    with ClientStore.open(store.folder) as store:
        with pytest.raises(DataError, match=f"store: cannot return to round {oldest - 1}: .* before round {oldest}"):
            store.rewind(oldest - 1)
        for round_number in range(4, oldest - 1, -1):
            store.rewind(round_number)
            assert (store.round_number, read_numbers(store)) == (round_number, ROUNDS[round_number])


def test_pruning_goes_on_where_it_ended(store):
    store.prune(3)
    store.prune(1)
    with pytest.raises(DataError, match="before round 3"):
        store.rewind(2)
    store.write(6, [0, 1], numbers([60, 61]))
    store.prune(6)
    assert read_numbers(store) == [60, 61, *ROUNDS[4][2:]]
    store.close()
    assert count_versions(store.folder) == 6


def count_versions(folder):
    """Rows in the files of a store that is closed."""
    count = 0
    for path in folder.glob("shard_*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            count += connection.execute("SELECT count(*) FROM states").fetchone()[0]
    return count


operations = st.one_of(
    st.tuples(
        st.just("write"), st.integers(1, 3), st.dictionaries(st.integers(0, 6), st.integers(-(2**63), 2**63 - 1))
    ),
    st.tuples(st.just("rewind"), st.integers(-1, 4)),
    st.tuples(st.just("prune"), st.integers(-2, 4)),
    st.just(("reopen",)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(operations, max_size=25))
def test_any_sequence_of_operations_is_as_on_a_list_of_all_rounds(sequence):
    with tempfile.TemporaryDirectory() as folder:
        store = ClientStore.create(Path(folder) / "store", number(0), 7, num_shards=2)
        rounds, oldest = {0: dict.fromkeys(range(7), 0)}, 0
        for name, *arguments in sequence:
            newest = max(rounds)
            if name == "write":
                gap, states = arguments
                store.write(newest + gap, list(states), numbers(list(states.values())))
                rounds |= {number: rounds[newest] for number in range(newest + 1, newest + gap)}
                rounds[newest + gap] = rounds[newest] | states
            elif name == "rewind":
                target = newest - arguments[0]
                if target < oldest:
                    with pytest.raises(DataError, match="cannot return"):
                        store.rewind(target)
                else:
                    store.rewind(target)
                    rounds = {number: states for number, states in rounds.items() if number <= target}
            elif name == "prune":
                target = newest - arguments[0]
                store.prune(target)
                oldest = max(oldest, min(target, newest))
            else:
                store.close()
                store = ClientStore.open(store.folder)
            assert store.round_number == max(rounds)
            assert read_numbers(store) == [rounds[max(rounds)][place] for place in range(7)]
        store.prune(max(rounds))
        store.close()
        # No more than one version of a client is left.
        assert count_versions(store.folder) <= 7


# Copies the store in the folder given once for each instant, opens the copy and does what is asked for; the process is
# killed before the first SQL statement, the second, and so on, until it comes to its end.
KILLED = """
import itertools, os, shutil, signal, sqlite3, sys
from pathlib import Path
import numpy as np
from tff_pdp.training.client_store.store import ClientStore

def connect(*arguments, _connect=sqlite3.connect, **settings):
    connection = _connect(*arguments, **settings)
    connection.set_trace_callback(count_down)
    return connection

def count_down(statement):
    global remaining
    remaining -= 1
    if remaining < 0:
        os.kill(os.getpid(), signal.SIGKILL)

sqlite3.connect = connect
operations = {
    "write": lambda store: store.write(5, [1, 9, 3, 8], {"x": np.array([51, 59, 53, 58])}),
    "rewind": lambda store: store.rewind(1),
    "prune": lambda store: store.prune(3),
}
template = Path(sys.argv[1])
for name, operate in operations.items():
    for instant in itertools.count():
        folder = template.with_name(f"{name}_{instant}")
        shutil.copytree(template, folder)
        child = os.fork()
        if not child:
            remaining = 10**9
            store = ClientStore.open(folder)
            remaining = instant
            operate(store)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            break
    assert os.WEXITSTATUS(status) == 0 and "tensorflow" not in sys.modules
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A function that gives the folders of stores whose process was killed in an operation, one for each instant."""
    folder = tmp_path_factory.mktemp("killed")
    with ClientStore.create(folder / "template", number(-1), 10, num_shards=3) as store:
        write_rounds(store)
    subprocess.run([sys.executable, "-c", KILLED, folder / "template"], check=True)
    return lambda operation: list(folder.glob(f"{operation}_*"))


def test_a_round_is_there_in_whole_or_not_at_all_when_the_process_is_killed(killed):
    written = [30, 51, 42, 53, 14, 35, -1, -1, 58, 59]
    seen = collections.Counter()
    for folder in killed("write"):
        with ClientStore.open(folder) as store:
            round_number = store.round_number
            assert read_numbers(store) == {4: ROUNDS[4], 5: written}[round_number]
        assert count_versions(folder) == {4: 11, 5: 15}[round_number]
        seen[round_number] += 1
    assert seen[5] == 1 and seen[4] > 3 * 5


def test_rewinding_is_done_in_whole_or_not_at_all_when_the_process_is_killed(killed):
    seen = collections.Counter()
    for folder in killed("rewind"):
        with ClientStore.open(folder) as store:
            seen[store.round_number] += 1
            assert read_numbers(store) == ROUNDS[store.round_number]
    assert set(seen) == {1, 4}


def test_pruning_loses_nothing_and_is_made_up_for_when_the_process_is_killed(killed):
    for folder in killed("prune"):
        # A round of which something may be missing is refused.
        with ClientStore.open(shutil.copytree(folder, folder.with_name(f"returned_{folder.name}"))) as store:
            with contextlib.suppress(DataError):
                store.rewind(2)
            assert read_numbers(store) == ROUNDS[store.round_number]
        with ClientStore.open(folder) as store:
            assert read_numbers(store) == ROUNDS[4]
            store.prune(3)
        assert count_versions(folder) == 8
        with ClientStore.open(folder) as store:
            store.rewind(3)
            assert read_numbers(store) == ROUNDS[3]


@pytest.fixture
def connections(monkeypatch):
    """The connections that are opened in a test, by the name of their file."""
    opened = {}

    def connect(name, _connect=sqlite3.connect, **arguments):
        connection = _connect(name, **arguments)
        opened[Path(name.partition("?")[0]).name] = connection
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    return opened


def test_a_full_disk_changes_nothing_and_the_round_can_be_written_later(tmp_path, connections):
    def states(value, count):
        return np.full([count, 10_000], value, np.float32)

    with ClientStore.create(tmp_path / "store", states(0, 1)[0], 6, num_shards=2) as store:
        store.write(1, [0, 1], states(1, 2))
        second = connections["shard_001.sqlite"]
        (pages,) = second.execute("PRAGMA page_count").fetchone()
        second.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(DataError, match=r"shard_001.sqlite: .* full"):
            store.write(2, [0, 1, 2, 3], states(2, 4))
        assert store.round_number == 1
        np.testing.assert_array_equal(store.read(range(6))[:, 0], [1, 1, 0, 0, 0, 0])
        second.execute("PRAGMA max_page_count = 1000000")
        store.write(3, [3, 4], states(3, 2))
        np.testing.assert_array_equal(store.read(range(6))[:, 0], [1, 1, 0, 3, 3, 0])
        store.write(4, [2], states(4, 1))
        np.testing.assert_array_equal(store.read(range(6))[:, 0], [1, 1, 4, 3, 3, 0])


def test_work_does_not_grow_with_the_number_of_clients(tmp_path, connections):
    def count_steps(written):
        # SQLite calls back once for each step of its virtual machine, so a pass over all rows would show.
        steps = itertools.count()
        folder = tmp_path / str(written)
        with ClientStore.create(folder, number(0), 10**9, num_shards=2) as store:
            store.write(1, range(written), numbers(range(written)))
            store.prune(1)
        with ClientStore.open(folder) as store:
            for connection in connections.values():
                connection.set_progress_handler(lambda: next(steps) and None, 1)
            for round_number in range(2, 5):
                store.write(round_number, [3, 0, 10], numbers([1, 2, 3]))
                assert read_numbers(store, [3, 0, 10, 10**9 - 1]) == [1, 2, 3, 0]
            store.prune(3)
            store.rewind(3)
        return next(steps)

    assert count_steps(20) == count_steps(2000) > 100


def test_clients_who_were_never_written_take_no_space(tmp_path):
    def size(num_clients):
        folder = tmp_path / str(num_clients)
        ClientStore.create(folder, number(0), num_clients).close()
        return sum(path.stat().st_size for path in folder.iterdir())

    assert size(1) == size(10**12)


def test_only_the_owner_can_read(tmp_path):
    mask = os.umask(0)
    try:
        with ClientStore.create(tmp_path / "store", number(0), 3, num_shards=2) as store:
            store.write(1, [0, 1], numbers([1, 2]))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()}
    finally:
        os.umask(mask)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    # Three databases, each with its journal.
    assert list(modes.values()) == [0o600] * 6


def test_a_store_is_not_made_twice(store):
    store.close()
    with pytest.raises(DataError, match="store exists already"):
        ClientStore.create(store.folder, number(5), 10)
    with ClientStore.open(store.folder) as store:
        assert read_numbers(store) == ROUNDS[4]


def test_what_an_interrupted_creation_has_left_does_not_matter(tmp_path):
    unfinished = tmp_path / ".store.tmp"
    unfinished.mkdir()
    (unfinished / "shard_000.sqlite").touch()
    with pytest.raises(DataError, match="store: there is no client store"):
        ClientStore.open(tmp_path / "store")
    with pytest.raises(DataError, match="none that was finished"):
        ClientStore.open(unfinished)
    ClientStore.create(tmp_path / "store", number(0), 3).close()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_is_open_once_at_a_time(store):
    with pytest.raises(DataError, match=r"store.sqlite: .* in use by another process"):
        ClientStore.open(store.folder)
    assert read_numbers(store) == ROUNDS[4]
    store.close()
    store.close()
    with pytest.raises(ValueError, match="store: the client store is closed"):
        store.read([0])
    ClientStore.open(store.folder).close()


def test_a_folder_may_move(store, tmp_path):
    store.close()
    odd = tmp_path / "?a=%20#ü"
    store.folder.rename(odd)
    with ClientStore.open(odd) as store:
        assert read_numbers(store) == ROUNDS[4]


def test_another_thread_reads_whole_rounds(tmp_path):
    with ClientStore.create(tmp_path / "store", number(0), 20, num_shards=4) as store:
        seen, done = [], threading.Event()

        def keep_reading():
            while not done.is_set():
                seen.append(read_numbers(store))

        reader = threading.Thread(target=keep_reading)
        reader.start()
        for round_number in range(1, 21):
            store.write(round_number, range(20), numbers([round_number] * 20))
        done.set()
        reader.join()
    assert seen == sorted(seen) and all(len(set(values)) == 1 for values in seen)


def overwrite(path):
    path.write_bytes(b"no database" * 1000)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [overwrite, truncate, empty, Path.unlink])
@pytest.mark.parametrize("name", ["store.sqlite", "shard_001.sqlite"])
def test_a_damaged_file_is_named(store, damage, name):
    store.close()
    damage(store.folder / name)
    # Where there is no record of a store, there is none.
    expected = "there is no client store" if damage is Path.unlink and name == "store.sqlite" else name
    with pytest.raises(DataError, match=expected):
        ClientStore.open(store.folder)


def test_a_state_that_has_changed_is_not_given_out(tmp_path):
    states = np.arange(5, dtype=np.int64)[:, np.newaxis] + 0x0123456789ABCDE0
    with ClientStore.create(tmp_path / "store", states[4], 4, num_shards=2) as store:
        store.write(1, range(4), states[:4])
    flip(store.folder / "shard_001.sqlite", states[3].tobytes())
    with ClientStore.open(store.folder) as store:
        np.testing.assert_array_equal(store.read([2, 1]), states[[2, 1]])
        with pytest.raises(DataError, match=r"shard_001.sqlite: client 3: the state is damaged"):
            store.read([2, 3])
    flip(store.folder / "store.sqlite", states[4].tobytes())
    with pytest.raises(DataError, match=r"store.sqlite: the client store is damaged \(its checksum differs\)"):
        ClientStore.open(store.folder)


def flip(path, part):
    whole = path.read_bytes()
    assert whole.count(part) == 1
    path.write_bytes(whole.replace(part, part[:-1] + bytes([part[-1] ^ 1])))


@pytest.mark.parametrize(
    "change, message",
    [("format_version = 7", "format 7; only 2 and below can be read"), ("layout = '{\"x\": 1}'", "damaged")],
)
def test_contents_that_are_not_understood_are_refused(store, change, message):
    store.close()
    with contextlib.closing(sqlite3.connect(store.folder / "store.sqlite")) as connection, connection:
        connection.execute(f"UPDATE store SET {change}")
    with pytest.raises(DataError, match=rf"store.sqlite: .*{message}"):
        ClientStore.open(store.folder)
