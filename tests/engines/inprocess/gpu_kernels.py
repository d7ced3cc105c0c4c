"""The operations that have kernels on a GPU in TensorFlow 2.14, by dtype, as far as client steps use them.

TensorFlow's wheels without CUDA do not register these kernels, so that they cannot be asked. The table follows
TensorFlow's registrations of kernels, and a run on an H100. An operation without a kernel is placed on the host in
silence. Whoever adds an operation to a client step looks it up, and adds it here.

Scalars, shapes and positions in int32 are in the host's memory on purpose, where TensorFlow has kernels for them that
count as kernels of the GPU.
"""

from collections.abc import Iterator

import tensorflow as tf

_FLOATS = frozenset({"float32", "float64"})
_ON_HOST = frozenset({"int32"})
_SIGNED = frozenset({"int64"})
_UNSIGNED = frozenset({"uint32", "uint64"})
_NUMBERS = _FLOATS | _ON_HOST | _SIGNED
_ALL = _NUMBERS | _UNSIGNED | {"bool"}
_ANYTHING = _ALL | {"variant"}

# For each operation the dtypes of its values; not of sizes, axes and positions, which are int32 or int64.
KERNELS: dict[str, frozenset[str]] = {
    # Copies, shapes and calls.
    **dict.fromkeys(
        ["Const", "Identity", "Placeholder", "Reshape", "ExpandDims", "Squeeze", "Shape", "Size"], _ANYTHING
    ),
    **dict.fromkeys(["PartitionedCall", "StatelessIf", "StatelessWhile", "Any", "LogicalAnd", "LogicalOr"], _ALL),
    **dict.fromkeys(["Bitcast", "Cast", "ConcatV2", "StridedSlice", "Pack"], _ALL),
    **dict.fromkeys(["BroadcastTo", "GatherV2", "SelectV2", "Tile", "ZerosLike"], _NUMBERS | {"bool"}),
    **dict.fromkeys(["BroadcastGradientArgs", "Range", "Unpack"], _ON_HOST),
    "Fill": _NUMBERS | {"bool"},
    "Pad": _FLOATS | _ON_HOST,
    **dict.fromkeys(["Split", "SplitV"], _FLOATS | _ON_HOST),
    "StridedSliceGrad": _FLOATS,
    # Lists that loops return their results in. A list that is only reserved does nothing on either side.
    "TensorListReserve": _ALL,
    **dict.fromkeys(["TensorListSetItem", "TensorListStack", "TensorListFromTensor", "TensorListGetItem"], _FLOATS),
    # Whole numbers.
    **dict.fromkeys(["AddV2", "Mul", "Sub"], _NUMBERS | _UNSIGNED),
    **dict.fromkeys(["BitwiseAnd", "BitwiseXor", "RightShift"], _SIGNED | _UNSIGNED),
    **dict.fromkeys(["Less", "LessEqual", "Greater", "GreaterEqual"], _NUMBERS | _UNSIGNED),
    **dict.fromkeys(["Equal", "FloorDiv", "FloorMod", "Maximum", "Minimum", "Neg"], _NUMBERS),
    # Real numbers, and sums of int32 on the host.
    **dict.fromkeys(["Max", "Sum"], _FLOATS | _ON_HOST),
    **dict.fromkeys(["Abs", "AddN", "Cos", "Floor", "IsFinite", "IsInf", "Log", "MulNoNan", "Pow", "RealDiv"], _FLOATS),
    **dict.fromkeys(["OnesLike", "Round", "Sign", "Sin", "Sqrt", "Square"], _FLOATS),
    "TopKV2": _FLOATS,
    # Layers.
    **dict.fromkeys(["BatchMatMulV2", "MatMul", "Relu", "ReluGrad"], _FLOATS),
    **dict.fromkeys(["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "MaxPool", "MaxPoolGrad"], _FLOATS),
    "SparseSoftmaxCrossEntropyWithLogits": _FLOATS,
}
# Attributes with dtypes of values.
_OF_VALUES = ("T", "Tparams", "SrcT", "DstT", "type", "dtype", "element_dtype")


def without_kernel(function: tf.types.experimental.ConcreteFunction) -> list[tuple[str, str]]:
    """Lists operations that a GPU has no kernel for, with their dtypes, among those that the results need."""
    missing = set()
    for node in _nodes_of(function):
        dtypes = {tf.as_dtype(node.attr[name].type).name for name in _OF_VALUES if node.attr[name].type}
        if node.op not in KERNELS or not dtypes <= KERNELS[node.op]:
            missing.add((node.op, ", ".join(sorted(dtypes))))
    return sorted(missing)


def _nodes_of(function: tf.types.experimental.ConcreteFunction) -> Iterator:
    graph = function.graph.as_graph_def()
    bodies = {body.signature.name: body for body in graph.library.function}
    waiting = [(graph.node, [output.op.name for output in function.graph.outputs])]
    while waiting:
        for node in _needed(*waiting.pop()):
            yield node
            for name in _called(node):
                if name in bodies:
                    body = bodies.pop(name)
                    waiting.append((body.node_def, [*body.ret.values(), *body.control_ret.values()]))


def _needed(nodes, results: list[str]) -> Iterator:
    """Yields the nodes that the results need; others are left out before a graph runs."""
    unseen = {node.name: node for node in nodes}
    waiting = list(results)
    while waiting:
        node = unseen.pop(waiting.pop().lstrip("^").partition(":")[0], None)
        if node is not None:
            yield node
            waiting += node.input


def _called(node) -> Iterator[str]:
    for value in node.attr.values():
        for function in (value.func, *value.list.func):
            if function.name:
                yield function.name
