"""A MetaGraphDef read as a program: which ops run when, and where a tensor's value comes from. Nothing is executed."""

import collections
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tff_pdp.errors import ServingError

# Deeper than any real model; TensorFlow inlines functions recursively, and its stack is finite.
MAX_CALL_DEPTH = 64
_CALL_OPS = ("PartitionedCall", "StatefulPartitionedCall")
GRAPH = ""


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
      function: the function that it comes from, `GRAPH` for the graph itself.
      tensor: the tensor's name there, or for an argument the argument's.
      op: the op that makes it; empty for an argument of a function, whose value callers outside the graph may give.
    """

    function: str
    tensor: str
    op: str


class Program:
    """The graph of a MetaGraphDef and the functions it calls."""

    def __init__(self, meta_graph: meta_graph_pb2.MetaGraphDef):
        """Indexes the nodes.

        Raises:
          ServingError: names are used twice or not defined, or functions call themselves or are nested too deeply.
        """
        library = meta_graph.graph_def.library.function
        self.functions: dict[str, function_pb2.FunctionDef] = {
            function.signature.name: function for function in library
        }
        if len(self.functions) != len(library) or GRAPH in self.functions:
            raise ServingError("two functions have the same name, or one has none")
        self._nodes = {GRAPH: _by_name(meta_graph.graph_def.node)}
        self._nodes.update({name: _by_name(function.node_def) for name, function in self.functions.items()})
        self._callers: dict[str, list[tuple[str, node_def_pb2.NodeDef]]] = collections.defaultdict(list)
        for scope, node in self.nodes():
            for called in _functions_of(node):
                if called not in self.functions:
                    raise ServingError(f"node {node.name!r} calls the function {called!r}, which is not there")
                self._callers[called].append((scope, node))
        self._ops_of_function = self._collect_ops()

    def nodes(self) -> Iterator[tuple[str, node_def_pb2.NodeDef]]:
        """All nodes with the function that they are in, `GRAPH` for the graph itself."""
        for scope, nodes in self._nodes.items():
            for node in nodes.values():
                yield scope, node

    def ops_run_by(self, names: Iterable[str]) -> set[str]:
        """The ops that may run when these nodes or tensors of the graph are fetched, functions and all.

        Raises:
          ServingError: a name is not that of a node.
        """
        graph = self._nodes[GRAPH]
        waiting, seen, ops = [_node_name(name) for name in names], set(), set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in graph:
                raise ServingError(f"a node {name!r} is used, which is not there")
            node = graph[name]
            ops.add(node.op)
            for called in _functions_of(node):
                ops |= self._ops_of_function[called]
            waiting += [_node_name(reference) for reference in node.input]
        return ops

    def origins(self, scope: str, reference: str) -> list[Origin]:
        """Follows a string back through identities, variables and calls to where it may come from.

        Args:
          scope: the function that uses it, or `GRAPH`.
          reference: the tensor, as an input of a node there.
        """
        string_assignments = [
            (place, node.input[1])
            for place, node in self.nodes()
            if node.op == "AssignVariableOp" and node.attr["dtype"].type == types_pb2.DT_STRING and len(node.input) > 1
        ]
        found, seen, waiting = [], set(), [(scope, reference)]
        while waiting:
            place, tensor = step = waiting.pop()
            if step in seen:
                continue
            seen.add(step)
            name = _node_name(tensor)
            arguments = [] if place == GRAPH else [one.name for one in self.functions[place].signature.input_arg]
            node = self._nodes[place].get(name)
            if name in arguments:
                found.append(Origin(place, name, ""))
                for caller, call in self._callers[place]:
                    index = arguments.index(name)
                    if call.op in _CALL_OPS and index < len(call.input):
                        waiting.append((caller, call.input[index]))
                    else:
                        found.append(Origin(caller, call.name, call.op))
            elif node is not None and node.op == "Identity" and node.input:
                waiting.append((place, node.input[0]))
            elif node is not None and node.op == "ReadVariableOp":
                # Whichever variable it is: handles travel too, and a graph has few variables of strings.
                waiting += string_assignments
            else:
                found.append(Origin(place, _with_port(tensor), node.op if node is not None else "missing node"))
        return found

    def _collect_ops(self) -> dict[str, set[str]]:
        """All ops of each function, those of the functions it calls included."""
        calls = {
            name: {called for node in self._nodes[name].values() for called in _functions_of(node)}
            for name in self.functions
        }
        ops = {name: {node.op for node in self._nodes[name].values()} for name in self.functions}
        finished: set[str] = set()
        # Functions that call only finished ones, level by level: those that call themselves never get their turn.
        for _ in range(MAX_CALL_DEPTH):
            ready = [name for name in self.functions if name not in finished and calls[name] <= finished]
            for name in ready:
                ops[name].update(*(ops[called] for called in calls[name]))
            finished.update(ready)
        if unfinished := sorted(self.functions.keys() - finished):
            raise ServingError(
                f"function {unfinished[0]!r} calls itself, or functions are nested more than {MAX_CALL_DEPTH} deep"
            )
        return ops


def _by_name(nodes: Iterable[node_def_pb2.NodeDef]) -> dict[str, node_def_pb2.NodeDef]:
    named: dict[str, node_def_pb2.NodeDef] = {}
    for node in nodes:
        if node.name in named:
            raise ServingError(f"two nodes have the name {node.name!r}")
        named[node.name] = node
    return named


def _functions_of(node: node_def_pb2.NodeDef) -> set[str]:
    """The functions that a node's attributes name, at any depth."""
    found, waiting = set(), list(node.attr.values())
    while waiting:
        value: attr_value_pb2.AttrValue = waiting.pop()
        for function in (*([value.func] if value.HasField("func") else []), *value.list.func):
            found.add(function.name)
            waiting += function.attr.values()
    return found


def _node_name(reference: str) -> str:
    return reference.removeprefix("^").partition(":")[0]


def _with_port(reference: str) -> str:
    return reference if ":" in reference else f"{reference}:0"
