"""Lowers a computation to levels, each with the server's statements, every client's statements, and aggregations.

TFF brings a computation into call-dominant form, a list of named calls, which are the statements. The server's
statements of level 0 depend on no client. The clients' statements of a level may depend on the server's statements of
this level and earlier levels. The server can use the aggregates of level n from level n + 1 on. For each level, one
TensorFlow function is traced for the server, and one for the clients.

`fingerprint` gives a computation the same digest in all processes, though TensorFlow's names of functions differ.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.inprocess.evaluation import unsupported
from tff_pdp.errors import EngineError

AGGREGATIONS = {
    "federated_aggregate",
    "federated_max",
    "federated_mean",
    "federated_min",
    "federated_sum",
    "federated_weighted_mean",
}
ON_CLIENTS = {
    "federated_broadcast",
    "federated_eval_at_clients",
    "federated_map",
    "federated_map_all_equal",
    "federated_value_at_clients",
    "federated_zip_at_clients",
}
ON_SERVER = {"federated_apply", "federated_eval_at_server", "federated_value_at_server", "federated_zip_at_server"}


@dataclasses.dataclass(frozen=True)
class Statement:
    """One named call.

    Attributes:
      name: name of the call's result.
      value: the call, a building block of TFF.
      value_type: type of the result, without placement.
      uses: names that the call refers to.
    """

    name: str
    value: Any
    value_type: Any
    uses: frozenset[str]

    @property
    def uri(self) -> str | None:
        """URI of the intrinsic that the statement calls; None for a local computation."""
        function = getattr(self.value, "function", None)
        return function.uri if isinstance(function, _tff.Intrinsic) else None

    @property
    def varies(self) -> bool:
        """True if every client has its own value. A value that all clients share is computed once, at the server."""
        return self.uri in ON_CLIENTS and not self.value.type_signature.all_equal


@dataclasses.dataclass(frozen=True)
class Level:
    """Statements of one level: the server's, then the clients', then the aggregations."""

    server: tuple[Statement, ...]
    clients: tuple[Statement, ...]
    aggregations: tuple[Statement, ...]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One member of the computation's parameter: a federated value, or a value without placement.

    Attributes:
      path: indices that lead from the parameter to the member, the outermost first.
      name: name under which statements find the member's leaves.
      value_type: type of the member, without placement.
      varies: whether every client has its own value.
    """

    path: tuple[int, ...]
    name: str
    value_type: Any
    varies: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A computation of TFF, lowered to levels of statements, which are named calls.

    Attributes:
      parameter: name of the parameter in statements; None for no parameter.
      parameter_type: type of the whole parameter.
      arguments: members of the parameter, each with the name that statements use.
      levels: groups of statements, in the order in which the groups are run.
      result: expression of the result.
      result_type: type of the result, with placements.
    """

    parameter: str | None
    parameter_type: Any
    arguments: tuple[Argument, ...]
    levels: tuple[Level, ...]
    result: Any
    result_type: Any


def lower(computation: Any) -> Program:
    """Lowers a computation.

    Raises:
      EngineError: the computation has an intrinsic that this engine does not support; the message names it.
    """
    block = _tff.to_call_dominant(_tff.replace_secure_intrinsics(computation).to_building_block())
    signature = computation.type_signature
    parameter = None
    if isinstance(block, _tff.Lambda):
        parameter, body = block.parameter_name, block.result
    else:
        # A single TensorFlow computation, with or without a block around it.
        parameter = "argument" if signature.parameter is not None else None
        argument = None if parameter is None else _tff.Reference(parameter, signature.parameter)
        body = _tff.to_call_dominant(_tff.Call(block, argument))
    statements, result = ([], body) if not isinstance(body, _tff.Block) else (body.locals, body.result)
    statements = [_statement(name, value) for name, value in statements]
    return Program(
        parameter=parameter,
        parameter_type=signature.parameter,
        arguments=tuple(_arguments(signature.parameter, ())) if parameter is not None else (),
        levels=tuple(_levels(statements)),
        result=result,
        result_type=signature.result,
    )


def without_placement(value_type: Any) -> Any:
    """Returns a federated type's member type, and any other type unchanged."""
    return value_type.member if isinstance(value_type, _tff.FederatedType) else value_type


def _statement(name: str, value: Any) -> Statement:
    statement = Statement(name, value, without_placement(value.type_signature), frozenset(references(value)))
    known = AGGREGATIONS | ON_CLIENTS | ON_SERVER
    if statement.uri is not None and statement.uri.startswith("federated") and statement.uri not in known:
        raise unsupported(value.function)
    return statement


def references(block: Any) -> Iterator[str]:
    """Yields all names that an expression refers to, including names bound inside the expression, which are unique."""
    if isinstance(block, _tff.Reference):
        yield block.name
    else:
        for child in block.children():
            yield from references(child)


