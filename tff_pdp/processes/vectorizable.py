"""Attaches to a function for one client its own form for a stack of clients.

TFF computations are written for one client. An engine that computes several at once has `tf.vectorized_map` to turn
their graphs into graphs for a stack; where a better form exists, it is attached here. The form leaves no trace in the
computation but the name of a function in its graph, so every other engine runs the computation as it is.
"""

import dataclasses
import importlib
import re
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

_rules: dict[str, "StackedRule"] = {}
_NAME = re.compile(r"vectorizable_[0-9a-f]{32}")


@dataclasses.dataclass
class StackedRule:
    """Holds the form for a stack of clients.

    Attributes:
      function: as the function for one client, with a leading axis on all arguments but the shared ones, and on all
        results.
      num_shared: number of the arguments, from the first, that all clients share.
      structure: the arguments' nest, known once the function for one client has been traced.
    """

    function: Callable[..., Any]
    num_shared: int
    structure: Any = None

    def is_shared(self) -> list[bool]:
        """Tells of each flat argument whether it is shared."""
        return [
            position < self.num_shared
            for position, argument in enumerate(self.structure)
            for _ in tf.nest.flatten(argument)
        ]

    def call(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the flat results for flat arguments."""
        return tf.nest.flatten(self.function(*tf.nest.pack_sequence_as(self.structure, arguments)))


def vectorizable(function: Callable[..., Any], stacked: Callable[..., Any], *, num_shared: int) -> Callable[..., Any]:
    """Returns a function to be called in place of `function` in a TensorFlow computation, with `stacked` attached.

    Args:
      function: for one client; of tensors in nests, and nothing else.
      stacked: the same for a stack of clients; see `StackedRule`.
      num_shared: number of the arguments, from the first, that all clients share.
    """
    # Unlike a number, it cannot be another function's in the process that a computation is sent to.
    name = f"vectorizable_{uuid.uuid4().hex}"
    rule = _rules[name] = StackedRule(stacked, num_shared)

    def traced(*arguments: Any) -> Any:
        structure = tf.nest.map_structure(lambda _: 0, arguments)
        if rule.structure is not None:
            tf.nest.assert_same_structure(rule.structure, structure)
        rule.structure = structure
        return function(*arguments)

    traced.__name__ = name
    return tf.function(traced, autograph=False)


def find_rule(function_name: str) -> StackedRule | None:
    """Finds the rule of a function of a graph, by the function's name there; None where it has none."""
    match = _NAME.search(function_name)
    return _rules.get(match.group()) if match else None


def map_stack(function: Callable[..., Any], elements: Any) -> Any:
    """Maps like `tf.vectorized_map`, traced in about half of its time, with its results to the last bit.

    Before each operation on elements TensorFlow 2.14 brings its stacked inputs to one rank, by six operations for every
    input, even where the ranks are known to be equal already. Such reshapes are left out here.
    """
    token = _spares_reshapes.set(True)
    try:
        return tf.vectorized_map(function, elements)
    finally:
        _spares_reshapes.reset(token)


_spares_reshapes: ContextVar[bool] = ContextVar("spares reshapes", default=False)
# The class that prepares the inputs of one operation; the package has a function of the module's name.
_pfor: Any = importlib.import_module("tensorflow.python.ops.parallel_for.pfor")
_Inputs = _pfor._PforInput
_expand = _Inputs.expanddim_inputs_for_broadcast


def _expand_where_ranks_differ(self: Any) -> None:
    ranks = [given.t.shape.rank for given in self.inputs]
    if _spares_reshapes.get() and None not in ranks:
        # As if the inputs that clients share were stacked, too.
        ranks = [rank if given.is_stacked else rank + 1 for rank, given in zip(ranks, self.inputs, strict=True)]
        if all(rank == max(ranks) for rank, given in zip(ranks, self.inputs, strict=True) if given.is_stacked):
            return
    _expand(self)


_Inputs.expanddim_inputs_for_broadcast = _expand_where_ranks_differ


@_pfor.RegisterPFor("Bitcast")
def _bitcast_of_all(pfor_input: Any) -> Any:
    """Numbers of one size as other numbers: TensorFlow 2.14 has a form for single ones only, and goes through all."""
    return _pfor.wrap(tf.bitcast(pfor_input.stacked_input(0), pfor_input.get_attr("type")), True)
