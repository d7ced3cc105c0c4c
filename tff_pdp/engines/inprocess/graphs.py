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

# The tensors of a value, in the order of its type: so values enter and leave functions.
Leaves = list[tf.Tensor]

_CPU_ONLY = re.compile(r"Dataset|Iterator|Table|^(Parse|Decode|Encode|String|Regex|Lookup|As?String)")
_REFERENCE_VARIABLES = {"AutoReloadVariable", "Variable", "VariableV2"}
_TABLES = {
    "HashTableV2": "AnonymousHashTable",
    "MutableHashTableV2": "AnonymousMutableHashTable",
    "MutableHashTableOfTensorsV2": "AnonymousMutableHashTableOfTensors",
    "MutableDenseHashTableV2": "AnonymousMutableDenseHashTable",
}
# TensorFlow's own name for a variable that is made anew each time its handle is, and goes with it.
_ANONYMOUS = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"

_step: contextvars.ContextVar[Any] = contextvars.ContextVar("step")


class Graph:
    """One TensorFlow computation of a TFF computation: a graph with named inputs and outputs.

    Attributes:
      operations: the types of all its operations, those in its functions included.
    """

    def __init__(self, block: Any):
        """Reads the graph.

        Raises:
          EngineError: the computation is not a TensorFlow graph, or it holds a variable that calls would share.
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
        self.operations = frozenset(node.op for node in _all_nodes(graph_def))

    def __call__(self, inputs: Sequence[tf.Tensor]) -> Leaves:
        """Imports the graph into the current one and returns its outputs."""
        mapping = dict(zip(self.inputs, inputs, strict=True))
        if self._proto.session_token_tensor_name:
            mapping[self._proto.session_token_tensor_name] = tf.constant("")
        needed = {name.removeprefix("^") for node in self.graph_def.node for name in node.input} | set(self.outputs)
        mapping = {name: tensor for name, tensor in mapping.items() if _is_used(name, needed)}
        with _on_cpu_where_needed():
            return tf.graph_util.import_graph_def(
                self.graph_def, input_map=mapping, return_elements=self.outputs, name="computation"
            )


def _is_used(name: str, needed: set[str]) -> bool:
    operation, _, index = name.partition(":")
    return name in needed or (index in ("", "0") and (operation in needed or f"{operation}:0" in needed))


def _on_cpu_where_needed():
    """Places data sets, tables and strings on the CPU, which alone has kernels for them."""
    outer = tf.compat.v1.get_default_graph()

    def device(operation: tf.Operation) -> str:
        values = [*operation.inputs, *operation.outputs]
        on_cpu = _CPU_ONLY.search(operation.type) or any(v.dtype in (tf.string, tf.variant) for v in values)
        return "/CPU:0" if on_cpu else ""

    return outer.device(device)


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
    """Forgets functions that graphs bring along inside the `with` block when `step`, a traced graph, is collected."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _register(functions: Iterable[Any]) -> None:
    """Makes functions known to the function that is being traced.

    An import adds the functions to the graph that is traced. The function made of that graph looks for them in the
    context, whereto TensorFlow copies only functions it has traced itself. The context counts additions, so functions
    of several steps stay until the last of these steps is collected.
    """
    eager_context: Any = context.context()
    for function in functions:
        eager_context.add_function_def(function)
        weakref.finalize(_step.get(), eager_context.remove_function, function.signature.name).atexit = False


def _rename_functions(graph_def: Any) -> None:
    """Gives the library's functions names of their own.

    All functions of a process share one name space, and TensorFlow refuses a second definition under a name. Graphs
    traced from the same Python function in different places carry such names.
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
    """Makes everything that the operation does not itself need wait for it."""
    before = _ancestors(graph_def, [operation])
    for node in graph_def.node:
        if node.name not in before and node.op != "Placeholder":
            node.input.append(f"^{operation}")


def _keep_needed(graph_def: Any, outputs: Sequence[str]) -> None:
    """Drops what no output waits for: TFF does not run it, whereas a traced function runs all that has effects."""
    needed = _ancestors(graph_def, map(operation_of, outputs))
    kept = [node for node in graph_def.node if node.name in needed]
    for node in kept:
        # Gradients ask to be placed beside other nodes. There is but one device; nodes that have been dropped are not
        # found, and `tf.vectorized_map` cannot convert a node that asks for anything.
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
    """Returns the names of these operations and of all that run before them."""
    nodes = {node.name: node for node in graph_def.node}
    return _reached(operations, lambda name: (operation_of(source) for source in nodes[name].input))


def _reached(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """Returns names, all that follow them, and so on."""
    found: set[str] = set()
    pending = list(start)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += following(name)
    return found


def operation_of(source: str) -> str:
    """Returns the operation that an input of a node names."""
    return source.removeprefix("^").partition(":")[0]


def _check_variables(graph_def: Any) -> None:
    """Refuses variables that keep their values from call to call, whatever their names."""
    for node in _all_nodes(graph_def):
        if node.op in _REFERENCE_VARIABLES:
            raise EngineError(
                f"The in-process engine does not run {node.op!r} (operation {node.name!r}), a variable of TensorFlow 1 "
                "that calls would share; write use_resource=True, or tf.Variable."
            )


def _make_resources_anonymous(graph_def: Any) -> None:
    """Gives every call variables and tables of its own: under a name, calls would find those of earlier calls."""
    for node in _all_nodes(graph_def):
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s = _ANONYMOUS
        elif node.op in _TABLES:
            node.op = _TABLES[node.op]
            for attribute in ("container", "shared_name", "use_node_name_sharing"):
                node.attr.pop(attribute, None)
