"""Starts workers as Ray actors, divides parts of the clients among them, and replaces workers that die or are slow.

A part has the same bits wherever it is computed, and may be computed several times. So nothing has to be undone: the
first answer for a part is used, and others are ignored.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray import cloudpickle

from tff_pdp.engines.devices import are_operations_deterministic
from tff_pdp.engines.inprocess.parts import ranges
from tff_pdp.engines.ray_workers.calls import PoolOptions
from tff_pdp.engines.ray_workers.temporary_folders import OF_CLUSTERS, OF_WORKERS, TemporaryFolder, remove_left
from tff_pdp.engines.ray_workers.worker import Worker, settings_here
from tff_pdp.errors import EngineError

_logger = logging.getLogger(__name__)
# A range of parts is late, and also given to another worker, once it takes longer than this many times the slowest
# finished range, in seconds per part, and this many seconds more.
LATE_FACTOR, LATE_SECONDS = 2.0, 1.0
# Without a finished range to compare with, a range is late by this factor of earlier calls' time, and more seconds; in
# the first call, in which workers trace computations, after this many seconds.
_ALONE_FACTOR, _ALONE_SECONDS, _FIRST_SECONDS = 10.0, 30.0, 900.0
# A worker that is late this many times, or has not answered for this long, is replaced.
_LATE_TIMES, _HUNG_SECONDS = 3, 60.0
# Workers that die one after the other over the same parts, or before they have started, have a cause in common.
_MOST_DEATHS, _MOST_FAILED_STARTS = 5, 3
_SECONDS_TO_START, _SECONDS_TO_END = 600.0, 2.0
_POLL_SECONDS = 0.2
_OBJECT_STORE_BYTES = 2**30
# Answers of up to 4 MiB come in the message itself: for sums of a small model faster than through the object store.
SYSTEM_CONFIG = {"enable_metrics_collection": False, "max_direct_call_object_size": 2**22}
_FAILURES = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.ActorUnavailableError,
    ray.exceptions.GetTimeoutError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.WorkerCrashedError,
)


@dataclasses.dataclass(eq=False)
class _Member:
    """A worker as the head sees it.

    Attributes:
      number: number of the worker, which its replacement gets as well.
      actor: Ray's handle.
      ready: reference to the worker's description of itself.
      described_by: function for facts of the worker's machine, which the description has.
      nodes: the nodes that lived when the worker was started.
      name: number and node, once the worker has started.
      pid: number of the process on its node.
      times_late: number of times that the worker was late.
      busy: reference to the last answer that the worker owes; None if there is none.
      busy_since: time of that request.
    """

    number: int
    actor: Any
    ready: Any
    described_by: Any
    nodes: frozenset[str]
    name: str = ""
    pid: int = 0
    times_late: int = 0
    busy: Any = None
    busy_since: float = 0.0


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
        self._seconds_per_part: dict[Any, float] = {}
        self._failed_starts = self._num_late = self._num_replaced = 0
        self._is_connected_here = not ray.is_initialized()
        self._folder = _connect(options) if self._is_connected_here else None
        self._members = [self._start(number) for number in range(options.num_workers)]
        try:
            self._await_any()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all workers, and the Ray cluster if this pool has started it; a second call does nothing."""
        ending = [member.actor.end.remote() for member in self._members if member.name and self._is_free(member)]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_SECONDS_TO_END)
        for member in self._members:
            ray.kill(member.actor)
        self._members = []
        if self._is_connected_here:
            ray.shutdown()
            self._is_connected_here = False
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
            # Those of workers that were busy at the end.
            remove_left(OF_WORKERS)

    def expect(self, facts: Callable[[], Any], check: Callable[[Any], str]) -> None:
        """Sets a check that every worker must pass, now and when it is replaced; see `Engine.expect`."""
        self._facts, self._check = facts, check
        for member in [member for member in self._members if member.name]:
            self._ask_again(member)
        self._await_any()

    def facts(self, find: Callable[[], Any]) -> Any:
        """Returns facts of one worker's machine."""
        return self.ask_one("describe", find)[2]

    def condition(self) -> str:
        """Describes the workers, and what has happened since the last call, in a few words for progress bars."""
        here = len(self.pids())
        starting = len(self._members) - here
        words = [f"{here} worker{'s' * (here != 1)}"]
        words += [f"{starting} starting"] if starting else []
        words += [f"{self._num_late} late"] if self._num_late else []
        words += [f"{self._num_replaced} replaced"] if self._num_replaced else []
        self._num_late = self._num_replaced = 0
        return ", ".join(words)

    def pids(self) -> list[int]:
        """Returns the process numbers of the workers that have started, on their own machines."""
        return [member.pid for member in self._members if member.name]

    def share(self, value: Any) -> Any:
        """Puts a value into Ray's object store; returns the reference that workers read the value by."""
        return ray.put(value)

    def ask_one(self, method: str, *arguments: Any) -> Any:
        """Sends a request to one worker, and to another if the worker dies; returns the answer.

        Raises:
          EngineError: several workers have died over the request, one after the other.
        """
        for _ in range(_MOST_DEATHS):
            member = self._await_any()[0]
            try:
                return _get(getattr(member.actor, method).remote(*arguments), _FIRST_SECONDS)
            except _FAILURES as error:
                cause = _cause(error)
                self._replace(member, cause)
        raise EngineError(f"{_MOST_DEATHS} workers have died over the same request: {cause}")

    def ask_for_parts(self, kind: Any, num_parts: int, send: Callable[[Any, range], Any]) -> list[Any]:
        """Has all parts computed; returns the answers, each for a range of parts, in the order of the parts.

        Args:
          kind: kind of the request; requests of one kind take about the same time for each part.
          num_parts: number of parts.
          send: function that sends a request about a range of parts to an actor, and returns the reference to the
            answer.

        Raises:
          Exception: the error of a request, which every worker would raise.
          EngineError: several workers have died over the same parts, or no worker starts.
        """
        members = self._await_any()
        waiting = [parts for parts in ranges(num_parts, [1.0] * len(members)) if parts]
        running: dict[Any, _Errand] = {}
        answers: dict[range, Any] = {}
        deaths: collections.Counter[range] = collections.Counter()
        slowest = 0.0
        while not _cover(answers, num_parts):
            waiting = [parts for parts in waiting if not _has(answers, parts)]
            free = [member for member in self._await_any() if self._is_free(member)]
            for member, parts in list(zip(free, waiting, strict=False)):
                waiting.remove(parts)
                reference = member.busy = send(member.actor, parts)
                member.busy_since = time.monotonic()
                running[reference] = _Errand(member, parts, member.busy_since)
            if not running:
                self._replace_hung(running)
                time.sleep(_POLL_SECONDS)
                continue
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
            for reference in ready:
                errand = running.pop(reference)
                try:
                    answers[errand.parts] = _get(reference)
                except _FAILURES as error:
                    deaths[errand.parts] += 1
                    if deaths[errand.parts] >= _MOST_DEATHS:
                        raise EngineError(
                            f"{_MOST_DEATHS} workers have died over the same clients: {_cause(error)}"
                        ) from None
                    self._replace(errand.member, _cause(error))
                    if not _is_running(running, errand.parts) and errand.parts not in waiting:
                        waiting.append(errand.parts)
                    continue
                slowest = max(slowest, (time.monotonic() - errand.started) / len(errand.parts))
            if not ready:
                self._replace_hung(running)
                waiting += self._late(kind, running, waiting, slowest)
        known = self._seconds_per_part.get(kind)
        self._seconds_per_part[kind] = slowest if known is None else (known + slowest) / 2
        return [answers[parts] for parts in _cover(answers, num_parts)]

    def _late(self, kind: Any, running: Mapping[Any, _Errand], waiting: Sequence[range], slowest: float) -> list[range]:
        """Returns ranges that are late and that another worker should compute as well.

        A worker that was late several times is replaced, and so is a late worker that nobody can take the place of.
        """
        earlier, now, late = self._seconds_per_part.get(kind), time.monotonic(), []
        newest = {errand.parts: errand for errand in sorted(running.values(), key=lambda errand: errand.started)}
        for parts, errand in newest.items():
            limit = _FIRST_SECONDS
            if slowest:
                limit = LATE_SECONDS + LATE_FACTOR * slowest * len(parts)
            elif earlier is not None:
                limit = _ALONE_SECONDS + _ALONE_FACTOR * earlier * len(parts)
            if now - errand.started <= limit:
                continue
            # A late worker is sooner done than its replacement: others are waited for while they start.
            has_others = any(not member.name or self._is_free(member) for member in self._members)
            if parts not in waiting and errand.member.busy is not None:
                errand.member.times_late += 1
                self._num_late += 1
                late.append(parts)
                _logger.warning("%s is late: its clients are also given to another worker", errand.member.name)
            if errand.member.times_late >= _LATE_TIMES or not has_others:
                self._replace(errand.member, "it is late")
        return late

    def _replace_hung(self, running: Mapping[Any, _Errand]) -> None:
        """Replaces workers that owe an answer to an earlier request for long."""
        asked = {errand.member for errand in running.values()}
        for member in list(self._members):
            hangs = member.busy is not None and time.monotonic() - member.busy_since > _HUNG_SECONDS
            if hangs and member not in asked and not self._is_free(member):
                self._replace(member, f"it has not answered for {_HUNG_SECONDS:.0f} seconds")

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
        # Also for functions of a program that is run as a script, which workers cannot import by name.
        pickler: Any = cloudpickle
        actor = remote.options(
            num_cpus=options.cpus_per_worker, num_gpus=options.gpus_per_worker, max_restarts=0, max_task_retries=0
        ).remote(
            # As bytes: what the function's module imports has to find the head's settings of libraries.
            pickler.dumps(self._build_host),
            options.device,
            options.cpus_per_worker,
            settings_here(),
            are_operations_deterministic(),
        )
        return _Member(number, actor, actor.describe.remote(self._facts), self._facts, _living_nodes())

    def _await_any(self) -> list[_Member]:
        """Returns the workers that have started, in the order of their numbers; waits for the first.

        Raises:
          EngineError: no worker starts, or a worker does not pass the check.
        """
        deadline = time.monotonic() + _SECONDS_TO_START
        while True:
            for member in [member for member in self._members if not member.name]:
                ready, _ = ray.wait([member.ready], timeout=0)
                if ready:
                    self._meet(member)
            started = [member for member in self._members if member.name]
            if started:
                return started
            if time.monotonic() > deadline:
                raise EngineError(
                    f"No worker has started within {_SECONDS_TO_START:.0f} seconds: the Ray cluster has "
                    f"{ray.available_resources()} left, and a worker needs {self.options.cpus_per_worker} CPUs and "
                    f"{self.options.gpus_per_worker:g} GPUs"
                )
            time.sleep(_POLL_SECONDS)

    def _meet(self, member: _Member) -> None:
        """Checks a worker that has described itself; the worker is used from now on."""
        try:
            pid, node, facts = _get(member.ready)
        except _FAILURES as error:
            # A worker that dies with its node says nothing of the next one.
            self._failed_starts += member.nodes <= _living_nodes()
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise EngineError(f"{_MOST_FAILED_STARTS} workers did not start: {_cause(error)}") from None
            self._replace(member, _cause(error))
            return
        if member.described_by is not self._facts:
            self._ask_again(member)
            return
        if self._facts is not None and (error := self._check(facts)):
            raise EngineError(f"worker {member.number} on {node}: {error}")
        self._failed_starts = 0
        member.pid, member.name = pid, f"worker {member.number} on {node}"

    def _ask_again(self, member: _Member) -> None:
        """Asks a worker for the facts that are checked now; until the answer, the worker is not used."""
        member.name, member.described_by = "", self._facts
        member.ready = member.actor.describe.remote(self._facts)

    def _replace(self, member: _Member, reason: str) -> None:
        if member in self._members:
            _logger.warning("%s is replaced: %s", member.name or f"worker {member.number}", reason)
            self._num_replaced += 1
            ray.kill(member.actor)
            self._members[self._members.index(member)] = self._start(member.number)


def _connect(options: PoolOptions) -> TemporaryFolder | None:
    """Connects to a cluster, or starts one on this machine; returns the folder of a cluster on this machine.

    Raises:
      EngineError: there is no such cluster, or none can be started.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray's own folder can be read by everyone, and has what does not fit into memory. Names of sockets must be short.
    folder = None if options.address else TemporaryFolder(OF_CLUSTERS)
    try:
        if folder is None:
            ray.init(address=options.address, **quiet)
        else:
            # More workers than cores are for trials.
            ray.init(
                # Not the cluster that an environment variable or a file of Ray names.
                address="local",
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder.path),
                num_cpus=options.num_workers * options.cpus_per_worker,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                _system_config=SYSTEM_CONFIG,
                **quiet,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        if folder is not None:
            folder.remove()
        where = options.address or "this machine"
        raise EngineError(f"Ray cannot be used at {where}: {_cause(error)}") from error
    return folder


def _living_nodes() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _get(reference: Any, seconds: float | None = None) -> Any:
    """Returns an answer, or raises the worker's own error; waits for some seconds, or without a limit."""
    try:
        return ray.get(reference, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, BaseException) else error) from None


def _cause(error: BaseException) -> str:
    """Returns the last line of an error, which in errors of Ray has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


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
