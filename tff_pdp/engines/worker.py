"""Runs the C++ worker in TFF's wheel as a child process, which is stopped if it starts too late or its parent ends."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import IO

from tff_pdp.errors import EngineError

_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 1.0
_LOG_TAIL_BYTES = 2000

# Runs between fork and the worker, in a bare interpreter that the worker replaces at once. The kernel then kills the
# worker when we die, even by SIGKILL, after which none of our Python code runs. If we die before prctl, another process
# becomes the parent; the script checks that. A `preexec_fn` would do the same, but is unsafe with gRPC's threads.
_EXEC_BOUND_TO_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class WorkerProcess:
    """A running worker process, with its port and its log.

    Construct it in a thread that lives as long as the worker is needed: the kernel kills the worker at the end of the
    *thread* that forked it, not of the process.
    """

    def __init__(self, binary: pathlib.Path, flags: Sequence[str]):
        """Starts the process without waiting for it to listen.

        Raises:
            EngineError: If there is no such executable.
        """
        if not os.access(binary, os.X_OK) or binary.is_dir():
            raise EngineError(f"TFF's worker {binary} is missing or not executable: reinstall tensorflow-federated.")
        self._reservation = _reserve_port()
        self.port: int = self._reservation.getsockname()[1]
        # The worker must not inherit our output: a reader of our stdout would wait for the worker as well. The file has
        # no name, so nothing is left on disk, however this process ends.
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="tff-worker-")  # noqa: SIM115 - open as long as self
        command = [str(binary), f"--port={self.port}", *flags]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _EXEC_BOUND_TO_PARENT, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Only errors go to the log; TensorFlow's notes about CPU features would fill the tail that we show.
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            # Ctrl-C in the terminal is for us to handle; we stop the worker afterwards.
            start_new_session=True,
        )
        # Also runs when this object is collected and when the interpreter exits.
        self.stop = weakref.finalize(self, _stop, self._process, self._reservation, os.getpid())

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def wait_until_it_listens(self, timeout_seconds: float) -> None:
        """Waits until the worker accepts connections; stops the worker at the timeout.

        Raises:
            EngineError: If the worker exits, or the time is up.
        """
        deadline = time.monotonic() + timeout_seconds
        while not _listens(self.port):
            if not self.is_alive:
                raise EngineError(f"TFF's worker did not start: {self.describe_end()}")
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError(
                    f"TFF's worker was not ready within {timeout_seconds:g} s; allow more with start_timeout_seconds. "
                    f"{self._log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def describe_end(self) -> str:
        """Returns how a dead worker ended, and the last lines of its log."""
        if not self.stop.alive:
            return "it was stopped together with its engine."
        match self._process.poll():
            case None:
                status = "is still running"
            case int(number) if number < 0:
                status = f"was killed by {signal.Signals(-number).name}"
            case number:
                status = f"exited with status {number}"
        return f"it {status}. {self._log_tail()}"

    def _log_tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        return f"The end of its log:\n{tail}" if tail else "Its log is empty."


def _reserve_port() -> socket.socket:
    """Takes a free port and reserves it while the worker lives.

    The worker's gRPC server opens its port with SO_REUSEPORT: if two workers picked the same free port, both would
    start and share the connections. A bound socket that does not listen gets no connection, lets our worker (same
    user, same option) use the port, and keeps the kernel from giving the port to other processes.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes], reservation: socket.socket, owner: int) -> None:
    if os.getpid() != owner:  # A forked copy of this process must not stop the worker.
        return
    # The worker has no state to save before its end.
    process.kill()
    process.wait()
    reservation.close()
