"""Aggregates clients' values in running sums: the server starts the sums, clients are added, the server finishes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines import structures
from tff_pdp.engines.inprocess.evaluation import Evaluator
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.program import Statement, without_placement
from tff_pdp.engines.inprocess.stacked import as_column, stack

_ANY_SHAPE: Any = None


class _Sum(NamedTuple):
    combine: Callable[[Any, Any], Any]
    reduce: Callable[..., Any]
    first: Callable[[tf.DType], Any]


_PLUS = _Sum(tf.add, tf.reduce_sum, lambda dtype: 0)
_SUMS = {
    "federated_max": _Sum(tf.maximum, tf.reduce_max, lambda dtype: dtype.min),
    "federated_mean": _PLUS,
    "federated_min": _Sum(tf.minimum, tf.reduce_min, lambda dtype: dtype.max),
    "federated_sum": _PLUS,
    "federated_weighted_mean": _PLUS,
}


def specs(statement: Statement) -> Sequence[tf.TensorSpec]:
    """Returns shapes and dtypes of an aggregation's running sums."""
    if statement.uri == "federated_aggregate":
        return structures.leaf_specs(_accumulate(statement).type_signature.result)
    found = structures.leaf_specs(statement.value_type)
    if statement.uri == "federated_weighted_mean":
        found = [*found, *structures.leaf_specs(without_placement(statement.value.argument[1].type_signature))]
    # A sum over values of unknown shape starts from a scalar.
    return [spec if spec.shape.is_fully_defined() else tf.TensorSpec(_ANY_SHAPE, spec.dtype) for spec in found]


def start(statement: Statement, evaluator: Evaluator) -> Leaves:
    """Returns the sums before any client is added."""
    if statement.uri == "federated_aggregate":
        zero = statement.value.argument[1]
        return structures.flatten(evaluator.evaluate(zero), _accumulate(statement).type_signature.result)
    return [
        tf.fill(
            spec.shape if spec.shape.rank is not None else [],
            tf.constant(_SUMS[statement.uri or ""].first(spec.dtype), spec.dtype),
        )
        for spec in specs(statement)
    ]


def add(statement: Statement, sums: Leaves, evaluator: Evaluator, num_clients: tf.Tensor | None) -> Leaves:
    """Returns the sums after adding one client or, if `num_clients` is given, a stack of `num_clients` clients."""
    if statement.uri == "federated_aggregate":
        columns = _leaves_of(statement.value.argument[0], evaluator, num_clients)
        if num_clients is None:
            return _accumulated(statement, sums, columns)
        return _accumulated_in_turn(statement, sums, columns, num_clients)
    combine, reduce, _ = _SUMS[statement.uri or ""]
    if num_clients is not None and statement.uri in ("federated_mean", "federated_sum"):
        leaves = _leaves_of(statement.value.argument, evaluator, None)
        values = [as_column(leaf).total(num_clients) for leaf in leaves]
    else:
        values = _values(statement, evaluator, num_clients)
        if num_clients is not None:
            values = [reduce(value, axis=0) for value in values]
    return [combine(total, value) for total, value in zip(sums, values, strict=True)]


def merge(statement: Statement, first: Leaves, second: Leaves) -> Leaves:
    """Merges the sums over two sets of clients."""
    if statement.uri != "federated_aggregate":
        combine = _SUMS[statement.uri or ""].combine
        return [combine(one, other) for one, other in zip(first, second, strict=True)]
    sum_type = _accumulate(statement).type_signature.result
    pair = [(None, structures.unflatten(sums, sum_type)) for sums in (first, second)]
    return structures.flatten(Evaluator({}).call(statement.value.argument[3], _tff.Struct(pair)), sum_type)


def finish(statement: Statement, sums: Leaves, num_clients: tf.Tensor, evaluator: Evaluator) -> Any:
    """Returns the aggregate, a value at the server, from the sums over all clients."""
    if statement.uri == "federated_aggregate":
        total = structures.unflatten(sums, _accumulate(statement).type_signature.result)
        return evaluator.call(statement.value.argument[4], total)
    if statement.uri == "federated_mean":
        sums = [total / tf.cast(num_clients, total.dtype) for total in sums]
    if statement.uri == "federated_weighted_mean":
        *sums, weight = sums
        sums = [total / tf.cast(weight, total.dtype) for total in sums]
    return structures.unflatten(sums, statement.value_type)


def finished_by(statement: Statement) -> list[Any]:
    """Returns the expressions that `finish` evaluates."""
    return [statement.value.argument[4]] if statement.uri == "federated_aggregate" else []


def _values(statement: Statement, evaluator: Evaluator, num_clients: tf.Tensor | None) -> Leaves:
    argument = statement.value.argument
    if statement.uri != "federated_weighted_mean":
        return _leaves_of(argument, evaluator, num_clients)
    values = _leaves_of(argument[0], evaluator, num_clients)
    (weight,) = _leaves_of(argument[1], evaluator, num_clients)
    weights = [tf.cast(weight, value.dtype) for value in values]
    if num_clients is not None:
        weights = [
            tf.reshape(own, [-1, *[1] * (value.shape.rank - 1)]) for own, value in zip(weights, values, strict=True)
        ]
    return [*(value * own for value, own in zip(values, weights, strict=True)), weight]


def _leaves_of(expression: Any, evaluator: Evaluator, num_clients: tf.Tensor | None) -> Leaves:
    """Returns the leaves of an expression's value; if `num_clients` is given, stacked over this number of clients."""
    leaves = structures.flatten(evaluator.evaluate(expression), without_placement(expression.type_signature))
    return leaves if num_clients is None else [stack(leaf, num_clients) for leaf in leaves]


def _accumulated(statement: Statement, sums: Leaves, value: list[Any]) -> Leaves:
    accumulate = _accumulate(statement)
    state_type, value_type = (member for _, member in _tff.iter_elements(accumulate.type_signature.parameter))
    state = structures.unflatten(sums, state_type)
    argument = _tff.Struct([(None, state), (None, structures.unflatten(value, value_type))])
    return structures.flatten(Evaluator({}).call(accumulate, argument), accumulate.type_signature.result)


def _accumulated_in_turn(statement: Statement, sums: Leaves, rows: Leaves, num_clients: tf.Tensor) -> Leaves:
    def body(index: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return index + 1, *_accumulated(statement, list(state), [row[index] for row in rows])

    invariants = [tf.TensorShape([]), *(spec.shape for spec in specs(statement))]
    _, *state = tf.while_loop(
        lambda index, *_: index < num_clients, body, [tf.constant(0), *sums], shape_invariants=invariants
    )
    return list(state)


def _accumulate(statement: Statement) -> Any:
    return statement.value.argument[2]
