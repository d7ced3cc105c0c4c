"""Starts workers as Ray actors, divides parts of the clients among them, and replaces workers that die or are slow.

A part has the same bits wherever it is computed, and may be computed several times. So nothing has to be undone: the
first answer for a part is used, and others are ignored.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions

from tff_pdp.engines.inprocess.parts import ranges
from tff_pdp.engines.ray_workers.calls import PoolOptions
from tff_pdp.engines.ray_workers.worker import Worker, settings_here
from tff_pdp.errors import EngineError

_logger = logging.getLogger(__name__)
# A range of parts is late, and also given to another worker, once it takes longer than this many times the slowest
# finished range, in seconds per part, and this many seconds more.
LATE_FACTOR, LATE_SECONDS = 2.0, 1.0
# Without a finished range to compare with, a range is late by this factor of earlier calls' time, and more seconds.
_ALONE_FACTOR, _ALONE_SECONDS = 10.0, 30.0
# A worker that is late this many times is replaced.
_LATE_TIMES = 3
_SECONDS_TO_START = 600.0
_POLL_SECONDS = 0.2
_OBJECT_STORE_BYTES = 2**30
_FAILURES = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.ActorUnavailableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
)


@dataclasses.dataclass
class _Member:
    """A worker as the head sees it."""

    number: int
    actor: Any
    ready: Any
    name: str = "starting"
    pid: int = 0
    times_late: int = 0
    busy: Any = None


@dataclasses.dataclass(frozen=True)
class _Errand:
    member: _Member
    parts: range
    started: float


class Pool:
    """Workers of one engine.

    Attributes:
      options: number and places of the workers.
    """

    def __init__(self, build_host: Callable[[], Any], options: PoolOptions):
        """Connects to Ray, and starts the workers.

        Raises:
          EngineError: Ray cannot be reached, or no worker starts.
        """
        self.options = options
        self._build_host = build_host
        self._facts: Callable[[], Any] | None = None
        self._check: Callable[[Any], str] = lambda facts: ""
        self._is_own_cluster = not ray.is_initialized()
        if self._is_own_cluster:
            _connect(options)
        self._members = [self._start(number) for number in range(options.num_workers)]
        self._seconds_per_part: dict[Any, float] = {}
        self.num_late = 0
        try:
            self._await_any()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all workers, and the Ray cluster if this pool has started it."""
        for member in self._members:
            ray.kill(member.actor)
        self._members = []
        if self._is_own_cluster:
            ray.shutdown()

    def expect(self, facts: Callable[[], Any], check: Callable[[Any], str]) -> None:
        """Sets a check that every worker must pass, now and when it is replaced.

        Args:
          facts: function that a worker calls for facts of its machine.
          check: function of these facts that returns an error; empty if there is none.

        Raises:
          EngineError: a worker does not pass.
        """
        self._facts, self._check = facts, check
        for member in self._members:
            if member.name != "starting":
                self._meet(member, ray.get(member.actor.describe.remote(facts)))

    def condition(self) -> str:
        """Describes the workers in a few words, for progress bars."""
        here = sum(member.name != "starting" for member in self._members)
        starting = len(self._members) - here
        words = [f"{here} worker{'s' * (here != 1)}"]
        words += [f"{starting} starting"] if starting else []
        words += [f"{self.num_late} late"] if self.num_late else []
        return ", ".join(words)

    def pids(self) -> list[int]:
        """Returns the process numbers of the workers that have started, on their own machines."""
        return [member.pid for member in self._members if member.name != "starting"]

    def share(self, value: Any) -> Any:
        """Puts a value into Ray's object store; returns the reference that workers read the value by."""
        return ray.put(value)

    def ask_one(self, method: str, *arguments: Any) -> Any:
        """Sends a request to one worker, and to another if the worker dies; returns the answer."""
        while True:
            member = self._await_any()[0]
            try:
                return _get(getattr(member.actor, method).remote(*arguments))
            except _FAILURES as error:
                self._replace(member, _first_line(error))

    def ask_for_parts(self, kind: Any, num_parts: int, send: Callable[[Any, range], Any]) -> list[Any]:
        """Has all parts computed; returns the answers, each for a range of parts, in the order of the parts.

        Args:
          kind: kind of the request; requests of one kind take about the same time for each part.
          num_parts: number of parts.
          send: function that sends a request about a range of parts to an actor, and returns the reference to the
            answer.

        Raises:
          Exception: the error of a request, which every worker would raise.
          EngineError: there is no worker any more, and none can be started.
        """
        members = self._await_any()
        waiting = [parts for parts in ranges(num_parts, [1.0] * len(members)) if parts]
        running: dict[Any, _Errand] = {}
        answers: dict[range, Any] = {}
        self.num_late = 0
        slowest = 0.0
        while not _has_all(answers, num_parts):
            waiting = [parts for parts in waiting if not _has(answers, parts)]
            free = [member for member in self._await_any() if self._is_free(member)]
            for member, parts in list(zip(free, waiting, strict=False)):
                waiting.remove(parts)
                reference = member.busy = send(member.actor, parts)
                running[reference] = _Errand(member, parts, time.monotonic())
            if not running:
                time.sleep(_POLL_SECONDS)
                continue
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
            for reference in ready:
                errand = running.pop(reference)
                try:
                    answers[errand.parts] = _get(reference)
                except _FAILURES as error:
                    self._replace(errand.member, _first_line(error))
                    if not _is_running(running, errand.parts) and errand.parts not in waiting:
                        waiting.append(errand.parts)
                    continue
                slowest = max(slowest, (time.monotonic() - errand.started) / len(errand.parts))
            if not ready:
                waiting += self._late(kind, running, waiting, slowest)
        self._remember(kind, slowest)
        return [answers[parts] for parts in _cover(answers, num_parts)]

    def _late(self, kind: Any, running: Mapping[Any, _Errand], waiting: Sequence[range], slowest: float) -> list[range]:
        """Returns ranges that are late and that another worker should compute as well."""
        earlier = self._seconds_per_part.get(kind)
        now = time.monotonic()
        late = []
        for errand in running.values():
            size = len(errand.parts)
            if slowest:
                limit = LATE_SECONDS + LATE_FACTOR * slowest * size
            elif earlier is not None:
                limit = _ALONE_SECONDS + _ALONE_FACTOR * earlier * size
            else:
                continue
            copies = sum(other.parts == errand.parts for other in running.values())
            if now - errand.started > limit and copies == 1 and errand.parts not in waiting:
                errand.member.times_late += 1
                self.num_late += 1
                late.append(errand.parts)
                _logger.warning("%s is late: its clients are also given to another worker", errand.member.name)
                if errand.member.times_late >= _LATE_TIMES or len(self._members) == 1:
                    self._replace(errand.member, "it was late several times")
        return late

    def _remember(self, kind: Any, seconds: float) -> None:
        known = self._seconds_per_part.get(kind)
        self._seconds_per_part[kind] = seconds if known is None else statistics.fmean([known, seconds])

    def _is_free(self, member: _Member) -> bool:
        if member.busy is not None:
            ready, _ = ray.wait([member.busy], timeout=0)
            if not ready:
                return False
            member.busy = None
        return True

    def _start(self, number: int) -> _Member:
        options = self.options
        remote: Any = ray.remote(Worker)
        actor = remote.options(
            num_cpus=options.cpus_per_worker, num_gpus=options.gpus_per_worker, max_restarts=0, max_task_retries=0
        ).remote(self._build_host, options.device, options.cpus_per_worker, settings_here())
        return _Member(number, actor, actor.describe.remote(self._facts))

    def _await_any(self) -> list[_Member]:
        """Returns the workers that have started, in the order of their numbers; waits for the first.

        Raises:
          EngineError: no worker starts.
        """
        deadline = time.monotonic() + _SECONDS_TO_START
        while True:
            for member in [member for member in self._members if member.name == "starting"]:
                ready, _ = ray.wait([member.ready], timeout=0)
                if ready:
                    try:
                        self._meet(member, _get(member.ready))
                    except _FAILURES as error:
                        self._replace(member, _first_line(error))
            started = [member for member in self._members if member.name != "starting"]
            if started:
                return started
            if time.monotonic() > deadline:
                raise EngineError(
                    f"No worker has started within {_SECONDS_TO_START:.0f} seconds: the Ray cluster has "
                    f"{ray.available_resources()} left, and a worker needs {self.options.cpus_per_worker} CPUs and "
                    f"{self.options.gpus_per_worker:g} GPUs"
                )
            time.sleep(_POLL_SECONDS)

    def _meet(self, member: _Member, description: tuple[int, str, Any]) -> None:
        member.pid, node, facts = description
        if self._facts is not None:
            if facts is None:
                facts = ray.get(member.actor.describe.remote(self._facts))[2]
            if error := self._check(facts):
                raise EngineError(f"worker {member.number} on {node}: {error}")
        member.name = f"worker {member.number} on {node}"

    def _replace(self, member: _Member, reason: str) -> None:
        if member in self._members:
            _logger.warning("%s is replaced: %s", member.name, reason)
            ray.kill(member.actor)
            self._members[self._members.index(member)] = self._start(member.number)


