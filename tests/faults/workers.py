"""Commands in processes that a test may kill: forked from one that has imported TensorFlow, each costs seconds.

The process that forks runs no operation of TensorFlow, whose threads a fork would lose. With `forks=False` commands
run in that process itself, one after the other, which may keep what they compile.
"""

import contextlib
import dataclasses
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

KILLED = -signal.SIGKILL
_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Fault:
    """Describes faults of the calls of a process that change files below a folder.

    Attributes:
      folder: all other files are left alone.
      at: number of the call, from 1; 0 for none.
      kind: as in `fault.c`: n, k, t, o or s.
      log: where each call is written down; empty for nowhere.
    """

    folder: str
    at: int = 0
    kind: str = "n"
    log: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """A command of `tff-pdp`.

    Attributes:
      arguments: of the command line.
      draws: log of draws.
      label: decides the key; see `tests.faults.draws`.
      said: a file for what the command says on standard error.
      hold: see `tests.faults.draws`.
      fault: what happens to its files.
    """

    arguments: Sequence[str]
    draws: str
    label: str
    said: str
    hold: str = ""
    fault: Mapping[str, Any] | None = None


class Workers:
    """A process that runs commands; a context manager."""

    def __init__(self, calibrations: Path, *, library: Path | None = None, forks: bool = True):
        """Starts the process, without waiting for it.

        Args:
          calibrations: a folder of what accountants have computed before.
          library: `fault.c`, compiled.
          forks: whether each command has a process of its own.
        """
        preload = {} if library is None else {"LD_PRELOAD": str(library)}
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(calibrations), "forks" if forks else "stays"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), **preload},
        )

    def start(self, job: Job) -> int:
        """Starts a command in a process of its own, and returns the process's number."""
        return self._ask({"start": dataclasses.asdict(job)})

    def wait(self, process: int) -> int:
        """Waits until a command has ended: its exit status, or minus the signal that ended it."""
        return self._ask({"wait": process})

    def run(self, job: Job) -> int:
        """Runs a command to its end, in a process of its own if there are any."""
        return self._ask({"run": dataclasses.asdict(job)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, question: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _SECONDS)
        assert ready, f"no answer to {question}"
        answer = self._process.stdout.readline()
        assert answer, f"the process ended at {question}"
        return int(answer)


def run_command(job: Job) -> int:
    """Runs a command in this process: its exit status."""
    from tests.faults.draws import watching
    from tff_pdp import cli

    hold = Path(job.hold) if job.hold else None
    said = io.StringIO()
    with (
        watching(Path(job.draws), job.label, hold),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        _under_fault(job.fault),
    ):
        try:
            return cli.main(list(job.arguments))
        except BaseException:
            import traceback

            traceback.print_exc()
            return 1
        finally:
            Path(job.said).write_text(said.getvalue())


@contextlib.contextmanager
def _under_fault(fault: Mapping[str, Any] | None):
    if fault is None:
        yield
        return
    import ctypes

    layer = ctypes.CDLL(None)
    own = Fault(**fault)
    layer.fault_arm(own.folder.encode(), own.log.encode(), ctypes.c_long(own.at), ctypes.c_char(own.kind.encode()))
    try:
        yield
    finally:
        layer.fault_arm(b"", b"", ctypes.c_long(0), ctypes.c_char(b"n"))


class StandIn:
    """Stands for the process that verifies exports: a second import of TensorFlow for each would take all the time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def verify(self, *_: object, **__: object) -> None:
        pass


def _serve(calibrations: Path, forks: bool) -> None:
    """Answers questions until there are no more."""
    import pytest

    from serving.export import exporter
    from tests.faults import draws  # noqa: F401
    from tests.kept import keeping_runs, look_up_calibrations
    from tff_pdp.personal_models.new_clients import personalize

    assert personalize
    patch = pytest.MonkeyPatch()
    look_up_calibrations(calibrations, patch)
    patch.setattr(exporter, "FreshProcess", StandIn)
    with contextlib.ExitStack() as stack:
        if not forks:
            stack.enter_context(keeping_runs({}, stack, {}, patch))
        # Answers alone go there.
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        for line in sys.stdin:
            print(_answer(json.loads(line), forks), file=answers, flush=True)


def _answer(question: Mapping[str, Any], forks: bool) -> int:
    if "wait" in question:
        _, status = os.waitpid(question["wait"], 0)
        return os.waitstatus_to_exitcode(status)
    job = Job(**question.get("run", question.get("start")))
    if not forks:
        return run_command(job)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = run_command(job)
        finally:
            os._exit(status)
    return child if "start" in question else _answer({"wait": child}, forks)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2] == "forks")
