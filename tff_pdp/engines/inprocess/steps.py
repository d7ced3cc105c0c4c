"""Traces the TensorFlow functions of a program's level: the server's step, and the step of one client or a stack."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines import structures
from tff_pdp.engines.inprocess import aggregations
from tff_pdp.engines.inprocess.evaluation import Evaluator
from tff_pdp.engines.inprocess.graphs import Leaves, tracing
from tff_pdp.engines.inprocess.program import Level, Program, Statement
from tff_pdp.engines.inprocess.stacked import Column, call_stacked, stack
from tff_pdp.processes.vectorizable import compiled_stacks


class Wiring:
    """The names and types of the values that enter and leave the steps of a program."""

    def __init__(self, program: Program):
        self.program = program
        self.types: dict[str, Any] = {argument.name: argument.value_type for argument in program.arguments}
        self.varies = {argument.name: argument.varies for argument in program.arguments}
        for level in program.levels:
            for statement in (*level.server, *level.clients, *level.aggregations):
                self.types[statement.name] = statement.value_type
                self.varies[statement.name] = statement in level.clients

    def uses(self, blocks: Sequence[Any]) -> list[str]:
        """Returns the names of arguments and statements that the expressions refer to, in a fixed order."""
        return list(dict.fromkeys(name for block in blocks for name in self._names(block) if name in self.types))

    def _names(self, block: Any) -> list[str]:
        path: list[int] = []
        source = block
        while isinstance(source, _tff.Selection):
            path.insert(0, source.as_index())
            source = source.source
        if isinstance(source, _tff.Reference):
            if source.name != self.program.parameter:
                return [source.name]
            chosen = tuple(path)
            return [
                argument.name
                for argument in self.program.arguments
                if argument.path[: len(chosen)] == chosen[: len(argument.path)]
            ]
        return [name for child in source.children() for name in self._names(child)]

    def environment(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values under the names in expressions; arguments are also nested in one value, the parameter."""
        environment = dict(values)
        if self.program.parameter is not None:
            environment[self.program.parameter] = self._parameter(self.program.parameter_type, (), values)
        return environment

    def _parameter(self, value_type: Any, path: tuple[int, ...], values: Mapping[str, Any]) -> Any:
        for argument in self.program.arguments:
            if argument.path == path:
                return values.get(argument.name)
        members = enumerate(_tff.iter_elements(value_type))
        return _tff.Struct(
            [(name, self._parameter(member, (*path, index), values)) for index, (name, member) in members]
        )


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced function over flat leaves.

    The server's function takes the server's values, the previous level's sums and the number of clients, int32, in this
    order. The function returns new values, and the sums that clients start from. The function of one client, or of a
    stack of clients, takes the number of clients, the server's values, the clients' own values and the sums so far, in
    this order. The function returns the clients' new values and the new sums.

    Attributes:
      inputs: names of the server's values that the function takes, in order.
      outputs: names of the values that the function returns, in order.
      function: the traced function, `flat leaves -> flat leaves`.
      own: names of the clients' values that the function takes, in order.
      is_compiled: whether XLA compiles a part of the function.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: Callable[[Leaves], Leaves]
    own: tuple[str, ...] = ()
    is_compiled: bool = False


def trace(function: Callable[..., Leaves], specs: Sequence[tf.TensorSpec]) -> Callable[[Leaves], Leaves]:
    """Traces a function of flat leaves once, for all calls."""

    def traced(*leaves: tf.Tensor) -> Leaves:
        with tracing(tf.compat.v1.get_default_graph()):
            return function(*leaves)

    concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)

    def call(leaves: Leaves) -> Leaves:
        # `concrete(*leaves)` binds arguments to a Python signature first, which takes longer than a small graph.
        return concrete._call_flat(leaves, concrete.captured_inputs)  # pyright: ignore[reportPrivateUsage]

    return call


def build_server_step(wiring: Wiring, number: int, needed_later: Sequence[str]) -> Step:
    """Traces the server's part of a level: finishes the previous level's sums, and starts this level's sums."""
    program = wiring.program
    level = program.levels[number]
    before: tuple[Statement, ...] = program.levels[number - 1].aggregations if number else ()
    own = [statement.name for statement in (*before, *level.server)]
    made_here = {*own, *(statement.name for statement in level.aggregations)}
    used = wiring.uses([statement.value for statement in (*before, *level.server, *level.aggregations)])
    inputs = tuple(name for name in used if name not in made_here and not wiring.varies[name])
    outputs = tuple(name for name in own if name in needed_later)
    input_specs = [spec for name in inputs for spec in structures.leaf_specs(wiring.types[name])]
    sum_specs = [spec for statement in before for spec in aggregations.specs(statement)]

    def step(*leaves: tf.Tensor) -> Leaves:
        remaining = iter(leaves)
        values = {name: structures.unflatten(remaining, wiring.types[name]) for name in inputs}
        sums = {statement.name: [next(remaining) for _ in aggregations.specs(statement)] for statement in before}
        num_clients = next(remaining)
        evaluator = Evaluator(wiring.environment(values))
        for statement in before:
            evaluator.environment[statement.name] = aggregations.finish(
                statement, sums[statement.name], num_clients, evaluator
            )
        for statement in level.server:
            evaluator.environment[statement.name] = _value_of(statement, evaluator)
        results = [
            leaf for name in outputs for leaf in structures.flatten(evaluator.environment[name], wiring.types[name])
        ]
        starts = [leaf for statement in level.aggregations for leaf in aggregations.start(statement, evaluator)]
        return [tf.identity(leaf) for leaf in (*results, *starts)]

    return Step(inputs, outputs, trace(step, [*input_specs, *sum_specs, tf.TensorSpec([], tf.int32)]))


