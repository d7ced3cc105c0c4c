"""One command writes to a folder at a time."""

import os
import subprocess
import sys

import pytest

from tff_pdp.errors import DataError
from tff_pdp.lock import Writer, lock_path, only_writer, writer_of

_HOLD = """
import sys, time
from pathlib import Path
from tff_pdp.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_is_told_the_process_and_the_folder(tmp_path):
    folder = tmp_path / "output" / "mr_mtl"
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(DataError, match=f"^process {process.pid} writes to {folder}: wait") as error,
            only_writer(folder),
        ):
            raise AssertionError("two writers")
        assert "\n" not in str(error.value)
        with only_writer(folder.with_name("fed_avg")):
            pass
        process.kill()
    # However the first one ended, the folder is free.
    with only_writer(folder):
        assert lock_path(folder).read_text() == f"{os.getpid()}\n"


def test_the_folder_may_be_replaced_under_the_lock(tmp_path):
    folder = tmp_path / "mr_mtl"
    folder.mkdir()
    with only_writer(folder):
        folder.rename(tmp_path / "old")
        folder.mkdir()
        with pytest.raises(DataError, match=f"process {os.getpid()} writes"), only_writer(folder):
            pass


def test_a_link_has_the_lock_of_its_folder_and_one_that_outlasts_the_link(tmp_path):
    real, link = tmp_path / "one" / "mr_mtl", tmp_path / "other" / "mr_mtl"
    real.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(real)
    with only_writer(real), pytest.raises(DataError, match=f"writes to {link}: wait"), only_writer(link):
        pass
    with only_writer(link):
        with pytest.raises(DataError, match=f"writes to {real}: wait"), only_writer(real):
            pass
        link.unlink()
        link.mkdir()
        with pytest.raises(DataError, match=f"writes to {link}: wait"), only_writer(link):
            pass
    with only_writer(link), only_writer(real):
        pass


def test_a_link_to_itself_is_refused_in_one_line(tmp_path):
    link = tmp_path / "mr_mtl"
    link.symlink_to(link)
    with pytest.raises(DataError, match=f"^{link} is a link that leads to itself: remove the link$"), only_writer(link):
        pass


def test_a_full_disk_keeps_the_lock(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with only_writer(tmp_path / "a"), pytest.raises(DataError, match="not known"), only_writer(tmp_path / "a"):
        pass


def test_a_reader_is_told_who_writes_and_who_was_killed(tmp_path):
    folder = tmp_path / "mr_mtl"
    assert writer_of(folder) == Writer(False, None, None)
    assert not lock_path(folder).exists()
    with only_writer(folder):
        held = writer_of(folder)
        assert (held.holds_lock, held.process) == (True, os.getpid())
        assert held.since == lock_path(folder).stat().st_mtime
    # Given back, by whatever end of the block.
    assert writer_of(folder) == Writer(False, None, None)
    with pytest.raises(RuntimeError), only_writer(folder):
        raise RuntimeError
    assert writer_of(folder) == Writer(False, None, None)
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        process.kill()
    killed = writer_of(folder)
    assert (killed.holds_lock, killed.process) == (False, process.pid)
