"""Evaluates the building blocks of a computation while a TensorFlow function is traced.

Rounds do not repeat the evaluation: references, selections and lambdas are resolved once, and only TensorFlow
operations remain in the traced function.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines import structures
from tff_pdp.engines.inprocess.graphs import Graph
from tff_pdp.errors import EngineError

# (graph, argument leaves) -> result leaves.
CallGraph = Callable[[Graph, list[Any]], list[Any]]


class Evaluator:
    """Evaluates expressions and applies functions; `call_graph` decides how graphs are called.

    Attributes:
      environment: values by name, each a `Struct` of leaves, or a leaf.
    """

    def __init__(self, environment: Mapping[str, Any], call_graph: CallGraph = lambda graph, inputs: graph(inputs)):
        self.environment = dict(environment)
        self._call_graph = call_graph

    def evaluate(self, block: Any) -> Any:
        """Evaluates an expression.

        Raises:
          EngineError: the expression has an intrinsic that this engine does not support; the message names it.
        """
        match block:
            case _tff.Reference():
                return self.environment[block.name]
            case _tff.Selection():
                return self.evaluate(block.source)[block.as_index()]
            case _tff.StructBlock():
                return _tff.Struct([(name, self.evaluate(member)) for name, member in _tff.iter_elements(block)])
            case _tff.Literal():
                value: Any = block.value
                return tf.constant(value, dtype=block.type_signature.dtype)
            case _tff.Block():
                inside = self._with({})
                for name, value in block.locals:
                    inside.environment[name] = inside.evaluate(value)
                return inside.evaluate(block.result)
            case _tff.Call():
                return self.apply(block.function, block.argument)
            case _:
                raise EngineError(
                    f"The in-process engine cannot evaluate a {type(block).__name__} of type "
                    f"{block.type_signature.compact_representation()}."
                )

    def apply(self, function: Any, argument: Any) -> Any:
        """Evaluates a call of `function`; the argument is an expression, or None."""
        if isinstance(function, _tff.Intrinsic):
            if function.uri not in _SEQUENCE_INTRINSICS:
                raise unsupported(function)
            return _SEQUENCE_INTRINSICS[function.uri](self, argument)
        return self.call(function, None if argument is None else self.evaluate(argument))

    def call(self, function: Any, argument: Any) -> Any:
        """Calls a function on a value.

        Raises:
          EngineError: the function is neither a lambda nor a compiled computation.
        """
        if isinstance(function, _tff.Lambda):
            bound = {} if function.parameter_name is None else {function.parameter_name: argument}
            return self._with(bound).evaluate(function.result)
        if isinstance(function, _tff.CompiledComputation):
            signature: Any = function.type_signature
            leaves = [] if signature.parameter is None else structures.flatten(argument, signature.parameter)
            return structures.unflatten(self._call_graph(Graph(function), leaves), signature.result)
        raise EngineError(f"The in-process engine cannot call {function.compact_representation()}.")

    def _with(self, bound: Mapping[str, Any]) -> "Evaluator":
        return Evaluator({**self.environment, **bound}, self._call_graph)


def unsupported(intrinsic: Any) -> EngineError:
    """Builds the error for an intrinsic that this engine does not support."""
    return EngineError(
        f"The in-process engine does not support the intrinsic {intrinsic.uri!r} "
        f"({intrinsic.type_signature.compact_representation()}); try the engine 'native'."
    )


def _sequence_map(evaluator: Evaluator, argument: Any) -> tf.Tensor:
    function, sequence = argument
    elements = _dataset(evaluator.evaluate(sequence), sequence.type_signature.element)

    def mapped(*members: Any) -> Any:
        # A data set of tuples passes a tuple's members as separate arguments.
        is_spread = isinstance(elements.element_spec, tuple)
        value = _element(members if is_spread else members[0], function.type_signature.parameter)
        return _tff.to_container(evaluator.call(function, value), function.type_signature.result)

    return tf.data.experimental.to_variant(elements.map(mapped))


def _sequence_reduce(evaluator: Evaluator, argument: Any) -> Any:
    sequence, zero, function = argument
    zero_type, element_type = zero.type_signature, sequence.type_signature.element

    def reduced(state: Any, element: Any) -> Any:
        value = _tff.Struct([(None, structures.unflatten(state, zero_type)), (None, _element(element, element_type))])
        return tuple(structures.flatten(evaluator.call(function, value), zero_type))

    initial = tuple(map(tf.convert_to_tensor, structures.flatten(evaluator.evaluate(zero), zero_type)))
    result = _dataset(evaluator.evaluate(sequence), element_type).reduce(initial, reduced)
    return structures.unflatten(result, zero_type)


def _sequence_sum(evaluator: Evaluator, argument: Any) -> Any:
    element_type = argument.type_signature.element
    initial = tuple(tf.zeros(spec.shape, spec.dtype) for spec in structures.leaf_specs(element_type))
    result = _dataset(evaluator.evaluate(argument), element_type).reduce(
        initial,
        lambda state, element: tuple(
            a + b for a, b in zip(state, structures.flatten(_element(element, element_type), element_type), strict=True)
        ),
    )
    return structures.unflatten(result, element_type)


_SEQUENCE_INTRINSICS: Mapping[str, Callable[[Evaluator, Any], Any]] = {
    "sequence_map": _sequence_map,
    "sequence_reduce": _sequence_reduce,
    "sequence_sum": _sequence_sum,
}


def _dataset(variant: tf.Tensor, element_type: Any) -> tf.data.Dataset:
    return tf.data.experimental.from_variant(variant, structures.element_spec(element_type))


def _element(value: Any, element_type: Any) -> Any:
    return _tff.from_container(value, recursive=True) if isinstance(element_type, _tff.StructType) else value
