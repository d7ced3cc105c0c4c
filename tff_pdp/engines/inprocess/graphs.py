"""Imports TensorFlow graphs of a computation into the TensorFlow function that is being traced."""

import contextlib
import contextvars
import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tff_pdp.errors import EngineError

# A value's tensors in the order of its type, in which form values enter and leave functions.
Leaves = list[tf.Tensor]

_CPU_ONLY = re.compile(r"Dataset|Iterator|Table|^(Parse|Decode|Encode|String|Regex|Lookup|As?String)")
_REFERENCE_VARIABLES = {"AutoReloadVariable", "Variable", "VariableV2"}
_TABLES = {
    "HashTableV2": "AnonymousHashTable",
    "MutableHashTableV2": "AnonymousMutableHashTable",
    "MutableHashTableOfTensorsV2": "AnonymousMutableHashTableOfTensors",
    "MutableDenseHashTableV2": "AnonymousMutableDenseHashTable",
}
# TensorFlow's name for a variable that is created and destroyed with its handle.
_ANONYMOUS = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"

_step: contextvars.ContextVar[Any] = contextvars.ContextVar("step")


class Graph:
    """One TensorFlow computation of a TFF computation: a graph with named inputs and outputs.

    Attributes:
      operations: types of all operations of the graph, and of the graph's functions.
    """

    def __init__(self, block: Any):
        """Reads the graph.

        Raises:
          EngineError: the computation is not a TensorFlow graph, or has a variable that calls would share.
        """
        kind = block.proto.WhichOneof("computation")
        if kind != "tensorflow":
            raise EngineError(f"The in-process engine runs TensorFlow, not {kind!r} computations.")
        self._proto = block.proto.tensorflow
        self.inputs = _tensor_names(self._proto.parameter)
        self.outputs = _tensor_names(self._proto.result)
        graph_def = tf.compat.v1.GraphDef()
        self._proto.graph_def.Unpack(graph_def)
        if self._proto.initialize_op:
            _run_first(graph_def, self._proto.initialize_op)
        _keep_needed(graph_def, self.outputs)
        _check_variables(graph_def)
        _rename_functions(graph_def)
        _make_resources_anonymous(graph_def)
        _register(graph_def.library.function)
        self.graph_def = graph_def
        self._imported = _without_inputs(graph_def, self._given())
        self.operations = frozenset(node.op for node in _all_nodes(graph_def))

    def __call__(self, inputs: Sequence[tf.Tensor]) -> Leaves:
        """Imports the graph into the current graph, and returns the imported outputs."""
        mapping = dict(zip(self.inputs, inputs, strict=True))
        if self._proto.session_token_tensor_name:
            mapping[self._proto.session_token_tensor_name] = tf.constant("")
        needed = {name.removeprefix("^") for node in self.graph_def.node for name in node.input} | set(self.outputs)
        mapping = {name: tensor for name, tensor in mapping.items() if _is_used(name, needed)}
        with _on_cpu_where_needed():
            return tf.graph_util.import_graph_def(
                self._imported, input_map=mapping, return_elements=self.outputs, name="computation"
            )

    def _given(self) -> list[str]:
        """Returns the names of the tensors that a call replaces."""
        token = self._proto.session_token_tensor_name
        return [*self.inputs, *([token] if token else [])]


def _is_used(name: str, needed: set[str]) -> bool:
    operation, _, index = name.partition(":")
    return name in needed or (index in ("", "0") and (operation in needed or f"{operation}:0" in needed))


def _on_cpu_where_needed():
    """Places operations on data sets, tables and strings on the CPU; only the CPU has kernels for them."""
    outer = tf.compat.v1.get_default_graph()

    def device(operation: tf.Operation) -> str:
        values = [*operation.inputs, *operation.outputs]
        on_cpu = _CPU_ONLY.search(operation.type) or any(v.dtype in (tf.string, tf.variant) for v in values)
        return "/CPU:0" if on_cpu else ""

    return outer.device(device)


def _without_inputs(graph_def: Any, given: Iterable[str]) -> Any:
    """Returns the graph without the placeholders that a call replaces, for which XLA has no kernel."""
    waited_for = {name[1:] for node in graph_def.node for name in node.input if name.startswith("^")}
    replaced = {operation_of(name) for name in given} - waited_for
    kept = [node for node in graph_def.node if node.op != "Placeholder" or node.name not in replaced]
    return tf.compat.v1.GraphDef(node=kept, library=graph_def.library, versions=graph_def.versions)


def _tensor_names(binding: Any) -> list[str]:
    kind = binding.WhichOneof("binding")
    if kind == "tensor":
        return [binding.tensor.tensor_name]
    if kind == "sequence":
        return [binding.sequence.variant_tensor_name]
    return [name for element in binding.struct.element for name in _tensor_names(element)]


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


