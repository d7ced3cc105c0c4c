"""Finds which nodes of a MetaGraphDef would run for a call, and where values come from, without running any node."""

import collections
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tff_pdp.errors import ServingError

# Deeper than any real model; TensorFlow inlines functions recursively, and its stack is finite.
MAX_CALL_DEPTH = 64
_CALL_OPS = ("PartitionedCall", "StatefulPartitionedCall")
GRAPH = ""

# A function, or `GRAPH`, and the name of a node there.
Place = tuple[str, str]


class Origin(NamedTuple):
    """The source of a value: an op, or a function's argument.

    Attributes:
      function: name of the function that the source is in; `GRAPH` if the source is in the graph itself.
      tensor: name of the tensor or argument in this function.
      op: name of the op that makes the value; empty for an argument, whose value may come from outside the graph.
    """

    function: str
    tensor: str
    op: str


class Program:
    """The nodes of a MetaGraphDef, in its graph and in its functions, and the calls of functions.

    Attributes:
      arguments: names of each function's arguments, in order, by the function's name; empty for `GRAPH`.
    """

    def __init__(self, meta_graph: meta_graph_pb2.MetaGraphDef):
        """Indexes the nodes of the graph and of its functions.

        Raises:
          ServingError: a name is defined twice or not at all, a function calls itself, calls are nested too deeply, or
            an argument of a function is a list or has no fixed dtype.
        """
        library = meta_graph.graph_def.library.function
        self._functions: dict[str, function_pb2.FunctionDef] = {
            function.signature.name: function for function in library
        }
        if len(self._functions) != len(library) or GRAPH in self._functions:
            raise ServingError("two functions have the same name, or one has none")
        self.arguments = {name: _arguments(function) for name, function in self._functions.items()} | {GRAPH: []}
        self._nodes = {GRAPH: _by_name(meta_graph.graph_def.node, [])}
        for name, function in self._functions.items():
            self._nodes[name] = _by_name(function.node_def, self.arguments[name])
        self._calls: dict[str, set[str]] = {scope: set() for scope in self._nodes}
        self._callers: dict[str, list[tuple[str, node_def_pb2.NodeDef]]] = collections.defaultdict(list)
        for scope, node in self.nodes():
            for called in _functions_of(node):
                if called not in self._functions:
                    raise ServingError(f"node {node.name!r} calls the function {called!r}, which is not there")
                self._calls[scope].add(called)
                self._callers[called].append((scope, node))
        self._check_depth()

    def nodes(self) -> Iterator[tuple[str, node_def_pb2.NodeDef]]:
        """Yields all nodes as pairs: the name of the node's function (`GRAPH` for the graph itself), and the node."""
        for scope, nodes in self._nodes.items():
            for node in nodes.values():
                yield scope, node

    def run_by(self, names: Iterable[str]) -> set[Place]:
        """Returns the nodes, in the graph and in functions, that may run if the nodes or tensors `names` are fetched.

        Raises:
          ServingError: a name in `names` is not the name of a node or tensor of the graph.
        """
        graph = self._nodes[GRAPH]
        waiting, seen, called = [_node_name(name) for name in names], set(), set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in graph:
                raise ServingError(f"a node {name!r} is used, which is not there")
            called |= _functions_of(graph[name])
            waiting += [_node_name(reference) for reference in graph[name].input]
        return {(GRAPH, name) for name in seen} | self.run_by_calls(called)

    def run_by_calls(self, names: Iterable[str]) -> set[Place]:
        """Returns the nodes that may run when the functions in `names` are called.

        Raises:
          ServingError: a name in `names` is not the name of a function.
        """
        waiting, called = list(names), set()
        while waiting:
            name = waiting.pop()
            if name not in self._functions:
                raise ServingError(f"a function {name!r} is used, which is not there")
            if name not in called:
                called.add(name)
                waiting += self._calls[name]
        return {(name, node) for name in called for node in self._nodes[name]}

    def origins(self, scope: str, reference: str) -> list[Origin]:
        """Returns the possible sources of a string tensor, traced back through identities, variables and calls.

        `reference` is an input of a node in the function `scope` (`GRAPH` for the main graph).
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
            node = self._nodes[place].get(name)
            if name in self.arguments[place]:
                found.append(Origin(place, name, ""))
                for caller, call in self._callers[place]:
                    index = self.arguments[place].index(name)
                    if call.op in _CALL_OPS and index < len(call.input):
                        waiting.append((caller, call.input[index]))
                    else:
                        found.append(Origin(caller, call.name, call.op))
            elif node is not None and node.op == "Identity" and node.input:
                waiting.append((place, node.input[0]))
            elif node is not None and node.op == "ReadVariableOp" and place == GRAPH:
                # Any variable of strings counts, since handles are passed on too, and a graph has few of them. In a
                # function, `tf.saved_model.load` could fill the variable from the checkpoint.
                waiting += string_assignments
            else:
                with_port = tensor if ":" in tensor else f"{tensor}:0"
                found.append(Origin(place, with_port, node.op if node is not None else "missing node"))
        return found

    def _check_depth(self) -> None:
        finished: set[str] = set()
        # Level by level, functions that call only finished ones; functions that call themselves are never finished.
        for _ in range(MAX_CALL_DEPTH):
            finished.update([name for name in self._functions if self._calls[name] <= finished])
        if unfinished := sorted(self._functions.keys() - finished):
            raise ServingError(
                f"function {unfinished[0]!r} calls itself, or functions are nested more than {MAX_CALL_DEPTH} deep"
            )


def _arguments(function: function_pb2.FunctionDef) -> list[str]:
    """Returns the names of arguments, each a single tensor: a list would shift the numbers of later inputs."""
    for argument in function.signature.input_arg:
        if argument.number_attr or argument.type_list_attr or argument.type_attr:
            raise ServingError(f"function {function.signature.name!r} takes a list, or a tensor of any dtype")
    return [argument.name for argument in function.signature.input_arg]


def _by_name(nodes: Iterable[node_def_pb2.NodeDef], arguments: list[str]) -> dict[str, node_def_pb2.NodeDef]:
    """Returns the nodes of one scope by name; refuses names that do not identify one node or argument."""
    counts = collections.Counter([*arguments, *(node.name for node in nodes)])
    for name, count in counts.items():
        if count > 1:
            raise ServingError(f"two nodes have the name {name!r}")
        if not name or set(name) & set(":^"):
            raise ServingError(f"a node has the name {name!r}")
    return {node.name: node for node in nodes}


def _functions_of(node: node_def_pb2.NodeDef) -> set[str]:
    """Returns the functions that a node's attributes name."""
    called = [value.func for value in node.attr.values() if value.HasField("func")]
    return {function.name for function in (*called, *(one for value in node.attr.values() for one in value.list.func))}


def _node_name(reference: str) -> str:
    return reference.removeprefix("^").partition(":")[0]
