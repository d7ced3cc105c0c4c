"""A small disk that a test fills up: a tmpfs, which the system grants to administrators alone."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEGABYTES = 64


class SmallDisk:
    """A mounted disk.

    Attributes:
      path: where it is mounted.
    """

    def __init__(self, path: Path):
        self.path = path
        self._ballast = path / ".ballast"

    def leave(self, kilobytes: int) -> None:
        """Fills the disk but for this much."""
        self._ballast.write_bytes(b"")
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        with open(self._ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - 1024 * kilobytes)

    def make_room(self) -> None:
        """Empties what `leave` filled."""
        self._ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of its own for one test; where none can be mounted, the test is skipped."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_MEGABYTES}m", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command `mount`: no disk to fill up")
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], timeout=30, check=True)
