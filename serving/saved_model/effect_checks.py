"""Checks on what the graph of an export does beside computing: who reads and writes which files, and sets variables."""

from collections.abc import Iterator
from typing import NamedTuple

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.protobuf import meta_graph_pb2

from serving.saved_model.program import GRAPH, Place, Program
from tff_pdp.errors import ServingError

INIT_SIGNATURE = "__saved_model_init_op"
INIT_COLLECTION = "saved_model_main_op"

_WRITE_OPS = frozenset({"SaveV2", "MergeV2Checkpoints", "ShardedFilename"})
# Ops that read a file, and which of their inputs names it.
_READ_ASSET, _READ_VARIABLES = "InitializeTableFromTextFileV2", "RestoreV2"
_READ_OPS = {_READ_ASSET: 1, _READ_VARIABLES: 0}
_SET_VARIABLE = "AssignVariableOp"
_EFFECTS = frozenset({*_WRITE_OPS, *_READ_OPS, _SET_VARIABLE})


class _Run(NamedTuple):
    """One occasion on which a part of the graph runs.

    Attributes:
      what: the occasion, for messages.
      places: the nodes that may run then.
      effects: the ops with effects that they may be.
    """

    what: str
    places: set[Place]
    effects: frozenset[str]


def check_effects(meta_graph: meta_graph_pb2.MetaGraphDef, program: Program) -> None:
    """Refuses a graph in which an op with an effect may run on another occasion than the one that needs it.

    Saving writes files, restoring reads the variables, initialization reads the assets, and each of them nothing else.
    Requests touch neither files nor variables. What nobody runs may not touch files either: TensorFlow has more ways of
    choosing what runs than there are checks here.

    Args:
      meta_graph: the graph, whose ops and attributes passed their checks.
      program: the same graph.

    Raises:
      ServingError: naming the first op that is refused.
    """
    run_by_somebody: set[Place] = set()
    for what, places, effects in _runs(meta_graph, program):
        run_by_somebody |= places
        for scope, node in program.nodes():
            if node.op in _EFFECTS - effects and (scope, node.name) in places:
                raise ServingError(f"{what} may not use {node.op}, as node {node.name!r} does")
    for scope, node in program.nodes():
        if (node.op in _WRITE_OPS or node.op in _READ_OPS) and (scope, node.name) not in run_by_somebody:
            raise ServingError(f"node {node.name!r} uses {node.op}, and neither saving nor loading runs it")


def check_file_names(meta_graph: meta_graph_pb2.MetaGraphDef, program: Program) -> None:
    """Refuses a graph that reads a file which the loader does not name: an asset, or the variables of this export.

    Args:
      meta_graph: the graph, which passed `check_effects`.
      program: the same graph.

    Raises:
      ServingError: naming the node that reads a file.
    """
    assets = {asset.tensor_info.name for asset in meta_graph.asset_file_def}
    from_loader = {_READ_ASSET: assets, _READ_VARIABLES: {meta_graph.saver_def.filename_tensor_name}}
    for scope, node in program.nodes():
        if node.op not in _READ_OPS:
            continue
        index = _READ_OPS[node.op]
        if len(node.input) <= index:
            raise ServingError(f"node {node.name!r} does not say which file it reads")
        for origin in program.origins(scope, node.input[index]):
            if not origin.op:
                _check_bound_inputs(meta_graph, program, origin.function, origin.tensor)
            # Only what has no value of its own is what the loader gives it, or fails.
            elif origin.function != GRAPH or origin.op != "Placeholder" or origin.tensor not in from_loader[node.op]:
                raise ServingError(
                    f"node {node.name!r} reads a file that is not one of the export's assets: its name comes from "
                    f"{origin.tensor!r} ({origin.op})"
                )


def _runs(meta_graph: meta_graph_pb2.MetaGraphDef, program: Program) -> Iterator[_Run]:
    saver, signatures = meta_graph.saver_def, meta_graph.signature_def
    yield _Run("saving", program.run_by(filter(None, [saver.save_tensor_name])), _WRITE_OPS)
    restoring = program.run_by(filter(None, [saver.restore_op_name]))
    yield _Run("restoring variables", restoring, frozenset({_READ_VARIABLES, _SET_VARIABLE}))
    fetched = {name: [info.name for info in signature.outputs.values()] for name, signature in signatures.items()}
    loading = fetched.pop(INIT_SIGNATURE, [])
    loading += [name for collection in meta_graph.collection_def.values() for name in collection.node_list.value]
    yield _Run("initialization", program.run_by(loading), frozenset({_READ_ASSET, _SET_VARIABLE}))
    requested = program.run_by(name for names in fetched.values() for name in names)
    yield _Run("a request", requested, frozenset())
    # `tf.saved_model.load` calls some of them, found by the names of attributes; variables it restores by itself.
    objects = program.run_by_calls(meta_graph.object_graph_def.concrete_functions)
    yield _Run("a function of an object", objects, frozenset({_READ_ASSET, _SET_VARIABLE}))


def _check_bound_inputs(
    meta_graph: meta_graph_pb2.MetaGraphDef, program: Program, function: str, argument: str
) -> None:
    """Refuses a file name that `tf.saved_model.load` would take from anything but an asset."""
    objects = meta_graph.object_graph_def
    # Others are called by the graph alone.
    if function not in objects.concrete_functions:
        return
    arguments = program.arguments[function]
    bound = objects.concrete_functions[function].bound_inputs
    index = arguments.index(argument) - (len(arguments) - len(bound))
    number = bound[index] if 0 <= index < len(bound) else -1
    if not 0 <= number < len(objects.nodes) or objects.nodes[number].WhichOneof("kind") != "asset":
        raise ServingError(f"function {function!r} reads a file that is not one of the export's assets")
