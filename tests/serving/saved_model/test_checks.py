"""Each way in which a SavedModel may do harm, made by hand, is refused before anything of it runs."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2
from tensorflow_serving.apis import prediction_log_pb2

from serving.saved_model import layout
from serving.saved_model import layout as manifest
from serving.saved_model.checks import ALLOWED_OPS, check_export
from serving.saved_model.graph_checks import MAX_GRAPH_BYTES
from serving.saved_model.servable import Servable
from tests.serving.saved_model.graphs import caller_of, function_with, node_of, refuses
from tests.serving.verify.mutants import edited, rewrite_manifest, varint
from tests.serving.verify.opened import watching
from tff_pdp.data.tfrecord import frame, unframe
from tff_pdp.errors import ServingError


def test_an_export_passes(copy):
    check_export(copy)
    rewrite_manifest(copy)
    check_export(copy)


def test_the_loader_would_read_what_the_checks_refuse(copy, tmp_path):
    # Shows that the attack is real, and that the watch sees TensorFlow's reads.
    secret = tmp_path / "secret.txt"
    secret.write_text("<global>\nalice\nbob\nc\n")
    with edited(copy) as meta_graph:
        meta_graph.asset_file_def[0].filename = "../../../secret.txt"
    with watching(secret) as opened:
        with refuses(copy, r"saved_model.pb is refused: it names the asset '../../../secret.txt', which is outside"):
            check_export(copy)
        assert opened() == []
        Servable(copy).close()
        assert opened()


@pytest.mark.parametrize("name", ["", ".", "..", "../1/saved_model.pb", "/etc/hostname", "a/b", "a\\b", "a\0b"])
def test_assets_outside_their_directory_are_refused(copy, name):
    with edited(copy) as meta_graph:
        meta_graph.asset_file_def[0].filename = name
    with refuses(copy, "outside its assets directory"):
        check_export(copy)


def test_missing_assets_and_other_ways_of_naming_them_are_refused(copy):
    with edited(copy) as meta_graph:
        meta_graph.asset_file_def[0].filename = "other.txt"
    with refuses(copy, "needs the asset 'other.txt', which is missing"):
        check_export(copy)
    with edited(copy) as meta_graph:
        asset = meta_graph.asset_file_def.pop()
        meta_graph.collection_def["saved_model_assets"].any_list.value.add().Pack(asset)
    with refuses(copy, "collection 'saved_model_assets'"):
        check_export(copy)
    with edited(copy) as meta_graph:
        del meta_graph.collection_def["saved_model_assets"]
    # The object graph still names asset number 0.
    with refuses(copy, "reads a file that is not one of the export's assets"):
        check_export(copy)


def an_op_that_reads_files(meta_graph):
    meta_graph.graph_def.node.add(name="read", op="ReadFile")
    return "uses ops that are not served: ReadFile"


def an_op_in_a_function(meta_graph):
    meta_graph.graph_def.library.function[0].node_def.add(name="python", op="EagerPyFunc")
    return "uses ops that are not served: EagerPyFunc"


def a_function_called_like_an_op(meta_graph):
    meta_graph.graph_def.library.function.add().signature.name = "MatMul"
    return "function 'MatMul' has the name of an op"


def a_function_that_must_be_compiled(meta_graph):
    meta_graph.graph_def.library.function[0].attr["_XlaMustCompile"].b = True
    return "must be compiled by XLA"


def a_node_that_must_be_compiled(meta_graph):
    meta_graph.graph_def.node[-1].attr["_XlaMustCompile"].b = True
    return "must be compiled by XLA"


def a_function_that_calls_itself(meta_graph):
    function = meta_graph.graph_def.library.function[0]
    call = function.node_def.add(name="again", op="PartitionedCall")
    call.attr["f"].func.name = function.signature.name
    return "calls itself"


def functions_nested_deeply(meta_graph):
    for depth in range(100):
        function = meta_graph.graph_def.library.function.add()
        function.signature.name = f"deep_{depth}"
        if depth:
            function.node_def.add(name="down", op="PartitionedCall").attr["f"].func.name = f"deep_{depth - 1}"
    return "nested more than 64 deep"


def a_function_in_an_attribute_of_a_function(meta_graph):
    function = meta_graph.graph_def.node[-1].attr["f"].func
    function.attr["inner"].list.func.add().name = "nowhere"
    return "gives attributes to the function that it calls"


def a_call_of_no_function(meta_graph):
    meta_graph.graph_def.node.add(name="call", op="PartitionedCall").attr["f"].func.name = "nowhere"
    return "calls the function 'nowhere', which is not there"


def a_function_that_has_others_in_its_place(meta_graph):
    meta_graph.graph_def.library.function[0].attr["api_implements"].s = b"the same"
    return "attribute 'api_implements', which may change what runs"


def a_node_with_an_attribute_of_no_op(meta_graph):
    node_of(meta_graph, "MatMul").attr["_kernel"].s = b"other"
    return "attribute '_kernel', which may change what runs"


def function_with_arguments(meta_graph):
    """The first there is: functions are in the order of their names, which have numbers of the process."""
    return next(function for function in meta_graph.graph_def.library.function if function.signature.input_arg)


def an_argument_with_an_attribute_of_no_op(meta_graph):
    function_with_arguments(meta_graph).arg_attr[0].attr["_composite_device"].s = b"other"
    return "attribute '_composite_device', which may change what runs"


def a_function_that_takes_a_list(meta_graph):
    # The next argument is then another input of a call than its number says.
    function_with_arguments(meta_graph).signature.input_arg[0].number_attr = "N"
    return "takes a list, or a tensor of any dtype"


def a_node_named_like_an_argument(meta_graph):
    # Its output is `name:output:0`, and the argument is `name`.
    function = function_with_arguments(meta_graph)
    function.node_def.add(name=function.signature.input_arg[0].name, op="Const")
    return "two nodes have the name"


def a_node_named_like_an_output(meta_graph):
    meta_graph.graph_def.library.function[0].node_def.add(name="a:b", op="NoOp")
    return "a node has the name 'a:b'"


def an_initialization_that_takes_tensors(meta_graph):
    signatures = meta_graph.signature_def
    signatures["__saved_model_init_op"].inputs["x"].CopyFrom(signatures["predict"].inputs["x"])
    return "takes or gives tensors, so that requests could run it"


def an_initialization_that_gives_a_tensor(meta_graph):
    initialization = function_with(meta_graph, "InitializeTableFromTextFileV2")
    outputs = meta_graph.signature_def["__saved_model_init_op"].outputs
    outputs["__saved_model_init_op"].name = f"{caller_of(meta_graph, initialization).name}:0"
    return "takes or gives tensors, so that requests could run it"


def no_objects(meta_graph):
    meta_graph.ClearField("object_graph_def")
    return "it has no objects"


def an_object_of_a_registered_class(meta_graph):
    meta_graph.object_graph_def.nodes[0].registered_name = "Custom.Own"
    return "class 'Custom.Own'"


def an_object_with_a_function_that_is_not_listed(meta_graph):
    objects = meta_graph.object_graph_def
    function = next(node.function for node in objects.nodes if node.WhichOneof("kind") == "function")
    del objects.concrete_functions[function.concrete_functions[0]]
    return "which is not one of its functions"


def an_initialization_in_another_form(meta_graph):
    meta_graph.collection_def["saved_model_main_op"].bytes_list.value.append(b"NoOp")
    return "collection 'saved_model_main_op'"


def two_nodes_of_one_name(meta_graph):
    meta_graph.graph_def.node.add().CopyFrom(meta_graph.graph_def.node[0])
    return "two nodes have the name"


def two_functions_of_one_name(meta_graph):
    meta_graph.graph_def.library.function.add().CopyFrom(meta_graph.graph_def.library.function[0])
    return "two functions have the same name"


def a_constant_that_unfolds(meta_graph):
    tensor = node_of(meta_graph, "Const").attr["value"].tensor
    tensor.tensor_shape.dim.add().size = 1 << 20
    tensor.tensor_shape.dim.add().size = 1 << 20
    return "holds a constant of shape"


def a_constant_of_negative_size(meta_graph):
    node_of(meta_graph, "Const").attr["value"].tensor.tensor_shape.dim.add().size = -(2**62)
    return "holds a constant of shape"


def a_constant_of_another_dtype(meta_graph):
    # TensorFlow 2.14 aborts when it folds such a constant.
    node = node_of(meta_graph, "Const")
    node.attr["value"].tensor.dtype = types_pb2.DT_UINT16
    return "holds a constant of another dtype"


def a_table_of_a_far_column(meta_graph):
    # TensorFlow 2.14 reads beyond the line.
    node_of(meta_graph, "InitializeTableFromTextFileV2").attr["key_index"].i = 2**31
    return "reads columns of an asset"


def a_constant_that_refers_to_a_resource(meta_graph):
    node_of(meta_graph, "Const").attr["value"].tensor.dtype = types_pb2.DT_RESOURCE
    return "a constant of type resource or variant"


def a_list_of_less_than_nothing(meta_graph):
    # TensorFlow 2.14 does not come back from it, nor from the next.
    node_of(meta_graph, "StringJoin").attr["N"].i = -(2**63)
    return "lists -9223372036854775808 tensors, not 0 to 65536"


def a_list_without_end(meta_graph):
    node_of(meta_graph, "ConcatV2").attr["N"].i = 2**40
    return "lists 1099511627776 tensors, not 0 to 65536"


def an_attribute_without_a_value(meta_graph):
    node_of(meta_graph, "MatMul").attr["T"].placeholder = "T"
    return "attribute 'T' without a value"


def an_output_named_like_a_path(meta_graph):
    outputs = meta_graph.signature_def["predict"].outputs
    outputs["../../escaped"].CopyFrom(outputs["personalized"])
    return "'../../escaped'; use letters"


def an_output_that_is_sparse(meta_graph):
    meta_graph.signature_def["predict"].outputs["personalized"].coo_sparse.values_tensor_name = "x:0"
    return "in an encoding that is not served"


def an_output_of_no_node(meta_graph):
    meta_graph.signature_def["predict"].outputs["personalized"].name = "nowhere:0"
    return "'nowhere' is used, which is not there"


def an_object_of_another_class(meta_graph):
    meta_graph.object_graph_def.nodes[0].user_object.identifier = "_tf_keras_model"
    return "class '_tf_keras_model'"


def an_object_of_another_asset(meta_graph):
    asset = next(node for node in meta_graph.object_graph_def.nodes if node.WhichOneof("kind") == "asset")
    asset.asset.asset_file_def_index = 7
    return "an object names an asset that is not there"


def an_older_initialization(meta_graph):
    meta_graph.collection_def["legacy_init_op"].node_list.value.append("NoOp")
    return "collection 'legacy_init_op'"


@pytest.mark.parametrize(
    "change",
    [
        an_op_that_reads_files,
        an_op_in_a_function,
        a_function_called_like_an_op,
        a_function_that_must_be_compiled,
        a_node_that_must_be_compiled,
        a_function_that_calls_itself,
        functions_nested_deeply,
        a_function_in_an_attribute_of_a_function,
        a_call_of_no_function,
        a_function_that_has_others_in_its_place,
        a_node_with_an_attribute_of_no_op,
        an_argument_with_an_attribute_of_no_op,
        a_function_that_takes_a_list,
        a_node_named_like_an_argument,
        a_node_named_like_an_output,
        an_initialization_that_takes_tensors,
        an_initialization_that_gives_a_tensor,
        no_objects,
        an_object_of_a_registered_class,
        an_object_with_a_function_that_is_not_listed,
        an_initialization_in_another_form,
        two_nodes_of_one_name,
        two_functions_of_one_name,
        a_constant_that_unfolds,
        a_constant_of_negative_size,
        a_constant_of_another_dtype,
        a_table_of_a_far_column,
        a_constant_that_refers_to_a_resource,
        a_list_of_less_than_nothing,
        a_list_without_end,
        an_attribute_without_a_value,
        an_output_named_like_a_path,
        an_output_that_is_sparse,
        an_output_of_no_node,
        an_object_of_another_class,
        an_object_of_another_asset,
        an_older_initialization,
    ],
)
def test_graphs_that_are_not_served(copy, change):
    with edited(copy) as meta_graph:
        message = change(meta_graph)
    with refuses(copy, rf"1/saved_model.pb is refused: .*{message}"):
        check_export(copy)


@pytest.mark.parametrize("tags", [[], [["serve"], []], [["serve"], ["train"]], [["serve", "gpu"]], [["other"]]])
def test_only_one_graph_for_serving_is_taken(copy, tags):
    path = copy / layout.SAVED_MODEL_FILE
    saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    graph = meta_graph_pb2.MetaGraphDef.FromString(saved_model.meta_graphs[0].SerializeToString())
    del saved_model.meta_graphs[:]
    for tag_set in tags:
        graph.meta_info_def.tags[:] = tag_set
        saved_model.meta_graphs.add().CopyFrom(graph)
    path.write_bytes(saved_model.SerializeToString())
    rewrite_manifest(copy)
    with refuses(copy, f"must hold one graph, with the tag 'serve'; it holds {len(tags)}"):
        check_export(copy)


def test_graphs_that_cannot_be_read_are_refused(copy):
    path = copy / layout.SAVED_MODEL_FILE
    for content in (b"\xff" * 100, path.read_bytes()[:-1], _deep_message(2_000)):
        path.write_bytes(content)
        rewrite_manifest(copy)
        with refuses(copy, "not a readable SavedModel|must hold one graph"):
            check_export(copy)
    os.truncate(path, MAX_GRAPH_BYTES + 1)
    rewrite_manifest(copy)
    with refuses(copy, f"has {MAX_GRAPH_BYTES + 1} bytes"):
        check_export(copy)
    path.unlink()
    rewrite_manifest(copy)
    with refuses(copy, "not a readable SavedModel"):
        check_export(copy)


def _deep_message(depth):
    """`meta_graphs.graph_def.library.function.node_def.attr.value.func.attr.value.func...`"""
    content = b""
    for _ in range(depth):
        for tag in (b"\x12", b"\x12", b"\x52"):  # attr, its value, func
            content = tag + varint(len(content)) + content
    for tag in (b"\x2a", b"\x1a", b"\x0a", b"\x12", b"\x12", b"\x12"):
        content = tag + varint(len(content)) + content
    return content


@pytest.mark.parametrize("name", ["saved_model.pbtxt", "saved_model.cpb", "assets.extra/saved_model_config.pbtxt", "x"])
def test_files_that_a_loader_may_prefer_are_refused(copy, name):
    (copy / name).write_bytes(b"")
    rewrite_manifest(copy)
    with refuses(copy, f"{name} is no part of an export"):
        check_export(copy)


def test_links_and_special_files_are_refused(copy, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    with watching(outside, outside / "secret") as opened:
        for make in (
            lambda path: path.symlink_to(outside / "secret"),
            lambda path: path.symlink_to(outside),
            lambda path: path.symlink_to(tmp_path / "nowhere"),
            os.mkfifo,
        ):
            make(copy / "assets" / "added")
            with refuses(copy, "assets/added is a link or a special file"):
                check_export(copy)
            (copy / "assets" / "added").unlink()
        assert opened() == []
    link = tmp_path / "link"
    link.symlink_to(copy)
    with refuses(copy, "is a link"):
        check_export(link)
    with refuses(copy, "is not a directory"):
        check_export(tmp_path / "nowhere")


def test_documents_that_are_no_json_are_refused(copy):
    path = copy / layout.MODEL_CARD_FILE
    for content in (b"", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        rewrite_manifest(copy)
        with refuses(copy, "model_card.json is not JSON"):
            check_export(copy)


def test_manifests_that_are_none_are_refused(copy):
    path = copy / layout.MANIFEST_FILE
    for content in (b"", b"[]", b"3", b'{"files": 3}', b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ServingError):
            check_export(copy)
    manifest.write_json(path, {"format_version": 1, "files": {"saved_model.pb": 3}})
    with refuses(copy, "which its manifest does not list"):
        check_export(copy)


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_manifests_of_another_format_are_refused(copy, version):
    path = copy / layout.MANIFEST_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    manifest.write_json(path, content | {"format_version": version})
    with refuses(copy, rf"manifest.json has format version {version!r}; this version of tff_pdp reads only 1 and 2"):
        check_export(copy)


def test_a_manifest_that_was_changed_is_refused_and_one_of_the_first_format_is_read(copy):
    path = copy / layout.MANIFEST_FILE
    content = json.loads(path.read_text(encoding="utf-8"))
    for damaged in ({"num_clients": 1000}, {"format_version": 1}, {"digest": "0" * 64}):
        manifest.write_json(path, content | damaged)
        with refuses(copy, r"manifest.json is damaged \(its digest does not match\); copy the export again"):
            check_export(copy)
    del content["digest"]
    manifest.write_json(path, content)
    with refuses(copy, "manifest.json is damaged"):
        check_export(copy)
    manifest.write_json(path, content | {"format_version": 1})
    check_export(copy)


def test_warmup_requests_that_servers_would_not_load_are_refused(copy):
    path = copy / layout.WARMUP_FILE
    good = path.read_bytes()
    stored = len(unframe(good, "good"))
    session_run = prediction_log_pb2.PredictionLog()
    session_run.session_run_log.request.model_spec.name = "toy"
    large = prediction_log_pb2.PredictionLog()
    tensor = large.predict_log.request.inputs["x"]
    tensor.CopyFrom(tf.make_tensor_proto(np.zeros(1, np.float32)))
    tensor.tensor_shape.dim[0].size = 1 << 40
    for content, message in [
        (good[:-1], "tf_serving_warmup_requests is damaged: .* corrupt TFRecord"),
        (good[:20] + bytes([good[20] ^ 1]) + good[21:], "is damaged: .* corrupt TFRecord at byte 0"),
        (good + frame(b"\xff\xff"), f"record {stored} is not a PredictionLog"),
        (frame(b""), "record 0 is empty, not a predict, classify or regress log"),
        (good + frame(session_run.SerializeToString()), f"record {stored} is session_run_log"),
        (frame(large.SerializeToString()), "record 0 has an input 'x' of shape"),
        (frame(large.SerializeToString()) * 1001, "holds 1001 records; servers take at most 1000"),
    ]:
        path.write_bytes(content)
        rewrite_manifest(copy)
        with refuses(copy, message):
            check_export(copy)
    os.truncate(path, (64 << 20) + 1)
    rewrite_manifest(copy)
    with refuses(copy, "has more than 67108864 bytes"):
        check_export(copy)
    path.unlink()
    rewrite_manifest(copy)
    check_export(copy)


def test_an_unreadable_file_is_refused(copy, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(manifest, "prefix_of", fail)
    with refuses(copy, "cannot be read: .*Permission denied"):
        check_export(copy)


def test_allowed_ops_are_ops_of_this_tensorflow():
    from tensorflow.python.framework import op_def_registry

    assert [op for op in sorted(ALLOWED_OPS) if op_def_registry.get(op) is None] == []


def test_manifest_keeps_its_details(copy):
    before = json.loads((copy / layout.MANIFEST_FILE).read_text())
    rewrite_manifest(copy)
    assert json.loads((copy / layout.MANIFEST_FILE).read_text()) == before
