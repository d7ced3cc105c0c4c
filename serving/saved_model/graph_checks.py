"""Checks `saved_model.pb` before any part of it runs: a SavedModel is a program, and may use only allowed ops.

Attributes of nodes are checked because wrong values of some attributes make TensorFlow hang or crash. Side effects are
checked, too: which parts of the graph read files, write files or set variables, and which files they use.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorflow.core.framework import attr_value_pb2, tensor_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2
from tensorflow.python.framework import op_def_registry

from serving.saved_model import layout
from serving.saved_model.program import GRAPH, Place, Program
from tff_pdp.errors import ServingError

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false


# Ids and weights are in files of their own, so a graph of hundreds of kilobytes is a large one.
MAX_GRAPH_BYTES = 64 << 20

_SERVE_TAG = "serve"
# The classes in a saved `tf.Module`; others are revived by code outside TensorFlow's core.
_PLAIN_OBJECTS = frozenset(
    [
        "_generic_user_object",
        "signature_map",
        "trackable_dict_wrapper",
        "trackable_list_wrapper",
        "trackable_tuple_wrapper",
    ]
)

# Classes that have a loader of their own: the vocabulary and the constants of an export.
_REGISTERED_CLASSES = frozenset({"", "tf.StaticHashTable", "tf.TrackableConstant"})

# Tools name files after inputs and outputs: "../x" would be written elsewhere.
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_graph(export_dir: Path, allowed_ops: frozenset[str]) -> None:
    """Refuses a graph that has an op outside `allowed_ops`, or does more than load its own files and compute.

    Raises:
      ServingError: the graph is refused; the message names the file and the first asset, op or tensor at fault.
    """
    path = export_dir / layout.SAVED_MODEL_FILE
    meta_graph = _read_meta_graph(path)
    try:
        _check_ops(meta_graph, allowed_ops)
        check_attributes(meta_graph)
        _check_assets(export_dir, meta_graph)
        program = Program(meta_graph)
        _check_signatures(meta_graph)
        check_effects(meta_graph, program)
        check_file_names(meta_graph, program)
        _check_objects(meta_graph)
    except ServingError as error:
        raise ServingError(f"{path} is refused: {error}.") from error


def used_ops(export_dir: Path) -> list[str]:
    """Returns the names of all ops in a graph and its functions, sorted; the graph must have passed `check_graph`."""
    program = Program(_read_meta_graph(export_dir / layout.SAVED_MODEL_FILE))
    return sorted({node.op for _, node in program.nodes()})


def _read_meta_graph(path: Path) -> meta_graph_pb2.MetaGraphDef:
    try:
        size = path.stat().st_size
        if size > MAX_GRAPH_BYTES:
            raise ServingError(f"{path} has {size} bytes; a served graph has at most {MAX_GRAPH_BYTES}.")
        saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ServingError(f"{path} is not a readable SavedModel: {error}.") from error
    tags = [sorted(meta_graph.meta_info_def.tags) for meta_graph in saved_model.meta_graphs]
    if tags != [[_SERVE_TAG]]:
        raise ServingError(f"{path} must hold one graph, with the tag {_SERVE_TAG!r}; it holds {len(tags)}: {tags}.")
    return saved_model.meta_graphs[0]


def _check_ops(meta_graph: meta_graph_pb2.MetaGraphDef, allowed_ops: frozenset[str]) -> None:
    graph = meta_graph.graph_def
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    if refused := sorted({node.op for node in nodes} - allowed_ops):
        raise ServingError(
            f"it uses ops that are not served: {', '.join(refused)}. Export models made of TensorFlow's own "
            "mathematical ops only; Python functions, file and network access and custom ops are refused"
        )
    # A function with the name of an op may run in place of this op.
    if hidden := sorted({function.signature.name for function in graph.library.function} & allowed_ops):
        raise ServingError(f"its function {hidden[0]!r} has the name of an op")


def _check_assets(export_dir: Path, meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    for asset in meta_graph.asset_file_def:
        # Loaders join this name to the assets directory unchecked: "../../secret" would be read as a vocabulary.
        if asset.filename in ("", ".", "..") or set(asset.filename) & set("/\\\0"):
            raise ServingError(f"it names the asset {asset.filename!r}, which is outside its assets directory")
        if not (export_dir / layout.ASSETS_DIRECTORY / asset.filename).is_file():
            raise ServingError(f"it needs the asset {asset.filename!r}, which is missing; copy the export again")
    # Older ways of naming assets and of running ops while loading; `tf.saved_model.save` uses none of them.
    for name, collection in meta_graph.collection_def.items():
        if name != INIT_COLLECTION or collection.WhichOneof("kind") != "node_list":
            raise ServingError(f"it has the collection {name!r}, which is not served")


def _check_signatures(meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    for name, signature in meta_graph.signature_def.items():
        for key, info in (*signature.inputs.items(), *signature.outputs.items()):
            if not _KEY.fullmatch(key):
                raise ServingError(f"signature {name!r} has {key!r}; use letters, digits, '_', '.' and '-' only")
            if info.WhichOneof("encoding") != "name":
                raise ServingError(f"signature {name!r} has {key!r} in an encoding that is not served")
    # The initialization reads files, and TensorFlow Serving takes requests for every signature that gives a tensor.
    loading = meta_graph.signature_def.get(INIT_SIGNATURE)
    operations = {node.name for node in meta_graph.graph_def.node if node.op == "NoOp"}
    if loading is not None and (loading.inputs or {info.name for info in loading.outputs.values()} - operations):
        raise ServingError(f"signature {INIT_SIGNATURE!r} takes or gives tensors, so that requests could run it")


def _check_objects(meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    if not meta_graph.HasField("object_graph_def"):
        raise ServingError("it has no objects: it was not written by `tf.saved_model.save`")
    known = meta_graph.object_graph_def.concrete_functions.keys()
    for node in meta_graph.object_graph_def.nodes:
        kind = node.WhichOneof("kind")
        if kind == "user_object" and node.user_object.identifier not in _PLAIN_OBJECTS:
            raise ServingError(f"it holds an object of the class {node.user_object.identifier!r}, which is not served")
        if kind == "asset" and not 0 <= node.asset.asset_file_def_index < len(meta_graph.asset_file_def):
            raise ServingError("an object names an asset that is not there")
        if node.registered_name not in _REGISTERED_CLASSES:
            raise ServingError(f"it holds an object of the class {node.registered_name!r}, which is not served")
        # A loader would also take a function that is not listed, as if the function captured nothing.
        functions = {*node.function.concrete_functions, node.bare_concrete_function.concrete_function_name} - {""}
        if unknown := sorted(functions - known):
            raise ServingError(f"an object has the function {unknown[0]!r}, which is not one of its functions")


# A constant may be stored as a shape and a single value that fills the shape.
MAX_CONSTANT_ELEMENTS = 1 << 26
# TensorFlow makes a list of this length before it looks at the tensors in it.
MAX_TENSORS_IN_LIST = 1 << 16
# `tf.lookup.TextFileIndex`: the whole line, and its number. Any other column crashes if its number is large.
_WHOLE_LINES = frozenset({-2, -1})
# Attributes that `tf.saved_model.save` adds to those of ops: shapes, names, the order of calls, and gradients by name.
# Others change the run: TensorFlow swaps functions with the same `api_implements` for one another.
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
    """Refuses a graph that has attributes, or values of attributes, that no model of this package has.

    Raises:
      ServingError: the graph is refused; the message names the node and its fault.
    """
    for owner, op, attributes in _owners(meta_graph):
        defined, list_lengths = _attributes(op)
        if refused := sorted(attributes.keys() - _FURTHER_ATTRIBUTES - defined):
            raise ServingError(f"{owner} has the attribute {refused[0]!r}, which may change what runs")
        for name, value in attributes.items():
            _check_value(owner, name, value)
        for name in list_lengths:
            if not 0 <= attributes.get(name, _NO_VALUE).i <= MAX_TENSORS_IN_LIST:
                raise ServingError(f"{owner} lists {attributes[name].i} tensors, not 0 to {MAX_TENSORS_IN_LIST}")
        if op == "Const" and attributes.get("dtype", _NO_VALUE).type != attributes.get("value", _NO_VALUE).tensor.dtype:
            raise ServingError(f"{owner} holds a constant of another dtype than the node's")
        if op == "InitializeTableFromTextFileV2":
            columns = {attributes.get(name, _NO_VALUE).i for name in ("key_index", "value_index")}
            if not columns <= _WHOLE_LINES:
                raise ServingError(f"{owner} reads columns of an asset; it may read only whole lines or line numbers")


def _owners(meta_graph: meta_graph_pb2.MetaGraphDef) -> Iterator[tuple[str, str, Attributes]]:
    """Yields a name for messages, the op (empty for no node) and the attributes of all nodes, functions, arguments."""
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
    # Attributes of a call replace attributes in the function, such as the number of its arguments.
    if any(function.attr for function in (value.func, *value.list.func)):
        raise ServingError(f"{owner} gives attributes to the function that it calls")
    for tensor in (*([value.tensor] if value.HasField("tensor") else []), *value.list.tensor):
        _check_constant(owner, tensor)


def _check_constant(owner: str, tensor: tensor_pb2.TensorProto) -> None:
    if tensor.dtype in (types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT):
        raise ServingError(f"{owner} holds a constant of type resource or variant")
    sizes = [dimension.size for dimension in tensor.tensor_shape.dim]
    if min(sizes, default=0) < 0 or math.prod(sizes) > MAX_CONSTANT_ELEMENTS:
        raise ServingError(f"{owner} holds a constant of shape {sizes[:8]}, which is negative or too large")


@functools.cache
def _attributes(op: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the attributes that an op defines, and among them the numbers of tensors that it takes or makes."""
    definition = op_def_registry.get(op) if op else None
    if definition is None:
        return frozenset(), frozenset()
    numbers = {argument.number_attr for argument in (*definition.input_arg, *definition.output_arg)}
    return frozenset(attribute.name for attribute in definition.attr), frozenset(numbers - {""})


