"""The orchestrator's side of a contender: its process, its answers, what it uses, and its certain end."""

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

# Where `-m benchmarks...` finds this package, whichever environment's Python runs it.
_SHOWN_STDERR_LINES = 5


class ContenderError(Exception):
    """A contender did not answer, or not in time; the message ends with what it last wrote to stderr."""


class ContenderProcess:
    """One running contender, asked one thing at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float):
        """Starts the process and waits until it has imported everything.

        Args:
            command: The program and its arguments.
            environment: All of its environment variables.
            timeout_seconds: How long the start, and later every request, may take.

        Raises:
            ContenderError: If it does not start in time.
        """
        self._timeout_seconds = timeout_seconds
        self._stderr: IO[bytes] = tempfile.TemporaryFile(prefix="contender-")  # noqa: SIM115 - open as long as self
        # A session of its own: Ctrl-C is for the orchestrator, which then stops all of them.
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
            ContenderError: If the process ends, answers nonsense, or takes longer than its time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({request: argument}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # What it said at its end is worth more than this error: it follows as the missing answer.
        return self._next_answer(request)

    def cpu_seconds(self) -> float:
        """User and system time so far of the process and all below it, in steps of 10 ms."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def peak_rss_mb(self) -> float:
        """Largest resident memory so far, in MB (10^6 bytes), summed over the processes alive now.

        Each process's peak counts, at whatever moment it was; pages that two processes share count twice.
        """
        return sum(_peak_rss_kib(process.pid) for process in self._tree()) * 1024 / 1e6

    def stop(self) -> None:
        """Kills the process and all below it, and waits for their end; calling it again does nothing."""
        if self._stderr.closed:
            return
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # Where it has ended before: what it left behind in its session.
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


def contender_environment() -> dict[str, str]:
    """This process's environment, with accelerators hidden: everyone computes on the same CPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**os.environ, **hidden}


def _peak_rss_kib(process_id: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0  # Already a zombie.
