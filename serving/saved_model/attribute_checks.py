"""Checks on the attributes of a graph's nodes: values that TensorFlow takes on trust, and hangs or dies of."""

import functools
import math
from collections.abc import Iterator, Mapping

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.framework import attr_value_pb2, tensor_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.framework import op_def_registry

from tff_pdp.errors import ServingError

# A constant is a shape and perhaps a single value that fills it.
MAX_CONSTANT_ELEMENTS = 1 << 26
# TensorFlow makes a list of this length before it looks at the tensors in it.
MAX_TENSORS_IN_LIST = 1 << 16
# `tf.lookup.TextFileIndex`: the whole line, and its number. Any other column crashes where it is large enough.
_WHOLE_LINES = frozenset({-2, -1})
# What `tf.saved_model.save` adds to the attributes that ops define: shapes, names, how calls are ordered, and gradients
# by name. Others change what runs: TensorFlow swaps functions with the same `api_implements` for one another.
_FURTHER_ATTRIBUTES = frozenset(
    [
        "_XlaMustCompile",
        "_class",
        "_collective_manager_ids",
        "_construction_context",
        "_gradient_op_type",
        "_has_manual_control_dependencies",
        "_input_shapes",
        "_lower_using_switch_merge",
        "_num_original_outputs",
        "_output_shapes",
        "_read_only_resource_inputs",
        "_user_specified_name",
    ]
)
_NO_VALUE = attr_value_pb2.AttrValue()

Attributes = Mapping[str, attr_value_pb2.AttrValue]


def check_attributes(meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    """Refuses attributes that no model of this package has.

    Raises:
      ServingError: naming the node and what is wrong with it.
    """
    for owner, op, attributes in _owners(meta_graph):
        if refused := sorted(attributes.keys() - _FURTHER_ATTRIBUTES - _attributes(op)):
            raise ServingError(f"{owner} has the attribute {refused[0]!r}, which may change what runs")
        for name, value in attributes.items():
            _check_value(owner, name, value)
        for name in _list_lengths(op):
            if not 0 <= attributes.get(name, _NO_VALUE).i <= MAX_TENSORS_IN_LIST:
                raise ServingError(f"{owner} takes or makes {attributes[name].i} tensors")
        if op == "Const" and attributes.get("dtype", _NO_VALUE).type != attributes.get("value", _NO_VALUE).tensor.dtype:
            raise ServingError(f"{owner} holds a constant of another dtype than its own")
        if op == "InitializeTableFromTextFileV2":
            columns = {attributes.get(name, _NO_VALUE).i for name in ("key_index", "value_index")}
            if not columns <= _WHOLE_LINES:
                raise ServingError(f"{owner} reads columns of an asset; only whole lines and their numbers are served")


def _owners(meta_graph: meta_graph_pb2.MetaGraphDef) -> Iterator[tuple[str, str, Attributes]]:
    """All nodes, functions and arguments: how to name each, its op (empty where it is no node) and its attributes."""
    for node in meta_graph.graph_def.node:
        yield f"node {node.name!r}", node.op, node.attr
    for function in meta_graph.graph_def.library.function:
        yield f"function {function.signature.name!r}", "", function.attr
        for argument in function.arg_attr.values():
            yield f"an argument of function {function.signature.name!r}", "", argument.attr
        for node in function.node_def:
            yield f"node {node.name!r} of function {function.signature.name!r}", node.op, node.attr


def _check_value(owner: str, name: str, value: attr_value_pb2.AttrValue) -> None:
    if name == "_XlaMustCompile" and value.b:
        raise ServingError(f"{owner} must be compiled by XLA, which servers may lack; export it without jit_compile")
    if value.placeholder:
        raise ServingError(f"{owner} has the attribute {name!r} without a value")
    # Attributes of a call stand for parts of the function's own, the number of its arguments included.
    if any(function.attr for function in (value.func, *value.list.func)):
        raise ServingError(f"{owner} gives attributes to the function that it calls")
    for tensor in (*([value.tensor] if value.HasField("tensor") else []), *value.list.tensor):
        _check_constant(owner, tensor)


def _check_constant(owner: str, tensor: tensor_pb2.TensorProto) -> None:
    if tensor.dtype in (types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT):
        raise ServingError(f"{owner} holds a constant that is a reference to something else")
    sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
    if min(sizes, default=0) < 0 or math.prod(sizes) > MAX_CONSTANT_ELEMENTS:
        raise ServingError(f"{owner} holds a constant of shape {sizes[:8]}, which no graph of this package does")


@functools.cache
def _attributes(op: str) -> frozenset[str]:
    """The attributes that an op defines."""
    definition = op_def_registry.get(op) if op else None
    return frozenset() if definition is None else frozenset(attribute.name for attribute in definition.attr)


@functools.cache
def _list_lengths(op: str) -> frozenset[str]:
    """The attributes of an op that say how many tensors it takes or makes."""
    definition = op_def_registry.get(op) if op else None
    arguments = () if definition is None else (*definition.input_arg, *definition.output_arg)
    return frozenset(argument.number_attr for argument in arguments if argument.number_attr)