INIT_SIGNATURE = "__saved_model_init_op"
INIT_COLLECTION = "saved_model_main_op"

_WRITE_OPS = frozenset({"SaveV2", "MergeV2Checkpoints", "ShardedFilename"})
# Ops that read a file, and the index of the input that names the file.
_READ_ASSET, _READ_VARIABLES = "InitializeTableFromTextFileV2", "RestoreV2"
_READ_OPS = {_READ_ASSET: 1, _READ_VARIABLES: 0}
_SET_VARIABLE = "AssignVariableOp"
_EFFECTS = frozenset({*_WRITE_OPS, *_READ_OPS, _SET_VARIABLE})


class _Run(NamedTuple):
    """An occasion (`what`) on which nodes of the graph (`places`) may run, and the `effects`, ops, allowed then."""

    what: str
    places: set[Place]
    effects: frozenset[str]


def check_effects(meta_graph: meta_graph_pb2.MetaGraphDef, program: Program) -> None:
    """Refuses a graph that could use files or set variables outside of saving, restoring and initialization.

    Only saving may write files, only restoring may read variables' files, and only initialization may read assets.
    Requests may neither use files nor set variables. Nodes that run on none of these occasions may not use files
    either, because TensorFlow has further ways to run nodes. Call this after the checks of ops and attributes.

    Raises:
      ServingError: the graph is refused; the message names the first op at fault.
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
    """Refuses a graph that reads any file except its assets and its variables; call this after `check_effects`.

    Raises:
      ServingError: the graph is refused; the message names the node that reads the file.
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
            # A placeholder has the loader's value or none; any other op has a value of its own.
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
    # `tf.saved_model.load` calls some of these, found by names of attributes, and restores variables itself.
    objects = program.run_by_calls(meta_graph.object_graph_def.concrete_functions)
    yield _Run("a function of an object", objects, frozenset({_READ_ASSET, _SET_VARIABLE}))


def _check_bound_inputs(
    meta_graph: meta_graph_pb2.MetaGraphDef, program: Program, function: str, argument: str
) -> None:
    """Refuses a file name that `tf.saved_model.load` would take from anything but an asset."""
    objects = meta_graph.object_graph_def
    # Only the graph calls other functions.
    if function not in objects.concrete_functions:
        return
    arguments = program.arguments[function]
    bound = objects.concrete_functions[function].bound_inputs
    index = arguments.index(argument) - (len(arguments) - len(bound))
    number = bound[index] if 0 <= index < len(bound) else -1
    if not 0 <= number < len(objects.nodes) or objects.nodes[number].WhichOneof("kind") != "asset":
        raise ServingError(f"function {function!r} reads a file that is not one of the export's assets")