class ClientNames(NamedTuple):
    """Names of the values that the clients' part of a level takes and returns, in order.

    Attributes:
      shared: values that the server sends to all clients.
      own: clients' own values from before.
      outputs: clients' new values.
    """

    shared: tuple[str, ...]
    own: tuple[str, ...]
    outputs: tuple[str, ...]


def client_names(wiring: Wiring, number: int, needed_later: Sequence[str]) -> ClientNames:
    """Returns the names of the values that the clients' part of a level takes and returns."""
    level: Level = wiring.program.levels[number]
    used = wiring.uses([statement.value for statement in (*level.clients, *level.aggregations)])
    names = {statement.name for statement in (*level.clients, *level.aggregations)}
    return ClientNames(
        shared=tuple(name for name in used if name not in names and not wiring.varies[name]),
        own=tuple(name for name in used if name not in names and wiring.varies[name]),
        outputs=tuple(statement.name for statement in level.clients if statement.name in needed_later),
    )


def build_client_step(
    wiring: Wiring, number: int, needed_later: Sequence[str], *, stacked: bool, compiled: bool = False
) -> Step:
    """Traces the clients' part of a level, for one client or for a stack of clients.

    With `compiled`, XLA compiles the parts of a stack's step that it may compile (`vectorizable.map_stack`). All other
    parts, such as the clip of a user's release, are computed operation by operation.

    Raises:
      Exception: an operation cannot be computed for a stack; TensorFlow has many types of this error.
    """
    level: Level = wiring.program.levels[number]
    shared, own, outputs = client_names(wiring, number, needed_later)
    specs = [tf.TensorSpec([], tf.int32)]
    specs += [spec for name in shared for spec in structures.leaf_specs(wiring.types[name])]
    specs += [spec for name in own for spec in structures.leaf_specs(wiring.types[name], stacked=stacked)]
    specs += [spec for statement in level.aggregations for spec in aggregations.specs(statement)]

    def step(num_clients: tf.Tensor, *leaves: tf.Tensor) -> Leaves:
        remaining = iter(leaves)
        values: dict[str, Any] = {}
        for name in (*shared, *own):
            count = len(structures.leaf_types(wiring.types[name]))
            columns: list[Any] = [next(remaining) for _ in range(count)]
            if stacked:
                columns = [Column(tensor, is_stacked=name in own) for tensor in columns]
            values[name] = structures.unflatten(columns, wiring.types[name])
        environment = wiring.environment(values)
        evaluator = Evaluator(environment, call_stacked(num_clients)) if stacked else Evaluator(environment)
        for statement in level.clients:
            evaluator.environment[statement.name] = _value_of(statement, evaluator)
        results = []
        for name in outputs:
            flat = structures.flatten(evaluator.environment[name], wiring.types[name])
            results += [stack(leaf, num_clients) for leaf in flat] if stacked else map(tf.identity, flat)
        for statement in level.aggregations:
            sums = [next(remaining) for _ in aggregations.specs(statement)]
            results += aggregations.add(statement, sums, evaluator, num_clients if stacked else None)
        return results

    with compiled_stacks() if compiled else contextlib.nullcontext([]) as functions:
        return Step(shared, outputs, trace(step, specs), own, bool(functions))


def build_merge_step(wiring: Wiring, number: int) -> Callable[[Leaves], Leaves]:
    """Traces the merging of a level's sums over two sets of clients; the inputs are both sets' leaves, in order."""
    statements = wiring.program.levels[number].aggregations
    specs = [spec for statement in statements for spec in aggregations.specs(statement)]

    def step(*leaves: tf.Tensor) -> Leaves:
        first, second = iter(leaves[: len(specs)]), iter(leaves[len(specs) :])
        merged = []
        for statement in statements:
            size = len(aggregations.specs(statement))
            merged += aggregations.merge(
                statement, [next(first) for _ in range(size)], [next(second) for _ in range(size)]
            )
        return merged

    return trace(step, [*specs, *specs])


def _value_of(statement: Statement, evaluator: Evaluator) -> Any:
    """Returns a statement's value at one place."""
    match statement.uri:
        case "federated_apply" | "federated_map" | "federated_map_all_equal":
            function, argument = statement.value.argument
            return evaluator.apply(function, argument)
        case "federated_eval_at_clients" | "federated_eval_at_server":
            return evaluator.call(statement.value.argument, None)
        case str(uri) if uri.startswith("federated"):  # Broadcasts, zips and constants return their argument.
            return evaluator.evaluate(statement.value.argument)
        case _:
            return evaluator.evaluate(statement.value)
