import collections
import contextlib
import random
import shutil
import sqlite3

import numpy as np
import pytest

from tests.tiers import amount
from tests.training.client_store.format_1 import FILES
from tff_pdp.errors import DataError
from tff_pdp.training.client_store.store import ClientStore

NUM_CLIENTS = 300


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a store that trained: some clients with several versions, some without any, some pages free."""
    rng = np.random.default_rng(0)
    default = collections.OrderedDict(x=np.arange(40, dtype=np.float32))
    with ClientStore.create(tmp_path_factory.mktemp("written") / "store", default, NUM_CLIENTS, num_shards=2) as store:
        for round_number in range(1, 13):
            places = rng.choice(NUM_CLIENTS, 40, replace=False)
            store.write(round_number, places, {"x": rng.standard_normal([40, 40], np.float32)})
            store.prune(round_number - 2)
    return store.folder


def everything(folder):
    """All that a store says, as of its round and as of the one before."""
    with ClientStore.open(folder) as store:
        found = [store.num_clients, store.round_number]
        for round_number in (store.round_number, store.round_number - 1):
            store.rewind(round_number)
            found += [store.round_number, store.read(range(store.num_clients))["x"].tobytes()]
    return found


@pytest.mark.parametrize("name", ["store.sqlite", "shard_001.sqlite"])
def test_a_changed_byte_is_refused_by_name_or_without_effect(written, tmp_path, name):
    expected = everything(shutil.copytree(written, tmp_path / "whole"))
    content = (written / name).read_bytes()
    generator = random.Random(name)
    in_use = [position for position, byte in enumerate(content) if byte]
    refused = 0
    for number in range(amount(test=250, all=1_000)):
        # Most bytes of a page are free; nine of ten changes are where something is written.
        position = generator.choice(in_use) if number % 10 else generator.randrange(len(content))
        folder = shutil.copytree(written, tmp_path / "changed")
        changed = bytearray(content)
        changed[position] ^= generator.choice([1 << generator.randrange(8), generator.randrange(1, 256)])
        (folder / name).write_bytes(changed)
        try:
            assert everything(folder) == expected, position
        except DataError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
            refused += 1
        shutil.rmtree(folder)
    # Part of what is in use was superseded or deleted, and nobody reads it.
    assert refused > 0.4 * number


@pytest.mark.parametrize(
    "change",
    [
        "place = (SELECT min(place) + 2 FROM states WHERE place + 2 NOT IN (SELECT place FROM states))",
        "round_number = 11.5",
        "state = zeroblob(length(state))",
        "checksum = checksum + 1",
    ],
)
def test_each_state_is_bound_to_its_client_and_round(written, tmp_path, change):
    folder = shutil.copytree(written, tmp_path / "store")
    # Changed through SQLite, so that indexes agree with tables, and the checksum alone can tell.
    with contextlib.closing(sqlite3.connect(folder / "shard_000.sqlite")) as connection, connection:
        newest = "(SELECT rowid FROM states WHERE round_number = 12 LIMIT 1)"
        connection.execute(f"UPDATE states SET {change} WHERE rowid = {newest}")
    with ClientStore.open(folder) as store, pytest.raises(DataError, match=r"shard_000.*client \d+: .* damaged"):
        store.read(range(NUM_CLIENTS))


@pytest.mark.parametrize("column", ["num_clients", "num_shards", "layout", "default_state"])
def test_a_store_whose_description_was_changed_is_refused(written, tmp_path, column):
    folder = shutil.copytree(written, tmp_path / "store")
    changed = {"layout": "replace(layout, '40', '20')", "default_state": "zeroblob(160)"}
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as connection, connection:
        connection.execute(f"UPDATE store SET {column} = {changed.get(column, f'{column} - 1')}")
    with pytest.raises(DataError, match=r"store.sqlite: the client store is damaged"):
        ClientStore.open(folder)


@pytest.mark.parametrize("column", ["round_number", "oldest_round"])
def test_a_store_whose_round_was_changed_is_refused(written, tmp_path, column):
    folder = shutil.copytree(written, tmp_path / "store")
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as connection, connection:
        connection.execute(f"UPDATE progress SET {column} = {column} - 1")
    with pytest.raises(DataError, match=r"store.sqlite: the round number is damaged"):
        ClientStore.open(folder)


def test_a_missing_entry_of_an_index_is_not_read_as_a_client_without_a_state(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "store")
    with contextlib.closing(sqlite3.connect(folder / "shard_000.sqlite")) as connection, connection:
        definition = "name = 'states_by_place'"
        (sql,) = connection.execute(f"SELECT sql FROM sqlite_master WHERE {definition}").fetchone()
        # An index that was made for a part of the table, and says that it is of the whole.
        connection.execute("DROP INDEX states_by_place")
        connection.execute(f"{sql} WHERE place <> 4")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(f"UPDATE sqlite_master SET sql = ? WHERE {definition}", (sql,))
    with pytest.raises(DataError, match=r"shard_000.sqlite: .*missing from index states_by_place"):
        ClientStore.open(folder)


def test_text_that_is_none_is_refused_by_name(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "store")
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as connection, connection:
        connection.execute("UPDATE store SET layout = CAST(x'ff' AS TEXT)")
    with pytest.raises(DataError, match=r"store.sqlite: "):
        ClientStore.open(folder)


@pytest.fixture
def former(tmp_path):
    folder = tmp_path / "former"
    folder.mkdir()
    for name, sql in FILES.items():
        with contextlib.closing(sqlite3.connect(folder / name)) as connection:
            connection.executescript(sql)
    return folder


def test_a_store_of_the_former_format_goes_on_and_is_protected_from_then_on(former):
    expected = [30, 11, 42, 43, 14, 35, -1, -1, -1, -1]
    with ClientStore.open(former) as store:
        assert (store.round_number, store.read(range(10))["x"].tolist()) == (4, expected)
        store.write(5, [0, 1], {"x": np.array([50, 51])})
        store.prune(4)
        store.rewind(4)
    with ClientStore.open(former) as store:
        assert store.read(range(10))["x"].tolist() == expected
        with pytest.raises(DataError, match="before round 4"):
            store.rewind(3)
    with contextlib.closing(sqlite3.connect(former / "store.sqlite")) as connection, connection:
        connection.execute("UPDATE progress SET round_number = 3")
    with pytest.raises(DataError, match="round number is damaged"):
        ClientStore.open(former)


def test_a_store_does_not_pass_for_one_of_the_former_format(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "store")
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as connection, connection:
        connection.execute("UPDATE store SET format_version = 1")
    with pytest.raises(DataError, match=r"store.sqlite: the client store is damaged"):
        ClientStore.open(folder)
