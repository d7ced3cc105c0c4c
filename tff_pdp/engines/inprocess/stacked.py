"""Calls graphs that were written for one client on a stack of clients."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tff_pdp.engines.inprocess.graphs import Graph, operation_of
from tff_pdp.processes.vectorizable import StackedRule, find_rule, map_stack

# Operations that TensorFlow calls stateful, although they give all clients the same result.
_HARMLESS = re.compile(
    r"Partitioned(Call)?|^(If|While|Case)$|Assert|Print|VarHandle|Variable|Table|Dataset|Iterator|NoOp"
)
# Operations on variables, tables, data sets and other state, which clients that run in one call cannot share.
_STATE = re.compile(r"VarHandleOp|Table|Dataset|Iterator|Queue|PyFunc")


class Column:
    """One leaf for all clients of a stack, whose tensor is made when it is first asked for.

    Attributes:
      is_stacked: whether the tensor has an axis of clients.
    """

    def __init__(
        self,
        tensor: tf.Tensor | Callable[[], tf.Tensor],
        is_stacked: bool,
        total: Callable[[], tf.Tensor] | None = None,
    ):
        """Wraps a tensor, or a function that makes the tensor.

        Args:
          tensor: `[clients, ...]` if `is_stacked`, else shared by all clients.
          is_stacked: whether the tensor has an axis of clients.
          total: function that makes the sum over all clients without the tensor, where that is faster.
        """
        self._tensor, self.is_stacked, self._total = tensor, is_stacked, total

    @property
    def tensor(self) -> tf.Tensor:
        """The tensor: `[clients, ...]` if `is_stacked`, else shared by all clients."""
        return self._tensor() if callable(self._tensor) else self._tensor

    def total(self, num_clients: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all clients."""
        return tf.reduce_sum(stack(self, num_clients), axis=0) if self._total is None else self._total()


def as_column(leaf: Any) -> Column:
    """Returns the leaf as a column; a plain tensor is a constant of the computation, which all clients share."""
    return leaf if isinstance(leaf, Column) else Column(leaf, is_stacked=False)


def stack(leaf: Any, num_clients: tf.Tensor) -> tf.Tensor:
    """Returns the leaf with an axis of clients; a shared tensor is repeated for each client."""
    column = as_column(leaf)
    if column.is_stacked:
        return column.tensor
    return tf.broadcast_to(column.tensor, tf.concat([[num_clients], tf.shape(column.tensor)], axis=0))


class CannotStack(Exception):
    """Raised for a computation that must be called client by client; the message has the reason."""


def call_stacked(num_clients: tf.Tensor) -> Callable[[Graph, list[Any]], list[Column]]:
    """Builds `(graph, columns) -> columns`, which calls a graph for a stack of clients.

    A graph whose inputs are all shared by the clients is called once. A graph that only calls a `vectorizable` function
    is replaced by that function's form for stacks. All other graphs go through `tf.vectorized_map`.
    """

    def call(graph: Graph, inputs: list[Any]) -> list[Column]:
        columns = [as_column(leaf) for leaf in inputs]
        if not _differs_by_call(graph) and not any(column.is_stacked for column in columns):
            return [Column(tensor, is_stacked=False) for tensor in graph([column.tensor for column in columns])]
        wiring = _wiring_of(graph)
        if wiring is not None and wiring.accepts(columns):
            return wiring.call(columns, num_clients)
        return _call_by_mapping(graph, columns, num_clients)

    return call


def _differs_by_call(graph: Graph) -> bool:
    """Checks whether two calls with the same inputs may differ, because of random numbers or the clock."""
    definitions = (op_def_registry.get(operation) for operation in graph.operations)
    return any(
        definition is not None and definition.is_stateful and not _HARMLESS.search(definition.name)
        for definition in definitions
    )


def _call_by_mapping(graph: Graph, columns: list[Column], num_clients: tf.Tensor) -> list[Column]:
    if "Timestamp" in graph.operations:
        raise CannotStack("the computation reads the clock, and clients of a stack might read the same time")
    if any(map(_STATE.search, graph.operations)):
        raise CannotStack("the computation has variables, tables or data sets")
    if graph.graph_def.library.function:
        raise CannotStack("the computation has control flow, and no `vectorizable` form for stacks")

    def one(arguments: tuple[tf.Tensor, list[tf.Tensor]]) -> list[tf.Tensor]:
        rows = iter(arguments[1])
        return graph([next(rows) if column.is_stacked else column.tensor for column in columns])

    own = [column.tensor for column in columns if column.is_stacked]
    results = map_stack(one, (tf.range(num_clients), own))
    return [Column(tensor, is_stacked=True) for tensor in results]


@dataclasses.dataclass(frozen=True)
class _RuleWiring:
    """The connections of a graph's inputs and outputs with the one function that the graph calls.

    Attributes:
      rule: form of the function for stacks.
      sources: number of the graph's input for each argument of the function.
      targets: for each output of the graph, number of the function's result; for input i of the graph, -1 - i.
    """

    rule: StackedRule
    sources: list[int]
    targets: list[int]

    def accepts(self, columns: list[Column]) -> bool:
        shared = zip(self.sources, self.rule.is_shared(), strict=True)
        return not any(is_shared and columns[source].is_stacked for source, is_shared in shared)

    def call(self, columns: list[Column], num_clients: tf.Tensor) -> list[Column]:
        arguments = [
            columns[source].tensor if is_shared else stack(columns[source], num_clients)
            for source, is_shared in zip(self.sources, self.rule.is_shared(), strict=True)
        ]
        # Either the results or their sums are made, whichever are asked for.
        results = functools.cache(lambda: self.rule.call(arguments))
        sums = functools.cache(lambda: self.rule.call_summed(arguments))

        def column(target: int) -> Column:
            if target < 0:
                return columns[-1 - target]
            total = (lambda: sums()[target]) if self.rule.summed else None
            return Column(lambda: results()[target], is_stacked=True, total=total)

        return [column(target) for target in self.targets]


def _wiring_of(graph: Graph) -> _RuleWiring | None:
    """Returns the graph's connections with a `vectorizable` function; None if the graph does more than call one."""
    nodes = {node.name: node for node in graph.graph_def.node}
    calls = [(node, find_rule(node.attr["f"].func.name)) for node in nodes.values() if "f" in node.attr]
    if len(calls) != 1 or calls[0][1] is None:
        return None
    node, rule = calls[0]
    inputs = {name.partition(":")[0]: number for number, name in enumerate(graph.inputs)}

    def origin(name: str) -> tuple[str, int]:
        """Returns operation and output number of the tensor that `name` is a copy of."""
        while nodes[operation_of(name)].op == "Identity":
            name = nodes[operation_of(name)].input[0]
        return operation_of(name), int(name.partition(":")[2] or 0)

    sources = [origin(name)[0] for name in node.input if not name.startswith("^")]
    targets = [origin(name) for name in graph.outputs]
    if any(source not in inputs for source in sources) or rule is None or len(sources) != len(rule.is_shared()):
        return None
    if any(operation != node.name and operation not in inputs for operation, _ in targets):
        return None
    return _RuleWiring(
        rule,
        [inputs[source] for source in sources],
        [index if operation == node.name else -1 - inputs[operation] for operation, index in targets],
    )
