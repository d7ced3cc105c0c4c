"""Runs jobs side by side in worker processes; if a process dies, only its own job fails.

Ctrl-C and SIGTERM raise no exception at an arbitrary moment: this module waits for workers and signals together.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which SIGINT and SIGTERM only make `descriptor` readable; a signal takes effect at the end.

    An exception that a signal raises at an arbitrary moment can be lost: Python ignores exceptions in destructors and
    in callbacks of weak references. Also, a signal that arrives just before a system call, after Python last checked
    for signals, does not end that call. Waiting for a descriptor has neither problem.

    Signals that the process ignores stay ignored. Python delivers signals only to the main thread.

    Attributes:
      descriptor: file descriptor that is readable from a signal's arrival until `received` is read.
    """

    def __init__(self):
        """Opens the descriptor."""
        self._received: int | None = None
        self._descriptors, self._handlers = contextlib.ExitStack(), contextlib.ExitStack()
        self.descriptor, self._written = os.pipe()
        for descriptor in (self.descriptor, self._written):
            os.set_blocking(descriptor, False)
            self._descriptors.callback(os.close, descriptor)

    @property
    def received(self) -> int | None:
        """The first signal that has arrived, or None."""
        with contextlib.suppress(BlockingIOError):
            # A byte for each signal that Python has a handler for, such as one for another size of the terminal.
            numbers = [number for number in os.read(self.descriptor, 1024) if number in _SIGNALS]
            self._received = self._received or next(iter(numbers), None)
        return self._received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
            self._descriptors.callback(signal.set_wakeup_fd, before)
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    # Python writes to the descriptor only for signals with a handler in Python.
                    self._handlers.callback(signal.signal, number, signal.signal(number, _do_nothing))
        return self

    def __exit__(self, *error: object) -> None:
        with self._descriptors:
            # First, so that no signal falls between the last look and the old handler.
            self._handlers.close()
            received = self.received
        if received is not None:
            signal.raise_signal(received)


def _do_nothing(number: int, frame: object) -> None:
    del number, frame


_SECONDS_TO_END = 5.0


class Finished(NamedTuple):
    """A finished job.

    Attributes:
      job: the job.
      result: result of the runner; None if the runner raised or its process died.
      error: traceback, or exit status of the process; empty on success.
    """

    job: Any
    result: Any
    error: str


# Called once in each worker process: builds the function that runs jobs there, one after the other. A function with a
# method `close`, such as `JobRunner`, is closed when there are no more jobs.
BuildRunner = Callable[[], Callable[[Any], Any]]


def run_jobs(
    jobs: Sequence[Any], build_runner: BuildRunner, num_workers: int, log_file: Path
) -> Generator[Finished, None, None]:
    """Runs jobs in worker processes, and yields each as it finishes.

    The processes end if the iterator is closed, for instance by an exception in the loop over it. They also end on
    Ctrl-C and SIGTERM. After the processes have ended, the signal takes its usual effect in this function, and never in
    the body of the loop.

    Args:
      jobs: picklable jobs, each with a `group` that is equal for jobs that share preparations. Jobs start in about this
        order; jobs of a group are run by one worker unless that leaves a worker idle.
      build_runner: picklable function; see `BuildRunner`.
      num_workers: largest number of processes at a time.
      log_file: file to which the workers' output is appended, with Python's warnings and TensorFlow's messages.
    """
    waiting = list(jobs)
    workers: list[_Worker] = []
    with StopSignals() as stop:
        try:
            for _ in range(min(num_workers, len(waiting))):
                workers.append(_Worker(build_runner, log_file))
            for worker in workers:
                worker.start(_take(waiting, worker, workers))
            while any(worker.job is not None for worker in workers):
                ready = _wait(workers, stop)
                if stop.received is not None:
                    return
                for worker in ready:
                    finished = worker.finish()
                    if waiting and not worker.process.is_alive():
                        _end([worker])
                        workers[workers.index(worker)] = worker = _Worker(build_runner, log_file)
                    if waiting:
                        worker.start(_take(waiting, worker, workers))
                    yield finished
        finally:
            _end(workers)


def _take(waiting: list[Any], worker: "_Worker", workers: Sequence["_Worker"]) -> Any:
    """Takes the next job for a worker: a job of the worker's group, or of a group without a worker, or any."""
    busy = {other.group for other in workers if other is not worker and other.job is not None}
    places = range(len(waiting))
    own = (place for place in places if waiting[place].group == worker.group)
    free = (place for place in places if waiting[place].group not in busy)
    return waiting.pop(next(own, next(free, 0)))


def _wait(workers: Sequence["_Worker"], stop: StopSignals) -> list["_Worker"]:
    """Waits for workers that have finished a job or died; may return none if a signal has arrived."""
    busy = [worker for worker in workers if worker.job is not None]
    ready = connection.wait([stop.descriptor, *(worker.pipe for worker in busy)])
    return [worker for worker in busy if worker.pipe in ready]


def _end(workers: Sequence["_Worker"]) -> None:
    """Ends all processes within the time limit for one."""
    for worker in workers:
        worker.leave()
    deadline = time.monotonic() + _SECONDS_TO_END
    for worker in workers:
        worker.end(max(0.0, deadline - time.monotonic()))


class _Worker:
    """One process and the job it is at."""

    def __init__(self, build_runner: BuildRunner, log_file: Path):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.job: Any = None
        self.group: Any = None
        # Not forked: TensorFlow's threads would not survive it.
        self.process = context.Process(target=_serve, args=(theirs, build_runner, str(log_file)), daemon=True)
        self.process.start()
        # Only the worker holds its end now, so that its death closes the pipe.
        theirs.close()

    def start(self, job: Any) -> None:
        self.job, self.group = job, job.group
        with contextlib.suppress(OSError):
            # A process that is dead already is noticed when its answer is waited for.
            self.pipe.send(job)

    def finish(self) -> Finished:
        job, self.job = self.job, None
        try:
            result, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_SECONDS_TO_END)
            return Finished(job, None, f"its process ended with status {self.process.exitcode}")
        return Finished(job, result, error)

    def leave(self) -> None:
        # An idle process ends by itself when its pipe is closed.
        self.pipe.close()
        if self.job is not None:
            self.process.terminate()

    def end(self, seconds: float) -> None:
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _end_with_parent() -> None:
    """Ends this process, even in the middle of a job, once the parent process has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _serve(pipe: Connection, build_runner: BuildRunner, log_file: str) -> None:
    """Takes jobs from the pipe until it is closed: a worker's whole life."""
    # Ctrl-C reaches all processes of the terminal; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    run: Callable[[Any], Any] | None = None
    try:
        while True:
            try:
                job = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                run = run or build_runner()
                answer = (run(job), "")
            except Exception:
                answer = (None, traceback.format_exc())
            try:
                pipe.send(answer)
            except OSError:
                return
    finally:
        # An engine may have workers and files of its own.
        if close := getattr(run, "close", None):
            close()
