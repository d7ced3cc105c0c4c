"""Keeps a process's temporary files in one folder, which is removed even if the process is killed.

A killed process removes nothing. The next process on the same machine that makes a folder of the same kind removes the
folders of killed ones. The lock on a file in a folder tells whether the folder's process lives: the kernel ends the
lock with the process.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

# Kinds of folders.
OF_CLUSTERS, OF_WORKERS = "tff_pdp_ray_", "tff_pdp_worker_"
_LOCK_FILE = "lock"


class TemporaryFolder:
    """A folder that only this user can read.

    Attributes:
      path: path of the folder.
    """

    def __init__(self, kind: str):
        """Makes a folder, and removes the folders of this kind whose processes were killed.

        Args:
          kind: beginning of the folder's name.
        """
        remove_left(kind)
        self.path = Path(tempfile.mkdtemp(prefix=kind))
        # Locked before it has its name, so that no other process finds it free.
        unnamed = self.path / f".{_LOCK_FILE}"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK_FILE)

    def remove(self) -> None:
        """Removes the folder with all files in it; to be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left(kind: str) -> None:
    """Removes the folders of a kind whose processes have ended; leaves folders of other users alone."""
    for path in Path(tempfile.gettempdir()).glob(f"{kind}*"):
        # Folders of other users, and folders that other processes remove at this moment.
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