@contextlib.contextmanager
def tracing(step: Any) -> Iterator[None]:
    """Ties functions registered in the `with` block to the traced graph `step`, so that all are deleted together."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _register(functions: Iterable[Any]) -> None:
    """Registers functions of a graph for the function that is being traced.

    An import adds the functions to the traced graph. At run time they are looked up in TensorFlow's context, to which
    TensorFlow copies only functions that it has traced itself. The context counts registrations, so a function of
    several steps stays until the last of these steps is deleted.
    """
    eager_context: Any = context.context()
    for function in functions:
        eager_context.add_function_def(function)
        weakref.finalize(_step.get(), eager_context.remove_function, function.signature.name).atexit = False


def _rename_functions(graph_def: Any) -> None:
    """Gives the library's functions unique names.

    All functions of a process share one name space, and TensorFlow refuses a second definition of a name. Graphs traced
    from the same Python function in different places have equal names for different functions.
    """
    library = graph_def.library
    if not library.function:
        return
    digest = hashlib.sha256(library.SerializeToString(deterministic=True)).hexdigest()[:12]
    renamed = {function.signature.name: f"{function.signature.name}_{digest}" for function in library.function}
    for function in library.function:
        function.signature.name = renamed[function.signature.name]
        _rename_in_attributes(function.attr.values(), renamed)
    for gradient in library.gradient:
        gradient.function_name = renamed.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = renamed.get(gradient.gradient_func, gradient.gradient_func)
    for node in _all_nodes(graph_def):
        node.op = renamed.get(node.op, node.op)
        _rename_in_attributes(node.attr.values(), renamed)


def _rename_in_attributes(attributes: Iterable[Any], renamed: dict[str, str]) -> None:
    for attribute in attributes:
        for function in _functions_in(attribute):
            function.name = renamed.get(function.name, function.name)
            _rename_in_attributes(function.attr.values(), renamed)
        # `forward_function_name` and `backward_function_name` are plain strings.
        if attribute.WhichOneof("value") == "s" and attribute.s.decode("utf-8", "replace") in renamed:
            attribute.s = renamed[attribute.s.decode()].encode()


def _functions_in(attribute: Any) -> list[Any]:
    kind = attribute.WhichOneof("value")
    return [attribute.func] if kind == "func" else list(attribute.list.func) if kind == "list" else []


def _run_first(graph_def: Any, operation: str) -> None:
    """Makes all operations wait for `operation`, except those that it needs."""
    before = _ancestors(graph_def, [operation])
    for node in graph_def.node:
        if node.name not in before and node.op != "Placeholder":
            node.input.append(f"^{operation}")


def _keep_needed(graph_def: Any, outputs: Sequence[str]) -> None:
    """Drops nodes that no output waits for: TFF does not run them; a traced function would, if they have effects."""
    needed = _ancestors(graph_def, map(operation_of, outputs))
    kept = [node for node in graph_def.node if node.name in needed]
    for node in kept:
        # Gradients ask to be placed with other nodes, some of which have been dropped. There is only one device, and
        # `tf.vectorized_map` cannot convert a node with such a request.
        node.attr.pop("_class", None)
    del graph_def.node[:]
    graph_def.node.extend(kept)
    library = {function.signature.name: function for function in graph_def.library.function}
    called = _reached(_called_by(kept), lambda name: _called_by(library[name].node_def) if name in library else ())
    functions = [function for name, function in library.items() if name in called]
    del graph_def.library.function[:]
    graph_def.library.function.extend(functions)


def _called_by(nodes: Iterable[Any]) -> Iterator[str]:
    for node in nodes:
        yield node.op
        yield from _named_in(node.attr.values())


def _named_in(attributes: Iterable[Any]) -> Iterator[str]:
    for attribute in attributes:
        for function in _functions_in(attribute):
            yield function.name
            yield from _named_in(function.attr.values())


def _ancestors(graph_def: Any, operations: Iterable[str]) -> set[str]:
    """Returns the names of these operations and of all operations that they wait for."""
    nodes = {node.name: node for node in graph_def.node}
    return _reached(operations, lambda name: (operation_of(source) for source in nodes[name].input))


def _reached(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """Returns the names in `start`, and all names that `following` reaches from them."""
    found: set[str] = set()
    pending = list(start)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += following(name)
    return found


def operation_of(source: str) -> str:
    """Returns the name of the operation in a node's input, such as `a` in `^a` and in `a:1`."""
    return source.removeprefix("^").partition(":")[0]


def _check_variables(graph_def: Any) -> None:
    """Refuses variables of TensorFlow 1, which keep their values from call to call under any name."""
    for node in _all_nodes(graph_def):
        if node.op in _REFERENCE_VARIABLES:
            raise EngineError(
                f"The in-process engine does not run {node.op!r} (operation {node.name!r}), a variable of TensorFlow 1 "
                "that calls would share; use tf.Variable, or create the variable with use_resource=True."
            )


def _make_resources_anonymous(graph_def: Any) -> None:
    """Gives every call its own variables and tables: with a shared name, a call would find those of earlier calls."""
    for node in _all_nodes(graph_def):
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s = _ANONYMOUS
        elif node.op in _TABLES:
            node.op = _TABLES[node.op]
            for attribute in ("container", "shared_name", "use_node_name_sharing"):
                node.attr.pop(attribute, None)
