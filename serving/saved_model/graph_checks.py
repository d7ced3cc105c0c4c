"""Checks on `saved_model.pb` before any of it runs: a SavedModel is a program, and what it may do is on a list."""

import re
from pathlib import Path

from google.protobuf.message import DecodeError

# TensorFlow's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from serving.saved_model import layout
from serving.saved_model.attribute_checks import check_attributes
from serving.saved_model.effect_checks import INIT_COLLECTION, INIT_SIGNATURE, check_effects, check_file_names
from serving.saved_model.program import Program
from tff_pdp.errors import ServingError

# Ids and weights are in files of their own, so a graph of hundreds of kilobytes is a large one.
MAX_GRAPH_BYTES = 64 << 20

_SERVE_TAG = "serve"
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

# Classes that have a loader of their own: the vocabulary and the constants of an export.
_REGISTERED_CLASSES = frozenset({"", "tf.StaticHashTable", "tf.TrackableConstant"})

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
        _check_signatures(meta_graph)
        check_effects(meta_graph, program)
        check_file_names(meta_graph, program)
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
    # It reads files, and TensorFlow Serving takes requests for every signature that gives a tensor.
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
        # A loader would take one that is not listed as well, as if it captured nothing.
        functions = {*node.function.concrete_functions, node.bare_concrete_function.concrete_function_name} - {""}
        if unknown := sorted(functions - known):
            raise ServingError(f"an object has the function {unknown[0]!r}, which is not one of its functions")
