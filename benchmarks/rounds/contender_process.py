"""Runs a contender for the orchestrator: starts its process, asks, measures what it uses, and ends it for certain."""

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

from benchmarks.machine import ROOT
from benchmarks.rounds.contender import DEVICE_VARIABLE

# Number of last lines of stderr that an error's message shows.
_SHOWN_STDERR_LINES = 5


class ContenderError(Exception):
    """Error of a contender that did not answer in time; the message ends with its last lines on stderr."""


class ContenderProcess:
    """Running contender that answers one request at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float):
        """Starts the process and waits until it has imported everything.

        Args:
            command: Program and its arguments.
            environment: All environment variables of the process.
            timeout_seconds: Largest number of seconds for the start, and for every later request.

        Raises:
            ContenderError: The process does not start in time.
        """
        self._timeout_seconds = timeout_seconds
        self._stderr: IO[bytes] = tempfile.TemporaryFile(prefix="contender-")  # noqa: SIM115 - open as long as self
        # The process gets its own session: Ctrl-C reaches the orchestrator only, which then stops all contenders.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environment),
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        try:
            self.versions: dict[str, str] = self._next_answer("start")["versions"]
        except BaseException:
            self.stop()
            raise

    def ask(self, request: str, argument: Any = True) -> dict[str, Any]:
        """Sends one request (see `benchmarks.rounds.contender`) and waits for its answer.

        Raises:
            ContenderError: The process ends, gives an answer that is not JSON, or takes too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({request: argument}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # The missing answer raises a better error, with the process's last lines.
        return self._next_answer(request)

    def cpu_seconds(self) -> float:
        """Returns the user and system time so far of the process and its descendants, in steps of 10 ms."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def peak_rss_mb(self) -> float:
        """Returns the largest resident memory so far, in MB (10^6 bytes), summed over the processes alive now.

        The sum adds up each process's own peak, at any time; pages that two processes share count twice.
        """
        return sum(_peak_rss_kib(process.pid) for process in self._tree()) * 1024 / 1e6

    def stop(self) -> None:
        """Kills the process and its descendants, and waits for their end; a second call does nothing."""
        if self._stderr.closed:
            return
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # If the process has ended before, its session may still have descendants.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        psutil.wait_procs(tree, timeout=10)
        self._process.wait()
        self._stderr.close()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _next_answer(self, request: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise ContenderError(f"no answer to {request!r} within {self._timeout_seconds:g} s") from None
        if line is None:
            raise ContenderError(f"ended at {request!r} with status {self._process.wait()}: {self._last_words()}")
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            raise ContenderError(f"answered {request!r} with {line!r}") from None

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_SHOWN_STDERR_LINES:]) or "nothing on stderr"


def contender_environment(device: str = "cpu") -> dict[str, str]:
    """Returns the environment of contenders: on `cpu` with accelerators hidden, so that all compute on the same CPU.

    On `gpu`, JAX refuses to start without a GPU; contenders on other frameworks ask `contender.needs_gpu`.
    """
    if device == "cpu":
        own = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    else:
        own = {"JAX_PLATFORMS": "cuda", "CUDA_MODULE_LOADING": "LAZY"}
    return {**os.environ, **own, "TF_CPP_MIN_LOG_LEVEL": "3", DEVICE_VARIABLE: device}


def _peak_rss_kib(process_id: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0  # Already a zombie.
