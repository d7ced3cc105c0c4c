"""Runs a lowered computation, level by level: the server's step, then the clients' step on all clients."""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines import structures
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.inprocess.clients import CannotCompile, ClientWork, Lanes, Mode, arrange
from tff_pdp.engines.inprocess.evaluation import Evaluator
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.program import fingerprint, lower, without_placement
from tff_pdp.engines.inprocess.stacked import CannotStack
from tff_pdp.engines.inprocess.steps import Step, Wiring, build_client_step, build_merge_step, build_server_step
from tff_pdp.processes.stacked_convolutions import batched_convolutions

_logger = logging.getLogger(__name__)
# Number of clients in a timed trial: enough to compare both modes, and cheap compared with a large first round.
_TRIAL_CLIENTS = 32


class LoadedProgram:
    """A computation prepared for one device: lowered to a `Program` at once, with each step traced at its first use.

    Attributes:
      computation: TFF's computation.
      mode: way in which clients are computed; None until it is chosen.
    """

    def __init__(self, computation: Any, lanes: Lanes, *, has_batched_convolutions: bool = False):
        """Lowers the computation; `lanes` will compute the clients.

        With `has_batched_convolutions`, stacks have the batched form of convolutions (`stacked_convolutions`).

        Raises:
          EngineError: the engine does not support a part of the computation; the message names the part.
        """
        self.computation = computation
        self.mode: Mode | None = None
        self.program = lower(computation)
        self._wiring = Wiring(self.program)
        self._server_steps: dict[int, Step] = {}
        self._client_steps: dict[tuple[int, Mode], Step] = {}
        self._merge_steps: dict[int, Callable[[Leaves], Leaves]] = {}
        self._lanes = lanes
        self._has_batched_convolutions = has_batched_convolutions
        self._needed_by_result = self._wiring.uses([self.program.result])
        self._give_out = structures.build_container(_without_placements(self.program.result_type))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the computation, equal in all processes."""
        return fingerprint(self.program)

    def take(self, argument: Any) -> tuple[dict[str, Leaves], dict[str, ClientValues]]:
        """Divides the arguments of a call, by name, into the server's leaves and the clients' values.

        Raises:
          TypeError: an argument does not match the computation's parameter, or numbers of clients differ.
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
            raise TypeError(f"arguments have different numbers of clients: {sizes}")
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
        # Other calls may use the caller's objects meanwhile, and arrange them in another way.
        server, clients = dict(shared), {name: values.copy() for name, values in own.items()}
        num_clients = len(next(iter(own.values()))) if own else 0
        lanes = arrange(clients, mode, clients_per_call)
        for name, values in own.items():  # The next call finds the values arranged.
            values.keep_like(clients[name])
        sums: Leaves = []
        for number, level in enumerate(self.program.levels):
            sums = self._run_server(number, server, sums, num_clients)
            if level.clients or level.aggregations:
                results, sums = self._run_clients(number, server, clients, sums, mode, lanes)
                clients.update(results)
        return self._result(server, clients)

    @property
    def is_compiled(self) -> bool:
        """Whether XLA compiles a part of a step that has been traced for the mode `compiled`."""
        return any(step.is_compiled for step in self._client_steps.values())

    def compare(
        self,
        shared: Mapping[str, Leaves],
        own: Mapping[str, ClientValues],
        clients_per_call: int,
        may_compile: bool = False,
    ) -> dict[Mode, float]:
        """Times all modes on some of the clients, and discards the results.

        Returns:
          Seconds by mode, without the modes that fail. If the computation cannot run on stacks, nothing is timed, and
          the only entry is `loop` with 0 seconds.

        Raises:
          tf.errors.OpError: the computation fails in all modes.
        """
        few = {name: values.select(range(min(_TRIAL_CLIENTS, len(values)))) for name, values in own.items()}
        seconds: dict[Mode, float] = {}
        stacked: tuple[Mode, ...] = ("compiled", "vectorized") if may_compile else ("vectorized",)
        for mode in stacked:
            try:
                seconds[mode] = self._time(shared, few, mode, clients_per_call)
            except CannotCompile as error:
                _logger.info("XLA does not compile clients' work: %s", str(error))
            except (CannotStack, tf.errors.OpError) as error:
                if isinstance(error, tf.errors.OpError):
                    # If the data are at fault, the loop fails as well, and the error is raised.
                    self.run(shared, few, "loop", clients_per_call)
                _logger.info("clients are computed one by one, because %s", str(error).splitlines()[0])
                return {"loop": 0.0}
            else:
                if mode == "compiled" and not self.is_compiled:
                    seconds = {"vectorized": seconds["compiled"]}
                    break
        return {"loop": self._time(shared, few, "loop", clients_per_call), **seconds}

    def _time(
        self, shared: Mapping[str, Leaves], own: Mapping[str, ClientValues], mode: Mode, clients_per_call: int
    ) -> float:
        self.run(shared, own, mode, clients_per_call)  # Traces.
        started = time.perf_counter()
        self.run(shared, own, mode, clients_per_call)
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

    def _run_clients(
        self,
        number: int,
        server: Mapping[str, Leaves],
        clients: Mapping[str, ClientValues],
        sums: Leaves,
        mode: Mode,
        lanes: list[list[np.ndarray]],
    ) -> tuple[dict[str, ClientValues], Leaves]:
        if not lanes:
            needed = self._needed_after_clients(number)
            names = [statement.name for statement in self.program.levels[number].clients if statement.name in needed]
            return {name: ClientValues(self._wiring.types[name], []) for name in names}, sums
        step = self._client_step(number, mode)
        shared = [leaf for name in step.inputs for leaf in server[name]]
        work = ClientWork(step, mode, self._wiring.types, shared, clients)
        outcomes = self._lanes.run([functools.partial(work.run, chunks, sums) for chunks in lanes])
        merged = functools.reduce(functools.partial(self._merge, number), (of_lane for _, of_lane in outcomes))
        groups = {name: [group for of_lane, _ in outcomes for group in of_lane[name]] for name in step.outputs}
        return {name: ClientValues(self._wiring.types[name], groups[name]) for name in step.outputs}, merged

    def _merge(self, number: int, first: Leaves, second: Leaves) -> Leaves:
        if number not in self._merge_steps:
            self._merge_steps[number] = build_merge_step(self._wiring, number)
        return self._merge_steps[number]([*first, *second])

    def _client_step(self, number: int, mode: Mode) -> Step:
        if (number, mode) not in self._client_steps:
            needed = self._needed_after_clients(number)
            try:
                with batched_convolutions(self._has_batched_convolutions):
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
            self._client_steps[number, mode] = step
            if mode == "compiled" and not step.is_compiled:
                self._client_steps[number, "vectorized"] = step
        return self._client_steps[number, mode]

    def _needed_after_server(self, number: int) -> list[str]:
        level = self.program.levels[number]
        blocks = [statement.value for statement in (*level.clients, *level.aggregations)]
        return [*self._wiring.uses(blocks), *self._needed_after_clients(number)]

    def _needed_after_clients(self, number: int) -> list[str]:
        later = self.program.levels[number + 1 :]
        blocks = [
            statement.value for level in later for statement in (*level.server, *level.clients, *level.aggregations)
        ]
        # The function that finishes an aggregation is part of the aggregation's own expression.
        blocks += [statement.value for statement in self.program.levels[number].aggregations]
        return self._wiring.uses([*blocks, self.program.result])

    def _result(self, server: Mapping[str, Leaves], clients: Mapping[str, ClientValues]) -> Any:
        values: dict[str, Any] = {
            name: structures.unflatten(server[name], self._wiring.types[name])
            for name in self._needed_by_result
            if name in server
        }
        value = Evaluator(self._wiring.environment({**values, **clients})).evaluate(self.program.result)
        return self._give_out(iter(_flat_result(value, self.program.result_type)))


def _flat_result(value: Any, result_type: Any) -> Iterator[Any]:
    """Yields the leaves of a result; the values of all clients are one leaf."""
    if isinstance(value, ClientValues):
        # Types inside the program have no Python containers.
        yield ClientValues(result_type.member, value.groups)
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