def _connect(options: PoolOptions) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if options.address:
            ray.init(address=options.address, **quiet)
        else:
            # More workers than cores are for trials.
            ray.init(
                _node_ip_address="127.0.0.1",
                num_cpus=options.num_workers * options.cpus_per_worker,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                _system_config={"enable_metrics_collection": False},
                **quiet,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = options.address or "this machine"
        raise EngineError(f"Ray cannot be used at {where}: {_first_line(error)}") from error


def _get(reference: Any) -> Any:
    """Returns an answer, or raises the worker's own error."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, BaseException) else error) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _has(answers: Mapping[range, Any], parts: range) -> bool:
    return any(known.start <= parts.start and parts.stop <= known.stop for known in answers)


def _is_running(running: Mapping[Any, _Errand], parts: range) -> bool:
    return any(errand.parts == parts for errand in running.values())


def _cover(answers: Mapping[range, Any], num_parts: int) -> list[range]:
    """Returns ranges with answers that contain all parts once, in order; fewer if there are parts without an answer."""
    chosen, reached = [], 0
    for parts in sorted(answers, key=lambda parts: (parts.start, parts.stop)):
        if parts.start == reached and parts.stop > reached:
            chosen.append(parts)
            reached = parts.stop
    return chosen if reached == num_parts else []


def _has_all(answers: Mapping[range, Any], num_parts: int) -> bool:
    return bool(_cover(answers, num_parts)) or not num_parts
