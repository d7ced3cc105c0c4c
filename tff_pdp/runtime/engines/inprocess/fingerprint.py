"""What a computation is called in other processes, where TensorFlow gives its functions other names."""

import hashlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.inprocess.program import Program

# Attributes that number what a process has made so far; so do those that begin with an underscore.
_NUMBERED = {"config_proto", "container", "debug_name", "metadata", "shared_name", "token"}


def fingerprint(program: Program) -> str:
    """A digest of the types, the steps and the graphs of a lowered computation: 16 hexadecimal digits.

    It does not depend on the names of nodes and functions, which differ between processes.
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
    """The functions of a graph, which are known by what they do."""

    def __init__(self, library: Any):
        self._functions = {function.signature.name: function for function in library.function}
        self._digests: dict[str, str] = {}

    def of_nodes(self, nodes: Any, places: dict[str, str]) -> str:
        """The digest of nodes in their order; `places` says what stands for names from outside."""
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
        """The digest of a function of the library; any other name as it is."""
        if name not in self._functions:
            return name
        if name not in self._digests:
            self._digests[name] = "itself"  # Should it call itself.
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
