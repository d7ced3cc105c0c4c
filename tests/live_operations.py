"""Counts the operations that a traced TensorFlow function runs."""

import collections


def live_operations(function):
    """Returns how often each type of operation stands in a function and in the functions that it calls.

    Operations that no output waits for do not run, and are left out: `tf.vectorized_map` leaves the operations of one
    client behind in the graph. A function that is called from two places counts twice, the body of a loop once.
    """
    graph = function.graph
    library = {each.signature.name: each for each in graph.as_graph_def().library.function}
    outputs = [tensor.op.name for tensor in graph.outputs] + [operation.name for operation in graph.control_outputs]
    return _count(graph.as_graph_def().node, outputs, library)


def _count(nodes, outputs, library):
    by_name = {node.name: node for node in nodes}
    found, pending, counts = set(), list(outputs), collections.Counter()
    while pending:
        name = pending.pop().removeprefix("^").partition(":")[0]
        # Arguments of a function are no operations of it.
        if name in found or name not in by_name:
            continue
        found.add(name)
        node = by_name[name]
        pending += node.input
        counts[node.op] += 1
        for called in _called(node, library):
            inner = library[called]
            counts += _count(inner.node_def, [*inner.ret.values(), *inner.control_ret.values()], library)
    return counts


def _called(node, library):
    for attribute in node.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name in library:
                yield function.name
    if node.op in library:
        yield node.op
