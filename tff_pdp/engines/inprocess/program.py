"""A computation as steps: what the server does, what every client does, what is aggregated, and so on in turn.

TFF brings a computation into call-dominant form: a list of named calls. Level 0 of the server is what depends on no
client; level 0 of the clients depends on that; the aggregates of level n are at hand to the server at level n + 1. Each
level is traced into one TensorFlow function for the server and one for the clients.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

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
ON_SERVER = {
    "federated_apply",
    "federated_eval_at_server",
    "federated_value_at_server",
    "federated_zip_at_server",
}


@dataclasses.dataclass(frozen=True)
class Statement:
    """One named call.

    Attributes:
      value: the call, a building block.
      value_type: type of its value, without placement.
      uses: the names it refers to.
    """

    name: str
    value: Any
    value_type: Any
    uses: frozenset[str]

    @property
    def uri(self) -> str | None:
        """The intrinsic it calls, None for a local computation."""
        function = getattr(self.value, "function", None)
        return function.uri if isinstance(function, _tff.Intrinsic) else None

    @property
    def is_aggregation(self) -> bool:
        """Whether it combines one value per client into one at the server."""
        return self.uri in AGGREGATIONS

    @property
    def varies(self) -> bool:
        """Whether every client has its own value; what is the same for all of them is computed once, at the server."""
        return self.uri in ON_CLIENTS and not self.value.type_signature.all_equal


@dataclasses.dataclass(frozen=True)
class Level:
    """What can run without waiting for another aggregation: the server's statements, then the clients'."""

    server: tuple[Statement, ...]
    clients: tuple[Statement, ...]
    aggregations: tuple[Statement, ...]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One member of the computation's parameter: a federated value, or one without placement.

    Attributes:
      path: indices that lead to it from the parameter.
      name: under which statements find its leaves.
      value_type: its type without placement.
      varies: whether every client has its own.
    """

    path: tuple[int, ...]
    name: str
    value_type: Any
    varies: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered computation.

    Attributes:
      parameter: its parameter's name in statements, or None.
      parameter_type: of the whole parameter.
      arguments: the parameter's members.
      levels: what to run, in this order.
      result: expression of the result.
      result_type: of the result, with placements.
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
      EngineError: it holds an intrinsic this engine does not run; the message names it.
    """
    block = _tff.to_call_dominant(_tff.replace_secure_intrinsics(computation).to_building_block())
    signature = computation.type_signature
    parameter = None
    if isinstance(block, _tff.Lambda):
        parameter, body = block.parameter_name, block.result
    else:
        # A single TensorFlow computation, in a block of its own or as it is.
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
    """The type of the value at each place."""
    return value_type.member if isinstance(value_type, _tff.FederatedType) else value_type


def _statement(name: str, value: Any) -> Statement:
    statement = Statement(name, value, without_placement(value.type_signature), frozenset(references(value)))
    known = AGGREGATIONS | ON_CLIENTS | ON_SERVER
    if statement.uri is not None and statement.uri.startswith("federated") and statement.uri not in known:
        raise unsupported(value.function)
    return statement


def references(block: Any) -> Iterator[str]:
    """The names an expression refers to; names bound inside it are unique, and do no harm."""
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
    """Sorts statements into levels; their order stays as it is."""
    available: dict[str, int] = {}
    levels: Mapping[int, tuple[list[Statement], list[Statement], list[Statement]]] = {0: ([], [], [])}
    for statement in statements:
        level = max((available.get(name, 0) for name in statement.uses), default=0)
        available[statement.name] = level + 1 if statement.is_aggregation else level
        server, clients, aggregations = levels.setdefault(level, ([], [], []))
        levels.setdefault(available[statement.name], ([], [], []))
        if statement.is_aggregation:
            aggregations.append(statement)
        elif statement.varies:
            clients.append(statement)
        else:
            server.append(statement)
    return [Level(*map(tuple, levels[number])) for number in sorted(levels)]
