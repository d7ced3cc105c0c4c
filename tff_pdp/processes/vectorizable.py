"""Attaches a second implementation, for a stack (batch) of clients, to a function that is written for one client.

TFF computations are written for one client. An engine that computes several clients at once can convert a graph for
one client into a graph for a stack by `tf.vectorized_map`; an attached implementation takes precedence. Attaching only
changes a function's name in the graph, so that other engines run the computation unchanged.
"""

import contextlib
import dataclasses
import functools
import importlib
import re
import types
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tff_pdp.processes.stacked_convolutions import batched_convolutions

_rules: dict[str, "StackedRule"] = {}
_NAME = re.compile(r"vectorizable_[0-9a-f]{32}")


@dataclasses.dataclass
class StackedRule:
    """The implementation of a function for a stack of clients.

    Attributes:
      function: function with the same arguments and results as the function for one client, but with a leading axis of
        clients on all results, and on all arguments except the shared ones.
      num_shared: number of shared arguments, which are equal for all clients and come first.
      summed: function with the arguments of `function`, which returns the sums of the results over the clients; None if
        there is no such function. An engine that needs only the sums calls this function in place of `function`.
      structure: nested structure of the arguments; None until the function for one client has been traced.
    """

    function: Callable[..., Any]
    num_shared: int
    summed: Callable[..., Any] | None = None
    structure: Any = None

    def is_shared(self) -> list[bool]:
        """Returns, for each tensor of the flattened arguments, whether all clients share the tensor."""
        return [
            position < self.num_shared
            for position, argument in enumerate(self.structure)
            for _ in tf.nest.flatten(argument)
        ]

    def call(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        """Calls `function` with flattened arguments, and returns flattened results."""
        return tf.nest.flatten(self.function(*tf.nest.pack_sequence_as(self.structure, arguments)))

    def call_summed(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        """Calls `summed`, which must not be None, with flattened arguments, and returns flattened sums."""
        if self.summed is None:
            raise TypeError("the function has no form that adds up its results")
        return tf.nest.flatten(self.summed(*tf.nest.pack_sequence_as(self.structure, arguments)))


def vectorizable(
    function: Callable[..., Any],
    stacked: Callable[..., Any],
    *,
    num_shared: int,
    summed: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns a function to be called in place of `function` in a TensorFlow computation, with `stacked` attached.

    Args:
      function: function for one client, whose arguments and results are nests of tensors.
      stacked: function for a stack of clients; see `StackedRule.function`.
      num_shared: number of shared arguments, which are equal for all clients and come first.
      summed: function that adds up the results over the clients; see `StackedRule.summed`.
    """
    # Unlike a counter, a UUID cannot name another function in the process that a computation is sent to.
    name = f"vectorizable_{uuid.uuid4().hex}"
    rule = _rules[name] = StackedRule(stacked, num_shared, summed)

    def traced(*arguments: Any) -> Any:
        structure = tf.nest.map_structure(lambda _: 0, arguments)
        if rule.structure is not None:
            tf.nest.assert_same_structure(rule.structure, structure)
        rule.structure = structure
        return function(*arguments)

    traced.__name__ = name
    return tf.function(traced, autograph=False)


def find_rule(function_name: str) -> StackedRule | None:
    """Finds the rule of a function by the function's name in a graph; None without a rule."""
    match = _NAME.search(function_name)
    return _rules.get(match.group()) if match else None


def map_stack(function: Callable[..., Any], elements: Any, *, may_compile: bool = False) -> Any:
    """Maps a function over stacked elements, with the same bits as `tf.vectorized_map`, at less cost.

    TensorFlow 2.14 copies every stacked element before the first operation, and reshapes the stacked inputs of each
    elementwise operation to one rank, by six operations and more for every input, even if the ranks are known. This
    function leaves out the copies, and adds an axis only where ranks differ, by one operation.

    Args:
      function: function of one element, a nest of tensors without the first axis.
      elements: nest of tensors `[elements, ...]`; all first axes have the same size.
      may_compile: whether XLA may compile the function in a `compiled_stacks` block. XLA fuses operations, and may
        compute a number twice with different roundings. So nothing may be compiled whose guarantee needs the norm and
        the sum of gradients to be computed from the same numbers.
    """
    compiled = _compiled.get()
    if may_compile and compiled is not None:
        compiled.append(function)
        return _map_compiled(function, elements)
    stacked = tf.nest.map_structure(tf.convert_to_tensor, elements)
    token = _mapped.set(tuple(tf.nest.flatten(stacked)))
    try:
        return _control_flow.pfor(
            lambda index: function(tf.nest.map_structure(lambda column: tf.gather(column, index), stacked)),
            tf.shape(tf.nest.flatten(stacked)[0])[0],
        )
    finally:
        _mapped.reset(token)


@contextlib.contextmanager
def compiled_stacks() -> Iterator[list[Any]]:
    """Has XLA compile what `map_stack` traces in the `with` block and may compile.

    Yields:
      The functions that will be compiled, empty at the start of the block.
    """
    functions: list[Any] = []
    token = _compiled.set(functions)
    try:
        yield functions
    finally:
        _compiled.reset(token)


_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)
# XLA compiles for each number of clients anew. Numbers above this one are rounded up, by at most an eighth.
_MOST_EXACT_CLIENTS = 16


def _map_compiled(function: Callable[..., Any], elements: Any) -> Any:
    num_clients = tf.shape(tf.nest.flatten(elements)[0])[0]
    places = _compiled_places(num_clients)

    @tf.function(jit_compile=True, autograph=False)
    def compiled(padded: Any) -> Any:
        # XLA makes one operation of all slices of a convolution; its own convolutions are many times as slow on a CPU.
        with batched_convolutions(True):
            return map_stack(function, padded)

    results = compiled(tf.nest.map_structure(lambda values: tf.gather(values, places), elements))
    return tf.nest.map_structure(lambda values: values[:num_clients], results)


def _compiled_places(num_clients: tf.Tensor) -> tf.Tensor:
    """Returns the client of each place in a compiled stack, int32; the last client fills places beyond the stack.

    Cohorts that are drawn at random have a new number of clients nearly every round.
    """
    doublings = tf.reduce_sum(tf.cast(num_clients > [_MOST_EXACT_CLIENTS << k for k in range(20)], tf.int32))
    unit = tf.bitwise.left_shift(1, doublings)
    return tf.minimum(tf.range((num_clients + unit - 1) // unit * unit), num_clients - 1)


# The stacked elements of the innermost `map_stack` that is being traced; None outside.
_mapped: ContextVar[tuple[tf.Tensor, ...] | None] = ContextVar("stacked elements that are mapped", default=None)
_control_flow: Any = importlib.import_module("tensorflow.python.ops.parallel_for.control_flow_ops")
# The class that prepares the inputs of one operation. Imported by path: the package has a function named as the module.
_pfor: Any = importlib.import_module("tensorflow.python.ops.parallel_for.pfor")
_Inputs = _pfor._PforInput
_expand = _Inputs.expanddim_inputs_for_broadcast


def _expand_where_ranks_differ(self: Any) -> None:
    ranks = [given.t.shape.rank for given in self.inputs]
    if _mapped.get() is None or None in ranks:
        _expand(self)
        return
    # Ranks as if the inputs that clients share were stacked, too.
    ranks = [rank if given.is_stacked else rank + 1 for rank, given in zip(ranks, self.inputs, strict=True)]
    for place, (rank, given) in enumerate(zip(ranks, self.inputs, strict=True)):
        expanded = given.t
        for _ in range(max(ranks) - rank if given.is_stacked else 0):
            expanded = tf.expand_dims(expanded, 1)
        self._inputs[place] = given._replace(t=expanded)


_Inputs.expanddim_inputs_for_broadcast = _expand_where_ranks_differ


_convert_gather = _pfor._pfor_converter_registry["GatherV2"]


def _gather_without_copies(pfor_input: Any) -> Any:
    """Converts `tf.gather` for a stack: all rows of a mapped element, in order, are the element itself."""
    rows, indices = pfor_input.inputs[0], pfor_input.inputs[1]
    is_every_row = indices.t is pfor_input.pfor.all_indices and not rows.is_stacked
    if is_every_row and any(rows.t is element for element in _mapped.get() or ()):
        return _pfor.wrap(rows.t, True)
    return _convert_gather(pfor_input)


_pfor._pfor_converter_registry["GatherV2"] = _gather_without_copies


@_pfor.RegisterPFor("Bitcast")
def _bitcast_of_all(pfor_input: Any) -> Any:
    """Converts `tf.bitcast` for a stack; TensorFlow 2.14 can only loop over the clients."""
    return _pfor.wrap(tf.bitcast(pfor_input.stacked_input(0), pfor_input.get_attr("type")), True)


# The functions with which TensorFlow converts calls and loops. AutoGraph would rewrite them, half a second in each
# process, and find nothing to change.
_pfor.def_function = types.SimpleNamespace(function=functools.partial(tf.function, autograph=False))
