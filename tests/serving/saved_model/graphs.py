"""Finding and adding parts of an export's graph, and loading it unchecked."""

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tff_pdp.errors import ServingError


def refuses(export_dir, message):
    return pytest.raises(ServingError, match=message)


def node_of(meta_graph, op):
    """The first node of an op, in the graph or a function."""
    functions = meta_graph.graph_def.library.function
    nodes = [*meta_graph.graph_def.node, *(node for function in functions for node in function.node_def)]
    return next(node for node in nodes if node.op == op)


def function_with(meta_graph, op):
    return next(
        function
        for function in meta_graph.graph_def.library.function
        if any(node.op == op for node in function.node_def)
    )


def caller_of(meta_graph, function):
    return next(
        node
        for node in meta_graph.graph_def.node
        # Looking for one that is not there would add it.
        if "f" in node.attr and node.attr["f"].func.name == function.signature.name
    )


def add_constant(nodes, value, name="file_name"):
    node = nodes.add(name=name, op="Const")
    node.attr["dtype"].type = types_pb2.DT_STRING
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.string))
    return node