def _arguments(value_type: Any, path: tuple[int, ...]) -> Iterator[Argument]:
    if isinstance(value_type, _tff.StructType):
        for index, (_, member) in enumerate(_tff.iter_elements(value_type)):
            yield from _arguments(member, (*path, index))
    elif isinstance(value_type, _tff.FunctionType):
        raise EngineError("The in-process engine does not take functions as arguments.")
    else:
        varies = isinstance(value_type, _tff.FederatedType) and not value_type.all_equal
        name = "argument" + "".join(f"[{index}]" for index in path)
        yield Argument(path, name, without_placement(value_type), varies)


def _levels(statements: list[Statement]) -> list[Level]:
    """Divides statements into levels; their order is kept."""
    available: dict[str, int] = {}
    levels: Mapping[int, tuple[list[Statement], list[Statement], list[Statement]]] = {0: ([], [], [])}
    for statement in statements:
        level = max((available.get(name, 0) for name in statement.uses), default=0)
        is_aggregation = statement.uri in AGGREGATIONS
        available[statement.name] = level + 1 if is_aggregation else level
        server, clients, aggregations = levels.setdefault(level, ([], [], []))
        levels.setdefault(available[statement.name], ([], [], []))
        if is_aggregation:
            aggregations.append(statement)
        elif statement.varies:
            clients.append(statement)
        else:
            server.append(statement)
    return [Level(*map(tuple, levels[number])) for number in sorted(levels)]


# Attributes that depend on what a process has created before, as do attributes that begin with an underscore.
_NUMBERED = {"config_proto", "container", "debug_name", "metadata", "shared_name", "token"}


def fingerprint(program: Program) -> str:
    """Returns a digest of the types, the steps and the graphs of a lowered computation: 16 hexadecimal digits.

    The digest does not depend on the names of nodes and functions, which differ between processes.
    """
    statements = [
        (level, statement.uri, str(statement.value_type), [_of_block(block) for block in _compiled(statement.value)])
        for level, steps in enumerate(program.levels)
        for statement in (*steps.server, *steps.clients, *steps.aggregations)
    ]
    in_result = [_of_block(block) for block in _compiled(program.result)]
    return _digest(str(program.parameter_type), str(program.result_type), statements, in_result)[:16]


def _digest(*content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _compiled(block: Any) -> Iterator[Any]:
    if isinstance(block, _tff.CompiledComputation):
        yield block
    else:
        for child in block.children():
            yield from _compiled(child)


def _of_block(block: Any) -> str:
    kind = block.proto.WhichOneof("computation")
    if kind != "tensorflow":
        return _digest(kind)
    graph_def = tf.compat.v1.GraphDef()
    block.proto.tensorflow.graph_def.Unpack(graph_def)
    return _Library(graph_def.library).of_nodes(graph_def.node, {})


class _Library:
    """The functions of a graph, each identified by a digest of its content."""

    def __init__(self, library: Any):
        self._functions = {function.signature.name: function for function in library.function}
        self._digests: dict[str, str] = {}

    def of_nodes(self, nodes: Any, places: dict[str, str]) -> str:
        """Returns the digest of nodes in their order; `places` has substitutes for names from outside."""
        places = {**places, **{node.name: str(number) for number, node in enumerate(nodes)}}
        return _digest(
            [
                (
                    self._of_function(node.op),
                    [_placed(source, places) for source in node.input],
                    [(name, self._of_attribute(node.attr[name])) for name in sorted(node.attr) if _is_content(name)],
                )
                for node in nodes
            ]
        )

    def _of_function(self, name: str) -> str:
        """Returns the digest of a function of the library; other names are returned unchanged."""
        if name not in self._functions:
            return name
        if name not in self._digests:
            self._digests[name] = "itself"  # For a function that calls itself.
            function = self._functions[name]
            arguments = {argument.name: f"argument {i}" for i, argument in enumerate(function.signature.input_arg)}
            places = {**arguments, **{node.name: str(number) for number, node in enumerate(function.node_def)}}
            results = [_placed(function.ret[result.name], places) for result in function.signature.output_arg]
            self._digests[name] = _digest(self.of_nodes(function.node_def, arguments), results)
        return self._digests[name]

    def _of_attribute(self, attribute: Any) -> Any:
        kind = attribute.WhichOneof("value")
        if kind == "func":
            return self._of_function(attribute.func.name)
        if kind == "list" and attribute.list.func:
            return [self._of_function(function.name) for function in attribute.list.func]
        return attribute.SerializeToString(deterministic=True)


def _is_content(attribute_name: str) -> bool:
    return attribute_name not in _NUMBERED and not attribute_name.startswith("_")


def _placed(source: str, places: dict[str, str]) -> str:
    operation, colon, output = source.removeprefix("^").partition(":")
    return f"{'^' * source.startswith('^')}{places.get(operation, operation)}{colon}{output}"
