"""A journal says what was written to it or refuses, whatever happens to its bytes."""

import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import amount
from tff_pdp import journal
from tff_pdp.errors import DataError
from tff_pdp.journal import GENESIS, Journal, head_path, read, write

LINES = [{"round": number, "what": "é\n" * number, "x": [0.1, None]} for number in range(1, 5)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "charges.jsonl"


def fill(path, lines=LINES):
    with Journal(path) as open_journal:
        for line in lines:
            open_journal.append(line)
        return open_journal.content


def test_lines_come_back_in_order_and_a_journal_goes_on_where_it_ended(path):
    assert read(path).head == GENESIS
    fill(path, LINES[:2])
    whole = fill(path, LINES[2:])
    assert read(path) == whole
    assert list(whole.lines) == LINES
    assert head_path(path).read_text() == f"{whole.head}\n"
    assert [json.loads(line)["chain"] for line in path.read_text().splitlines()] == list(whole.chains)
    assert all(whole.has_been_at(chain) for chain in (GENESIS, *whole.chains))
    assert not whole.has_been_at("1" * 64)


def test_a_whole_journal_is_as_one_that_grew(path, tmp_path):
    other = tmp_path / "other.jsonl"
    write(other, LINES)
    assert fill(path) == read(other)
    assert path.read_bytes() == other.read_bytes()


def test_a_line_lasts_before_the_head_names_it_and_both_before_append_returns(path, monkeypatch):
    flushed = []
    real = os.fsync

    def fsync(descriptor):
        real(descriptor)
        flushed.append((path.read_text().count("\n") if path.exists() else 0, head_path(path).read_text().strip()))

    with Journal(path) as open_journal:
        monkeypatch.setattr(journal.os, "fsync", fsync)
        chain = open_journal.append(LINES[0])
        assert flushed == [(1, GENESIS), (1, chain)]


def test_every_cut_is_refused_or_loses_nothing_that_was_confirmed(path):
    whole = fill(path)
    stored = path.read_bytes()
    for length in range(len(stored)):
        path.write_bytes(stored[:length])
        with pytest.raises(DataError, match=r"charges\.jsonl"):
            read(path)
    path.unlink()
    with pytest.raises(DataError, match=r"charges\.jsonl"):
        read(path)
    path.write_bytes(stored)
    assert read(path) == whole


def test_every_changed_byte_is_refused(path):
    fill(path)
    for file in (path, head_path(path)):
        stored = file.read_bytes()
        for place in range(len(stored)):
            for flip in (1, 0x80):
                file.write_bytes(stored[:place] + bytes([stored[place] ^ flip]) + stored[place + 1 :])
                with pytest.raises(DataError, match=r"charges\.(jsonl|head)"):
                    read(path)
        file.write_bytes(stored)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_a_lost_or_emptied_head_is_refused(path, damage):
    fill(path)
    damage(head_path(path))
    with pytest.raises(DataError, match=r"charges\.head is missing"):
        read(path)
    with pytest.raises(DataError, match=r"charges\.head is missing"):
        Journal(path)


def test_lines_that_change_places_or_go_are_refused(path):
    fill(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (lines[1:], lines[:1] + lines[2:], [lines[1], lines[0], *lines[2:]], [*lines, lines[-1], lines[0]]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(DataError, match=r"charges\.jsonl"):
            read(path)


@pytest.mark.parametrize("is_line_whole", [False, True])
def test_what_a_killed_writer_left_is_passed_over_and_cut_off_by_the_next(path, is_line_whole):
    """A writer that dies within `append` leaves a part of its line and the head of the line before."""
    before = fill(path, LINES[:3])
    head = head_path(path).read_bytes()
    fill(path, LINES[3:])
    stored = path.read_bytes()
    for length in range(before.num_bytes, len(stored)):
        path.write_bytes(stored[:length] if not is_line_whole else stored[:length] + b"\0" * 7 + b"\n")
        head_path(path).write_bytes(head)
        assert read(path) == before
        with Journal(path) as open_journal:
            assert open_journal.content == before
        assert path.read_bytes() == stored[: before.num_bytes]
    # The whole line, of which the head does not know yet, counts.
    path.write_bytes(stored)
    head_path(path).write_bytes(head)
    assert list(read(path).lines) == LINES
    assert list(fill(path, []).lines) == LINES
    assert head_path(path).read_bytes() != head


@pytest.mark.parametrize("number", range(4))
def test_a_full_disk_leaves_the_journal_as_it_was_and_names_the_file(path, monkeypatch, number):
    """The call of that number fails: of the line and its flush, of the head and its flush."""
    before = fill(path, LINES[:2])
    stored = path.read_bytes()
    calls = []

    def failing(real):
        def call(descriptor, content=b"", offset=0):
            calls.append(real)
            if len(calls) - 1 == number:
                if content:
                    real(descriptor, content[: len(content) // 2], offset) if number == 0 else None
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, content, offset) if content else real(descriptor)

        return call

    with Journal(path) as open_journal:
        with monkeypatch.context() as patch:
            patch.setattr(journal.os, "pwrite", failing(os.pwrite))
            patch.setattr(journal.os, "fsync", failing(os.fsync))
            with pytest.raises(OSError, match="No space left") as error:
                open_journal.append(LINES[2])
        assert error.value.filename == str(path if number < 2 else head_path(path))
    if number < 2:
        assert path.read_bytes() == stored
        assert read(path) == before
    fill(path, LINES[len(read(path).lines) :])
    assert list(read(path).lines) == LINES


_APPEND = """
import sys
from pathlib import Path
from tff_pdp.journal import Journal
print("waits", flush=True)
with Journal(Path(sys.argv[1])) as journal:
    journal.append({"writer": 2})
"""


def test_two_writers_take_turns(path):
    with Journal(path) as first:
        command = [sys.executable, "-c", _APPEND, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout.readline() == "waits\n"
            first.append({"writer": 1})
            assert second.poll() is None
            first.close()
    assert second.returncode == 0
    assert list(read(path).lines) == [{"writer": 1}, {"writer": 2}]


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
KEYS = st.text(max_size=5).filter(lambda key: key != "chain")


@settings(max_examples=amount(test=30, all=200), deadline=None, derandomize=True)
@given(line=st.dictionaries(KEYS, VALUES | st.lists(VALUES, max_size=3), max_size=4))
def test_any_plain_data_come_back(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("journal") / "any.jsonl"
    write(path, [line, line])
    assert list(read(path).lines) == [line, line]


@settings(max_examples=amount(test=60, all=500), deadline=None, derandomize=True)
@given(data=st.data())
def test_random_damage_never_yields_other_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "any.jsonl"
    write(path, LINES)
    stored = path.read_bytes()
    damaged = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        end = data.draw(st.integers(start, min(len(damaged), start + 40)))
        damaged[start:end] = data.draw(st.binary(max_size=40))
    path.write_bytes(damaged)
    try:
        assert list(read(path).lines) == LINES
    except DataError as error:
        assert "any." in str(error)
