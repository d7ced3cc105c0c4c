"""Graphs that would touch other files than an export needs, or set variables, are refused; each is made by hand."""

import numpy as np
import pytest
from tensorflow.core.framework import types_pb2

from serving.saved_model.checks import check_export
from serving.saved_model.servable import Servable
from tests.serving.saved_model.graphs import add_constant, caller_of, function_with, node_of, refuses
from tests.serving.verify.mutants import edited


def from_a_constant(meta_graph):
    call = caller_of(meta_graph, function_with(meta_graph, "InitializeTableFromTextFileV2"))
    call.input[0] = add_constant(meta_graph.graph_def.node, "/etc/hostname").name


def from_a_constant_in_a_variable(meta_graph):
    assignment = next(node for node in meta_graph.graph_def.node if node.op == "AssignVariableOp")
    assignment.input[1] = add_constant(meta_graph.graph_def.node, "/etc/hostname").name


def from_a_constant_in_the_function(meta_graph):
    function = function_with(meta_graph, "InitializeTableFromTextFileV2")
    add_constant(function.node_def, "/etc/hostname")
    node_of(meta_graph, "InitializeTableFromTextFileV2").input[1] = "file_name:output:0"


def from_a_request(meta_graph):
    call = caller_of(meta_graph, function_with(meta_graph, "InitializeTableFromTextFileV2"))
    call.input[0] = meta_graph.signature_def["serving_default"].inputs["client_id"].name


def from_joined_strings(meta_graph):
    function = function_with(meta_graph, "InitializeTableFromTextFileV2")
    initialization = node_of(meta_graph, "InitializeTableFromTextFileV2")
    joined = function.node_def.add(name="joined", op="StringJoin", input=[initialization.input[1]])
    joined.attr["N"].i = 1
    initialization.input[1] = "joined:output:0"


def from_an_object_that_is_no_asset(meta_graph):
    function = function_with(meta_graph, "InitializeTableFromTextFileV2")
    objects = meta_graph.object_graph_def
    bound = objects.concrete_functions[function.signature.name].bound_inputs
    bound[0] = next(index for index, node in enumerate(objects.nodes) if node.WhichOneof("kind") == "constant")


def from_whoever_calls_the_function(meta_graph):
    function = function_with(meta_graph, "InitializeTableFromTextFileV2")
    del meta_graph.object_graph_def.concrete_functions[function.signature.name].bound_inputs[0]


def of_variables_from_a_constant(meta_graph):
    function = function_with(meta_graph, "RestoreV2")
    caller_of(meta_graph, function).input[0] = add_constant(meta_graph.graph_def.node, "/var/elsewhere").name


def from_a_constant_in_place_of_an_asset(meta_graph):
    # Loaders feed it, but only where they mean to.
    become_constant(meta_graph, meta_graph.asset_file_def[0].tensor_info.name)


def from_a_default_in_place_of_an_asset(meta_graph):
    node = node_named(meta_graph, meta_graph.asset_file_def[0].tensor_info.name)
    node.op = "PlaceholderWithDefault"
    node.input.append(add_constant(meta_graph.graph_def.node, "/etc/hostname").name)


def of_variables_from_a_constant_in_place_of_their_name(meta_graph):
    become_constant(meta_graph, meta_graph.saver_def.filename_tensor_name)


def from_a_variable_that_a_function_reads(meta_graph):
    # `tf.saved_model.load` restores variables that the graph never sets.
    function = function_with(meta_graph, "InitializeTableFromTextFileV2")
    reading = node_of(meta_graph, "InitializeTableFromTextFileV2")
    read = function.node_def.add(name="read", op="ReadVariableOp", input=[reading.input[0]])
    read.attr["dtype"].type = types_pb2.DT_STRING
    reading.input[1] = "read:value:0"


def without_a_name(meta_graph):
    del node_of(meta_graph, "InitializeTableFromTextFileV2").input[:]


@pytest.mark.parametrize(
    "change",
    [
        from_a_constant,
        from_a_constant_in_a_variable,
        from_a_constant_in_the_function,
        from_a_request,
        from_joined_strings,
        from_an_object_that_is_no_asset,
        from_whoever_calls_the_function,
        of_variables_from_a_constant,
        from_a_constant_in_place_of_an_asset,
        from_a_default_in_place_of_an_asset,
        of_variables_from_a_constant_in_place_of_their_name,
        from_a_variable_that_a_function_reads,
        without_a_name,
    ],
)
def test_file_names_that_the_loader_does_not_give_are_refused(copy, change):
    with edited(copy) as meta_graph:
        change(meta_graph)
    with refuses(copy, "reads a file that is not one of|does not say which file"):
        check_export(copy)


def node_named(meta_graph, reference):
    return next(node for node in meta_graph.graph_def.node if node.name == reference.partition(":")[0])


def become_constant(meta_graph, reference):
    node = node_named(meta_graph, reference)
    meta_graph.graph_def.node.remove(node)
    add_constant(meta_graph.graph_def.node, "/etc/hostname", node.name)


def a_signature_that_saves(meta_graph):
    meta_graph.signature_def["predict"].outputs["saved"].name = meta_graph.saver_def.save_tensor_name
    return "a request may not use"


def a_signature_that_restores(meta_graph):
    meta_graph.signature_def["predict"].outputs["restored"].name = f"{meta_graph.saver_def.restore_op_name}:0"
    return "a request may not use"


def a_control_dependency_that_saves(meta_graph):
    output = node_named(meta_graph, meta_graph.signature_def["predict"].outputs["personalized"].name)
    output.input.append(f"^{node_named(meta_graph, meta_graph.saver_def.save_tensor_name).name}")
    return "a request may not use"


