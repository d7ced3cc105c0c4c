"""Runs a lowered computation, level by level: the server's step, then the clients' step on all clients."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines import structures
from tff_pdp.engines.client_values import ClientGroup, ClientValues
from tff_pdp.engines.inprocess.aggregations import finished_by
from tff_pdp.engines.inprocess.clients import CannotCompile, ClientWork, Lanes, arrange
from tff_pdp.engines.inprocess.evaluation import Evaluator
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.parts import NUM_PARTS, Chunk, Mode, are_side_by_side, divide, merged_nodes, total
from tff_pdp.engines.inprocess.program import fingerprint, lower, without_placement
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.engines.inprocess.steps import (
    ClientNames,
    Step,
    Wiring,
    build_client_step,
    build_merge_step,
    build_server_step,
    client_names,
)
from tff_pdp.processes.stacked_convolutions import batched_convolutions

_logger = logging.getLogger(__name__)
# Number of clients in a timed trial: enough to compare both modes, and cheap compared with a large first round.
_TRIAL_CLIENTS = 32
# Up to this number of calls, the loop is timed before stacks are tried at all.
_FEW_CALLS = 50
_Result = TypeVar("_Result")


class Crew(Protocol):
    """Computes the clients of one call of a computation: in this process, or at workers.

    Attributes:
      num_clients: number of clients.
      values: clients' values by name, those of all levels so far.
    """

    num_clients: int
    values: dict[str, ClientValues]

    def run_level(self, number: int, shared: Leaves, sums: Leaves) -> Leaves:
        """Computes all clients in a level, and keeps their new values in `values`.

        Args:
          number: number of the level.
          shared: leaves of the values that the server sends to all clients.
          sums: sums before any client is added.

        Returns:
          The sums over all clients.
        """
        ...


class LoadedProgram:
    """A computation prepared for one device: lowered to a `Program` at once, with each step traced at its first use.

    Attributes:
      computation: TFF's computation.
      mode: way in which clients are computed; None until it is chosen.
      has_batched_convolutions: whether stacks have the batched form of convolutions, from now on.
    """

    def __init__(self, computation: Any, lanes: Lanes, *, has_batched_convolutions: bool = False):
        """Lowers the computation; `lanes` will compute the clients.

        Raises:
          EngineError: the engine does not support a part of the computation; the message names the part.
        """
        self.computation = computation
        self.mode: Mode | None = None
        self.program = lower(computation)
        self._wiring = Wiring(self.program)
        self._server_steps: dict[int, Step] = {}
        self._client_steps: dict[tuple[int, Mode, bool], Step] = {}
        self._client_names: dict[int, ClientNames] = {}
        self._merge_steps: dict[int, Callable[[Leaves], Leaves]] = {}
        # Parts that run side by side need the same step.
        self._tracing = threading.Lock()
        self._lanes = lanes
        self.has_batched_convolutions = has_batched_convolutions
        self._needed_by_result = self._wiring.uses([self.program.result])
        self._give_out = structures.build_container(_without_placements(self.program.result_type))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the computation, equal in all processes."""
        return fingerprint(self.program)

    def take(self, argument: Any) -> tuple[dict[str, Leaves], dict[str, ClientValues]]:
        """Divides the arguments of a call, by name, into the server's leaves and the clients' values.

        Raises:
          TypeError: an argument does not match the computation's parameter.
          ValueError: arguments have different numbers of clients. Type and first words are those of TFF's own context.
        """
        shared: dict[str, Leaves] = {}
        own: dict[str, ClientValues] = {}
        sizes: dict[str, int] = {}
        parameter_type = self.program.parameter_type
        given = structures.federated_members(argument, parameter_type, "argument") if self.program.arguments else []
        for member, (where, value) in zip(self.program.arguments, given, strict=True):
            if not member.varies:
                shared[member.name] = structures.from_python(value, member.value_type, where)
                continue
            if isinstance(value, ClientValues):
                if not member.value_type.is_assignable_from(value.member_type):
                    raise TypeError(f"{where}: expected {member.value_type} per client, not {value.member_type}")
                own[member.name] = value
            elif isinstance(value, list):
                own[member.name] = ClientValues.from_members(member.value_type, value, where)
            else:
                raise TypeError(f"{where}: expected a list with one value per client, not {type(value).__name__}")
            sizes[where] = len(own[member.name])
        if len(set(sizes.values())) > 1:
            raise ValueError(f"Conflicting cardinalities: arguments have different numbers of clients: {sizes}")
        return shared, own

    def run(
        self, shared: Mapping[str, Leaves], own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int
    ) -> Any:
        """Runs the whole computation.

        Args:
          shared: the server's leaves by argument name.
          own: clients' values by argument name; this call arranges them for the mode.
          mode: way in which clients are computed.
          clients_per_call: largest number of clients that are computed at a time.
        """
        parts = divide(own, mode, clients_per_call, self.num_shared(shared))
        return self.run_with(shared, _ClientsHere(self, own, mode, parts, clients_per_call))

    def run_with(self, shared: Mapping[str, Leaves], crew: "Crew") -> Any:
        """Runs the whole computation with a crew for the clients; `shared` has the server's leaves by argument name."""
        server = dict(shared)
        sums: Leaves = []
        for number, level in enumerate(self.program.levels):
            sums = self._run_server(number, server, sums, crew.num_clients)
            if level.clients or level.aggregations:
                sent = [leaf for name in self.client_names(number).shared for leaf in server[name]]
                sums = crew.run_level(number, sent, sums)
        return self._result(server, crew.values)

    @property
    def is_compiled(self) -> bool:
        """True if XLA compiles a part of a step that has been traced for the mode `compiled`."""
        return any(step.is_compiled for step in self._client_steps.values())

    def compare(
        self,
        shared: Mapping[str, Leaves],
        own: Mapping[str, ClientValues],
        clients_per_call: int,
        may_compile: bool = False,
        calls: int | None = None,
    ) -> dict[Mode, float]:
        """Times all modes on some of the clients, and discards the results.

        `calls` is the largest number of calls that the comparison is for; None for an unknown number. If so few calls
        take less time, one client after another, than the first of these has taken to prepare, stacks are not tried:
        they take at least as long to prepare, so that trying them would cost more than they could save.

        Returns:
          Seconds by mode, without the modes that fail. If the computation cannot run on stacks, nothing is timed, and
          the only entry is `loop` with 0 seconds.

        Raises:
          tf.errors.OpError: the computation fails in all modes.
        """
        some = few(own)
        # Each run arranges the values in its own way.
        for_loop = {name: values.copy() for name, values in some.items()}
        if calls is not None and calls <= _FEW_CALLS:
            spent = self._seconds_of_few_calls(shared, for_loop, clients_per_call, calls, of_all=_shares(own, some))
            if spent is not None:
                return {"loop": spent}
        seconds: dict[Mode, float] = {}
        stacked: tuple[Mode, ...] = ("compiled", "vectorized") if may_compile else ("vectorized",)
        try:
            # The first runs, which trace. Stacks keep Python busy; loops keep TensorFlow busy, without Python's lock.
            with (
                self._lanes.beside(lambda: self.run(shared, for_loop, "loop", clients_per_call)),
                contextlib.suppress(CannotCompile),
            ):
                self.run(shared, some, stacked[0], clients_per_call)
            for mode in stacked:
                try:
                    seconds[mode] = self.time(shared, some, mode, clients_per_call)
                except CannotCompile as error:
                    _logger.info("XLA does not compile clients' work: %s", str(error))
                    continue
                if mode == "compiled" and not self.is_compiled:
                    seconds = {"vectorized": seconds["compiled"]}
                    break
        except (CannotStack, tf.errors.OpError) as error:
            if isinstance(error, tf.errors.OpError):
                # If the data are at fault, the loop fails as well, and the error is raised.
                self.run(shared, for_loop, "loop", clients_per_call)
            _logger.info("clients are computed one by one, because %s", str(error).splitlines()[0])
            return {"loop": 0.0}
        return {"loop": self._seconds(shared, for_loop, "loop", clients_per_call), **seconds}

    def _seconds_of_few_calls(
        self,
        shared: Mapping[str, Leaves],
        some: Mapping[str, ClientValues],
        clients_per_call: int,
        calls: int,
        of_all: float,
    ) -> float | None:
        """Returns the seconds of a call of the loop if all calls together take less than to prepare the loop; or None.

        `of_all` is the number of all clients, divided by the number of clients in `some`.
        """
        tf.test.experimental.sync_devices()
        started = time.perf_counter()
        self.run(shared, some, "loop", clients_per_call)
        tf.test.experimental.sync_devices()
        first = time.perf_counter() - started
        again = self._seconds(shared, some, "loop", clients_per_call)
        return again if calls * of_all * again < first - again else None

    def time(
        self, shared: Mapping[str, Leaves], own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int
    ) -> float:
        """Returns the seconds of a call on some of the clients, after a first one that traces; discards the results.

        Raises:
          CannotStack: the mode stacks clients, and the computation cannot run on stacks.
          tf.errors.OpError: the computation fails.
        """
        some = few(own)
        self.run(shared, some, mode, clients_per_call)
        return self._seconds(shared, some, mode, clients_per_call)

    def _seconds(
        self, shared: Mapping[str, Leaves], own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int
    ) -> float:
        # A GPU may still be computing what was asked for.
        tf.test.experimental.sync_devices()
        started = time.perf_counter()
        self.run(shared, own, mode, clients_per_call)
        tf.test.experimental.sync_devices()
        return time.perf_counter() - started

    def _run_server(self, number: int, server: dict[str, Leaves], sums: Leaves, num_clients: int) -> Leaves:
        if number not in self._server_steps:
            self._server_steps[number] = build_server_step(self._wiring, number, self._needed_after_server(number))
        step = self._server_steps[number]
        inputs = [leaf for name in step.inputs for leaf in server[name]]
        outputs = iter(step.function([*inputs, *sums, tf.constant(num_clients)]))
        for name in step.outputs:
            server[name] = [next(outputs) for _ in structures.leaf_types(self._wiring.types[name])]
        return list(outputs)

    def client_names(self, number: int) -> ClientNames:
        """Returns the names of the values that the clients' part of a level takes and returns."""
        if number not in self._client_names:
            self._client_names[number] = client_names(self._wiring, number, self._needed_after_clients(number))
        return self._client_names[number]

    def type_of(self, name: str) -> Any:
        """Returns the type of a value, without placement, by the value's name."""
        return self._wiring.types[name]

    def run_part(
        self,
        number: int,
        mode: Mode,
        shared: Leaves,
        clients: Mapping[str, ClientValues],
        part: Sequence[Chunk],
        sums: Leaves,
    ) -> tuple[dict[str, list[ClientGroup]], Leaves]:
        """Computes one part of the clients in a level.

        Args:
          number: number of the level.
          mode: way in which clients are computed: one by one, or as stacks.
          shared: leaves of the values that the server sends to all clients.
          clients: clients' values by name, arranged for the mode.
          part: calls of the part.
          sums: sums before any client is added.

        Returns:
          The clients' new values by name, and the part's sums.

        Raises:
          CannotStack: the mode stacks clients, and the computation cannot be stacked.
          tf.errors.OpError: the computation itself fails.
        """
        return ClientWork(self._client_step(number, mode), mode, self._wiring.types, shared, clients).run(part, sums)

    def merge(self, number: int, first: Leaves, second: Leaves) -> Leaves:
        """Merges a level's sums over two sets of clients."""
        if number not in self._merge_steps:
            self._merge_steps[number] = build_merge_step(self._wiring, number)
        return self._merge_steps[number]([*first, *second])

    def num_shared(self, shared: Mapping[str, Leaves]) -> int | None:
        """Counts the server's values, for `parts.divide`; None on a GPU."""
        if not self._lanes.is_cpu:
            return None
        return sum(leaf.shape.num_elements() or 0 for leaves in shared.values() for leaf in leaves)

    def run_parts(
        self, functions: Sequence[Callable[[], _Result]], parts: Sequence[Sequence[Chunk]], clients_per_call: int
    ) -> Iterator[_Result]:
        """Runs a function for each of the parts, on the engine's lanes where that is possible; yields results in order.

        Only the results of a few parts exist at a time.
        """
        if not self._lanes.has_several_devices and not are_side_by_side(parts, clients_per_call):
            yield from (function() for function in functions)
            return
        for begin in range(0, len(functions), NUM_PARTS):
            yield from self._lanes.run(functions[begin : begin + NUM_PARTS])

    def _client_step(self, number: int, mode: Mode) -> Step:
        with self._tracing:
            return self._traced_client_step(number, mode)

    def _traced_client_step(self, number: int, mode: Mode) -> Step:
        is_batched = self.has_batched_convolutions and mode != "loop"
        if (number, mode, is_batched) not in self._client_steps:
            needed = self._needed_after_clients(number)
            try:
                with batched_convolutions(is_batched):
                    step = build_client_step(
                        self._wiring, number, needed, stacked=mode != "loop", compiled=mode == "compiled"
                    )
            except (AssertionError, ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
                if mode == "loop":
                    raise
                # `tf.vectorized_map` refuses an operation with one of many errors, which print whole graphs: the first
                # line names the operation.
                lines = str(error).splitlines() or [type(error).__name__]
                raise CannotStack(f"TensorFlow cannot stack the computation: {lines[0]}") from error
            self._client_steps[number, mode, is_batched] = step
            if mode == "compiled" and not step.is_compiled:
                self._client_steps[number, "vectorized", is_batched] = step
        return self._client_steps[number, mode, is_batched]

    def _needed_after_server(self, number: int) -> list[str]:
        level = self.program.levels[number]
        blocks = [statement.value for statement in (*level.clients, *level.aggregations)]
        return [*self._wiring.uses(blocks), *self._needed_after_clients(number)]

    def _needed_after_clients(self, number: int) -> list[str]:
        later = self.program.levels[number + 1 :]
        blocks = [
            statement.value for level in later for statement in (*level.server, *level.clients, *level.aggregations)
        ]
        blocks += [block for statement in self.program.levels[number].aggregations for block in finished_by(statement)]
        return self._wiring.uses([*blocks, self.program.result])

    def _result(self, server: Mapping[str, Leaves], clients: Mapping[str, ClientValues]) -> Any:
        values: dict[str, Any] = {
            name: structures.unflatten(server[name], self._wiring.types[name])
            for name in self._needed_by_result
            if name in server
        }
        value = Evaluator(self._wiring.environment({**values, **clients})).evaluate(self.program.result)
        return self._give_out(iter(_flat_result(value, self.program.result_type)))


def few(own: Mapping[str, ClientValues]) -> dict[str, ClientValues]:
    """Selects the clients of a timed trial."""
    return {name: values.select(range(min(_TRIAL_CLIENTS, len(values)))) for name, values in own.items()}


def _shares(own: Mapping[str, ClientValues], some: Mapping[str, ClientValues]) -> float:
    """Returns the number of all clients, divided by the number of clients in a trial."""
    return max((len(values) / max(1, len(some[name])) for name, values in own.items()), default=1.0)


def _flat_result(value: Any, result_type: Any) -> Iterator[Any]:
    """Yields the leaves of a result; the values of all clients are one leaf."""
    if isinstance(value, ClientValues):
        # Types inside the program have no Python containers.
        yield value.with_type(result_type.member)
    elif isinstance(result_type, _tff.StructType):
        for index, (_, member) in enumerate(_tff.iter_elements(result_type)):
            yield from _flat_result(value[index], member)
    else:
        yield from structures.flatten(value, without_placement(result_type))


def _without_placements(value_type: Any) -> Any:
    """Returns the type of a result, with the values of all clients as one leaf."""
    if isinstance(value_type, _tff.FederatedType):
        return value_type.member if value_type.all_equal else _tff.TensorType(np.bool_)
    if not isinstance(value_type, _tff.StructType):
        return value_type
    members = [(name, _without_placements(member)) for name, member in _tff.iter_elements(value_type)]
    if isinstance(value_type, _tff.StructWithPythonType):
        return _tff.StructWithPythonType(members, value_type.python_container)
    return _tff.StructType(members)


class _ClientsHere:
    """Computes the clients of one call in this process."""

    def __init__(
        self,
        program: LoadedProgram,
        own: Mapping[str, ClientValues],
        mode: Mode,
        parts: Sequence[Sequence[Chunk]],
        clients_per_call: int,
    ):
        self._program = program
        self._mode: Mode = mode
        self._parts, self._clients_per_call = parts, clients_per_call
        # Other calls may use the caller's objects meanwhile, and arrange them in another way.
        self.values = {name: values.copy() for name, values in own.items()}
        self.num_clients = len(next(iter(own.values()))) if own else 0
        arrange(self.values, self._parts, mode)
        for name, values in own.items():  # The next call finds the values arranged.
            values.keep_like(self.values[name])

    def run_level(self, number: int, shared: Leaves, sums: Leaves) -> Leaves:
        program = self._program
        groups: dict[str, list[ClientGroup]] = {name: [] for name in program.client_names(number).outputs}

        def run(part: Sequence[Chunk]) -> Leaves:
            new, added = program.run_part(number, self._mode, shared, self.values, part, sums)
            for name, of_part in new.items():
                groups[name] += of_part
            return added

        def merge(first: Leaves, second: Leaves) -> Leaves:
            return program.merge(number, first, second)

        merged = sums
        if self._parts:
            functions = [functools.partial(run, part) for part in self._parts]
            added = program.run_parts(functions, self._parts, self._clients_per_call)
            merged = total(merged_nodes(enumerate(added), merge), merge)
        self.values.update({name: ClientValues(program.type_of(name), own) for name, own in groups.items()})
        return merged
