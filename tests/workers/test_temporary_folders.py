"""Temporary files of workers and heads go with their process, and those of a killed process with the next one."""

import os
import signal
import subprocess
import sys

import pytest

from tff_pdp.engines.ray_workers.temporary_folders import TemporaryFolder

# Prints the folder's path, and waits for the end of its input.
PROGRAM = """
import sys
from tff_pdp.engines.ray_workers.temporary_folders import TemporaryFolder
folder = TemporaryFolder("kind_")
(folder.path / "file").write_text("content")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other():
    """Another process with a folder of its own."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_folder_is_for_its_user_alone_and_is_removed(temporary):
    folder = TemporaryFolder("kind_")
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").write_text("content")
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_a_killed_processs_folder_is_removed_and_a_living_ones_is_not(temporary, other):
    (of_other,) = temporary.iterdir()
    unrelated = TemporaryFolder("another_kind_")
    first = TemporaryFolder("kind_")
    assert set(temporary.iterdir()) == {of_other, unrelated.path, first.path}
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    second = TemporaryFolder("kind_")
    assert set(temporary.iterdir()) == {unrelated.path, first.path, second.path}
    for folder in (unrelated, first, second):
        folder.remove()


def test_what_is_no_folder_of_a_process_stays(temporary):
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (temporary / "kind_link").symlink_to(elsewhere)
    (temporary / "kind_file").touch()
    (temporary / "kind_without_lock").mkdir()
    TemporaryFolder("kind_").remove()
    assert (elsewhere / "lock").exists()
    assert (temporary / "kind_file").exists() and (temporary / "kind_without_lock").exists()