def a_request_that_sets_a_variable(meta_graph):
    output = node_named(meta_graph, meta_graph.signature_def["predict"].outputs["personalized"].name)
    output.input.append(f"^{node_of(meta_graph, 'AssignVariableOp').name}")
    return "a request may not use AssignVariableOp"


def restoring_that_saves(meta_graph):
    meta_graph.saver_def.restore_op_name = meta_graph.saver_def.save_tensor_name.partition(":")[0]
    return "restoring variables may not use"


def restoring_that_reads_assets(meta_graph):
    reading = caller_of(meta_graph, function_with(meta_graph, "InitializeTableFromTextFileV2"))
    node_named(meta_graph, meta_graph.saver_def.restore_op_name).input.append(f"^{reading.name}")
    return "restoring variables may not use InitializeTableFromTextFileV2"


def initialization_that_saves(meta_graph):
    meta_graph.collection_def["saved_model_main_op"].node_list.value[0] = meta_graph.saver_def.save_tensor_name
    return "initialization may not use"


def initialization_that_restores(meta_graph):
    initialization = node_named(meta_graph, meta_graph.collection_def["saved_model_main_op"].node_list.value[0])
    initialization.input.append(f"^{meta_graph.saver_def.restore_op_name}")
    return "initialization may not use RestoreV2"


def initialization_in_a_branch_that_restores(meta_graph):
    initialization = node_named(meta_graph, meta_graph.collection_def["saved_model_main_op"].node_list.value[0])
    branch = meta_graph.graph_def.node.add(name="branch", op="If")
    branch.attr["then_branch"].func.name = function_with(meta_graph, "RestoreV2").signature.name
    branch.attr["else_branch"].func.name = function_with(meta_graph, "HashTableV2").signature.name
    initialization.input.append("^branch")
    return "initialization may not use RestoreV2"


def saving_that_reads_assets(meta_graph):
    reading = caller_of(meta_graph, function_with(meta_graph, "InitializeTableFromTextFileV2"))
    node_named(meta_graph, meta_graph.saver_def.save_tensor_name).input.append(f"^{reading.name}")
    return "saving may not use"


def an_object_that_saves(meta_graph):
    add_saving(function_with(meta_graph, "HashTableV2"))
    return "a function of an object may not use SaveV2"


def an_object_that_restores(meta_graph):
    function = function_with(meta_graph, "RestoreV2").signature.name
    meta_graph.object_graph_def.concrete_functions[function].SetInParent()
    return "a function of an object may not use RestoreV2"


def an_object_of_no_function(meta_graph):
    meta_graph.object_graph_def.concrete_functions["nowhere"].SetInParent()
    return "a function 'nowhere' is used, which is not there"


def a_function_that_nobody_calls(meta_graph):
    function = meta_graph.graph_def.library.function.add()
    function.signature.name = "idle"
    add_saving(function)
    return "node 'save' uses SaveV2, and neither saving nor loading runs it"


def a_node_that_nobody_runs(meta_graph):
    meta_graph.graph_def.node.add(name="idle", op="RestoreV2", input=[meta_graph.saver_def.filename_tensor_name])
    return "node 'idle' uses RestoreV2, and neither saving nor loading runs it"


def add_saving(function):
    function.node_def.add(name="save", op="SaveV2", input=[add_constant(function.node_def, "/var/elsewhere").name])


@pytest.mark.parametrize(
    "change",
    [
        a_signature_that_saves,
        a_signature_that_restores,
        a_control_dependency_that_saves,
        a_request_that_sets_a_variable,
        restoring_that_saves,
        restoring_that_reads_assets,
        initialization_that_saves,
        initialization_that_restores,
        initialization_in_a_branch_that_restores,
        saving_that_reads_assets,
        an_object_that_saves,
        an_object_that_restores,
        an_object_of_no_function,
        a_function_that_nobody_calls,
        a_node_that_nobody_runs,
    ],
)
def test_files_are_touched_by_what_needs_them_only(copy, change):
    with edited(copy) as meta_graph:
        message = change(meta_graph)
    with refuses(copy, message):
        check_export(copy)


def test_tensorflow_would_swap_functions_that_the_checks_refuse(copy, tmp_path):
    # Shows that the attack is real: nobody calls the function that saves.
    with edited(copy) as meta_graph:
        called = node_named(meta_graph, meta_graph.signature_def["serving_default"].outputs["personalized"].name)
        library = meta_graph.graph_def.library.function
        called_function = next(one for one in library if one.signature.name == called.attr["f"].func.name)
        saving = library.add()
        saving.CopyFrom(called_function)
        saving.signature.name = "swapped_in"
        constants = [
            add_constant(saving.node_def, value, name).name + ":output:0"
            for name, value in (("prefix", str(tmp_path / "written")), ("names", ["a"]), ("slices", [""]))
        ]
        save = saving.node_def.add(name="save", op="SaveV2", input=[*constants, constants[0]])
        save.attr["dtypes"].list.type.append(types_pb2.DT_STRING)
        for node in saving.node_def:
            if node.op == "Identity":
                node.input.append("^save")
        for function, device in ((called_function, b"GPU"), (saving, b"CPU")):
            function.attr["api_implements"].s = b"the same"
            function.attr["api_preferred_device"].s = device
        called.device = "/device:CPU:0"
    with refuses(copy, "has the attribute 'api_implements', which may change what runs"):
        check_export(copy)
    servable = Servable(copy)
    servable.predict("", {"client_id": np.array([""], object), "x": np.zeros((1, 3, 2), np.float32)})
    servable.close()
    assert (tmp_path / "written.index").exists()
