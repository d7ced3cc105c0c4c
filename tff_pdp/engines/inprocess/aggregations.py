"""Combines values of clients into one: sums that start at the server, take in clients, and are finished."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines import structures
from tff_pdp.engines.inprocess.evaluation import Evaluator
from tff_pdp.engines.inprocess.graphs import Leaves
from tff_pdp.engines.inprocess.program import Statement, without_placement
from tff_pdp.engines.inprocess.stacked import stack

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


def specs(statement: Statement) -> list[tf.TensorSpec]:
    """Returns shapes and dtypes of an aggregation's sums between two clients."""
    if statement.uri == "federated_aggregate":
        return structures.leaf_specs(_accumulate(statement).type_signature.result)
    found = structures.leaf_specs(statement.value_type)
    if statement.uri == "federated_weighted_mean":
        found = [*found, *structures.leaf_specs(without_placement(statement.value.argument[1].type_signature))]
    # A sum over values of open shape starts from a scalar.
    return [spec if spec.shape.is_fully_defined() else tf.TensorSpec(_ANY_SHAPE, spec.dtype) for spec in found]


def start(statement: Statement, evaluator: Evaluator) -> Leaves:
    """Returns the sums before any client."""
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


def add_one(statement: Statement, sums: Leaves, evaluator: Evaluator) -> Leaves:
    """Adds one more client to the sums."""
    if statement.uri == "federated_aggregate":
        return _accumulated(statement, sums, _evaluated(statement.value.argument[0], evaluator))
    values = _values(statement, evaluator)
    combine = _SUMS[statement.uri or ""].combine
    return [combine(total, value) for total, value in zip(sums, values, strict=True)]


def add_stacked(statement: Statement, sums: Leaves, evaluator: Evaluator, num_clients: tf.Tensor) -> Leaves:
    """Adds a stack of clients to the sums."""
    if statement.uri == "federated_aggregate":
        columns = _evaluated(statement.value.argument[0], evaluator)
        rows = [stack(column, num_clients) for column in columns]
        return _accumulated_in_turn(statement, sums, rows, num_clients)
    combine, reduce, _ = _SUMS[statement.uri or ""]
    values = _stacked_values(statement, evaluator, num_clients)
    return [combine(total, reduce(value, axis=0)) for total, value in zip(sums, values, strict=True)]


def merge(statement: Statement, first: Leaves, second: Leaves) -> Leaves:
    """Merges the sums over two sets of clients."""
    if statement.uri != "federated_aggregate":
        combine = _SUMS[statement.uri or ""].combine
        return [combine(one, other) for one, other in zip(first, second, strict=True)]
    sum_type = _accumulate(statement).type_signature.result
    pair = [(None, structures.unflatten(sums, sum_type)) for sums in (first, second)]
    return structures.flatten(Evaluator({}).call(statement.value.argument[3], _tff.Struct(pair)), sum_type)


def finish(statement: Statement, sums: Leaves, num_clients: tf.Tensor, evaluator: Evaluator) -> Any:
    """Makes the value at the server of the sums over all clients."""
    if statement.uri == "federated_aggregate":
        total = structures.unflatten(sums, _accumulate(statement).type_signature.result)
        return evaluator.call(statement.value.argument[4], total)
    if statement.uri == "federated_mean":
        sums = [total / tf.cast(num_clients, total.dtype) for total in sums]
    if statement.uri == "federated_weighted_mean":
        *sums, weight = sums
        sums = [total / tf.cast(weight, total.dtype) for total in sums]
    return structures.unflatten(sums, statement.value_type)


def _values(statement: Statement, evaluator: Evaluator) -> list[Any]:
    argument = statement.value.argument
    if statement.uri != "federated_weighted_mean":
        return _evaluated(argument, evaluator)
    values = _evaluated(argument[0], evaluator)
    weight = evaluator.evaluate(argument[1])
    return [*(value * tf.cast(weight, value.dtype) for value in values), weight]


def _stacked_values(statement: Statement, evaluator: Evaluator, num_clients: tf.Tensor) -> Leaves:
    argument = statement.value.argument
    if statement.uri != "federated_weighted_mean":
        return [stack(column, num_clients) for column in _evaluated(argument, evaluator)]
    stacks = [stack(column, num_clients) for column in _evaluated(argument[0], evaluator)]
    weight = stack(evaluator.evaluate(argument[1]), num_clients)
    weighted = [
        value * tf.reshape(tf.cast(weight, value.dtype), [-1, *[1] * (value.shape.rank - 1)]) for value in stacks
    ]
    return [*weighted, weight]


def _evaluated(expression: Any, evaluator: Evaluator) -> list[Any]:
    """Returns the leaves of an expression's value at one place."""
    return structures.flatten(evaluator.evaluate(expression), without_placement(expression.type_signature))


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
