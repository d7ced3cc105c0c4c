"""A store is checked without a change to it, and nothing that its own reader would return otherwise passes."""

import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.tiers import amount
from tff_pdp.errors import DataError
from tff_pdp.training.client_store.inspection import inspect_store
from tff_pdp.training.client_store.store import ClientStore

PLACES = [0, 1, 3, 5, 8]


@pytest.fixture
def folder(tmp_path):
    """A store of nine clients, of whom five were written in rounds 1 and 3."""
    place = tmp_path / "client_states"
    with ClientStore.create(place, {"w": np.zeros(40, np.float32)}, 9, num_shards=3) as store:
        for number in (1, 3):
            rows = np.arange(200, dtype=np.float32).reshape(5, 40) + number
            store.write(number, PLACES, {"w": rows})
    return place


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_whole_store_is_counted_and_not_touched(folder):
    before = contents(folder)
    found = inspect_store(folder)
    assert (found.num_clients, found.round_number, found.oldest_round, found.num_states) == (9, 3, 0, 10)
    assert not (found.num_left or found.was_interrupted or found.is_old)
    assert contents(folder) == before


def test_nothing_that_reads_otherwise_passes(folder, tmp_path):
    """Random bytes of used pages are changed; what passes, the store reads as before."""
    with ClientStore.open(folder) as store:
        expected = store.read(range(9))["w"]
    whole = contents(folder)
    used = [
        (name, place)
        for name, stored in whole.items()
        for place in range(len(stored))
        if stored[place] or stored[place - 8 : place + 8].strip(b"\0")
    ]
    draw, refused = random.Random(0), 0
    tried = amount(test=60, all=600)
    for name, place in draw.choices(used, k=tried):
        stored = whole[name]
        (folder / name).write_bytes(
            stored[:place] + bytes([stored[place] ^ (1 << draw.randrange(8))]) + stored[place + 1 :]
        )
        try:
            inspect_store(folder)
        except DataError as error:
            assert str(folder) in str(error)
            refused += 1
        else:
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            with ClientStore.open(copy) as store:
                assert (store.num_clients, store.round_number) == (9, 3)
                np.testing.assert_array_equal(store.read(range(9))["w"], expected)
        (folder / name).write_bytes(stored)
    assert refused > tried / 4


def test_a_missing_file_and_one_that_is_in_use_are_named(folder):
    with ClientStore.open(folder), pytest.raises(DataError, match="in use"):
        inspect_store(folder)
    (folder / "shard_001.sqlite").unlink()
    with pytest.raises(DataError, match=r"shard_001\.sqlite is missing"):
        inspect_store(folder)


@pytest.mark.parametrize("statement", ["os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_an_interrupted_round_is_told_and_left_to_the_next_writer(folder, statement):
    """Killed after one shard has the round, and within the transaction of another."""
    program = (
        "import os, sys, numpy as np; from pathlib import Path\n"
        "from tff_pdp.training.client_store import shard\n"
        "from tff_pdp.training.client_store.store import ClientStore\n"
        "store = ClientStore.open(Path(sys.argv[1]))\n"
        "whole, count = shard.checksum, 0\n"
        "def dying(*arguments):\n"
        "    global count\n"
        "    count += 1\n"
        f"    if count == 6: {statement}\n"
        "    return whole(*arguments)\n"
        "shard.checksum = dying\n"
        "store.write(5, [0, 3, 1, 2, 4, 5, 7], {'w': np.ones((7, 40), np.float32)})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], env=os.environ, timeout=60, check=False)
    before = contents(folder)
    found = inspect_store(folder)
    assert (found.round_number, found.num_states, found.num_left) == (3, 10, 5)
    assert contents(folder) == before
    ClientStore.open(folder).close()
    assert inspect_store(folder).num_left == 0


def test_a_transaction_that_a_power_cut_interrupted_is_undone_in_a_copy(folder):
    """The journal of SQLite still lies there, and has what the pages were."""
    program = (
        "import sqlite3, sys, os\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('PRAGMA cache_size = 1')\n"
        "connection.execute('PRAGMA cache_spill = 1')\n"
        "connection.execute('BEGIN')\n"
        "for _ in range(200):\n"
        "    connection.execute('INSERT INTO states SELECT place, round_number + 9 * (SELECT max(rowid) FROM states)'\n"
        "                       ', state, checksum FROM states LIMIT 5')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = folder / "shard_000.sqlite"
    subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert (folder / "shard_000.sqlite-journal").stat().st_size
    before = contents(folder)
    found = inspect_store(folder)
    assert (found.was_interrupted, found.num_states, found.num_left) == (True, 10, 0)
    assert contents(folder) == before
    ClientStore.open(folder).close()
    assert not inspect_store(folder).was_interrupted
