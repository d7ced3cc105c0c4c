"""Checks on `saved_model.pb` before any of it runs: a SavedModel is a program, and what it may do is on a list."""

import re
from pathlib import Path

from google.protobuf.message import DecodeError

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from serving.saved_model import layout
from serving.saved_model.attribute_checks import check_attributes
from serving.saved_model.program import GRAPH, Program
from tff_pdp.errors import ServingError

# Ids and weights are in files of their own, so a graph of hundreds of kilobytes is a large one.
MAX_GRAPH_BYTES = 64 << 20

_SERVE_TAG = "serve"
_INIT_SIGNATURE = "__saved_model_init_op"
_INIT_COLLECTION = "saved_model_main_op"
_WRITE_OPS = frozenset({"SaveV2", "MergeV2Checkpoints", "ShardedFilename"})
# Ops that read a file, and which of their inputs names it.
_READ_OPS = {"InitializeTableFromTextFileV2": 1, "RestoreV2": 0}
# What `tf.saved_model.save` writes for a `tf.Module`; other classes are revived by code outside TensorFlow's core.
_PLAIN_OBJECTS = frozenset(
    [
        "_generic_user_object",
        "signature_map",
        "trackable_dict_wrapper",
        "trackable_list_wrapper",
        "trackable_tuple_wrapper",
    ]
)

# Tools name files after inputs and outputs: "../x" would be written elsewhere.
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_graph(export_dir: Path, allowed_ops: frozenset[str]) -> None:
    """Refuses a graph that may do anything but load its own files and compute.

    Args:
      export_dir: the directory of one version.
      allowed_ops: the ops that it may use.

    Raises:
      ServingError: naming the file, and the first asset, op or tensor that is refused.
    """
    path = export_dir / layout.SAVED_MODEL_FILE
    meta_graph = _read_meta_graph(path)
    try:
        _check_ops(meta_graph, allowed_ops)
        check_attributes(meta_graph)
        _check_assets(export_dir, meta_graph)
        program = Program(meta_graph)
        _check_what_runs(meta_graph, program)
        _check_file_names(meta_graph, program)
        _check_objects(meta_graph)
    except ServingError as error:
        raise ServingError(f"{path} is refused: {error}.") from error


def used_ops(export_dir: Path) -> list[str]:
    """All ops of a checked graph and its functions, sorted."""
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
    # A function may stand where an op does, under the op's name.
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
    if refused := sorted(meta_graph.collection_def.keys() - {_INIT_COLLECTION}):
        raise ServingError(f"it has the collection {refused[0]!r}, which is not served")


def _check_what_runs(meta_graph: meta_graph_pb2.MetaGraphDef, program: Program) -> None:
    """Writing files is for nobody, reading them for loading, and changing variables not for requests."""
    loading = [name for collection in meta_graph.collection_def.values() for name in collection.node_list.value]
    if meta_graph.saver_def.restore_op_name:
        loading.append(meta_graph.saver_def.restore_op_name)
    for name, signature in meta_graph.signature_def.items():
        for key, info in (*signature.inputs.items(), *signature.outputs.items()):
            if not _KEY.fullmatch(key):
                raise ServingError(f"signature {name!r} has {key!r}; use letters, digits, '_', '.' and '-' only")
            if info.WhichOneof("encoding") != "name":
                raise ServingError(f"signature {name!r} has {key!r} in an encoding that is not served")
        fetched = [info.name for info in signature.outputs.values()]
        if name == _INIT_SIGNATURE:
            loading += fetched
        elif refused := sorted(program.ops_run_by(fetched) & {*_WRITE_OPS, *_READ_OPS, "AssignVariableOp"}):
            raise ServingError(f"signature {name!r} uses {refused[0]}; requests may not touch files or variables")
    if refused := sorted(program.ops_run_by(loading) & _WRITE_OPS):
        raise ServingError(f"it writes files when it is loaded, by {refused[0]}")


def _check_file_names(meta_graph: meta_graph_pb2.MetaGraphDef, program: Program) -> None:
    """Every file that is read is named by the loader: an asset, or the variables of this export."""
    assets = {asset.tensor_info.name for asset in meta_graph.asset_file_def}
    from_loader = {"InitializeTableFromTextFileV2": assets, "RestoreV2": {meta_graph.saver_def.filename_tensor_name}}
    for scope, node in program.nodes():
        if node.op not in _READ_OPS:
            continue
        index = _READ_OPS[node.op]
        if len(node.input) <= index:
            raise ServingError(f"node {node.name!r} does not say which file it reads")
        for origin in program.origins(scope, node.input[index]):
            if not origin.op:
                _check_bound_inputs(meta_graph, program, origin.function, origin.tensor)
            elif origin.function != GRAPH or origin.tensor not in from_loader[node.op]:
                raise ServingError(
                    f"node {node.name!r} reads a file that is not one of the export's assets: its name comes from "
                    f"{origin.tensor!r} ({origin.op})"
                )


def _check_bound_inputs(
    meta_graph: meta_graph_pb2.MetaGraphDef, program: Program, function: str, argument: str
) -> None:
    """Refuses a file name that `tf.saved_model.load` would take from anything but an asset."""
    objects = meta_graph.object_graph_def
    if function not in objects.concrete_functions:
        return
    arguments = [one.name for one in program.functions[function].signature.input_arg]
    bound = objects.concrete_functions[function].bound_inputs
    index = arguments.index(argument) - (len(arguments) - len(bound))
    number = bound[index] if 0 <= index < len(bound) else -1
    if not 0 <= number < len(objects.nodes) or objects.nodes[number].WhichOneof("kind") != "asset":
        raise ServingError(f"function {function!r} reads a file that is not one of the export's assets")


def _check_objects(meta_graph: meta_graph_pb2.MetaGraphDef) -> None:
    for node in meta_graph.object_graph_def.nodes:
        kind = node.WhichOneof("kind")
        if kind == "user_object" and node.user_object.identifier not in _PLAIN_OBJECTS:
            raise ServingError(f"it holds an object of the class {node.user_object.identifier!r}, which is not served")
        if kind == "asset" and not 0 <= node.asset.asset_file_def_index < len(meta_graph.asset_file_def):
            raise ServingError("an object names an asset that is not there")
