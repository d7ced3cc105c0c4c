from pathlib import Path

import grpc
import pytest
from google.protobuf import text_format

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.config import model_server_config_pb2

from serving.errors import RequestError
from serving.tf_serving import Latest, ServedModel, Specific, from_proto, read_model_config_file
from tff_pdp.errors import ServingError


def test_a_file_lists_models_with_policies_and_labels(tmp_path):
    path = tmp_path / "models.config"
    path.write_text(
        """
        model_config_list {
          config { name: "a" base_path: "/m/a" model_platform: "tensorflow" }
          config { name: "b" base_path: "/m/b" model_platform: "tensorflow"
                   model_version_policy { latest { num_versions: 3 } } }
          config { name: "c" base_path: "/m/c" model_type: TENSORFLOW model_version_policy { all {} } }
          config { name: "d" base_path: "/m/d" model_platform: "tensorflow"
                   model_version_policy { specific { versions: 4 versions: 2 } }
                   version_labels { key: "stable" value: 2 } version_labels { key: "canary" value: 4 } }
        }
        """
    )
    assert read_model_config_file(path) == [
        ServedModel("a", Path("/m/a"), Latest(1), {}),
        ServedModel("b", Path("/m/b"), Latest(3), {}),
        ServedModel("c", Path("/m/c"), Latest(None), {}),
        ServedModel("d", Path("/m/d"), Specific((4, 2)), {"stable": 2, "canary": 4}),
    ]


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (Latest(1), {9}),
        (Latest(2), {3, 9}),
        (Latest(5), {1, 3, 9}),
        (Latest(None), {1, 3, 9}),
        (Specific((3, 4)), {3}),
        (Specific((4,)), set()),
    ],
)
def test_policies_choose_among_what_is_found(policy, chosen):
    assert policy.choose([9, 1, 3]) == chosen
    assert policy.choose([]) == set()


def entry(**changes):
    fields = {"name": '"a"', "base_path": '"/m/a"', "model_platform": '"tensorflow"', **changes}
    return "config {" + " ".join(f"{key}: {value}" for key, value in fields.items() if value) + "}"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(), entry()], "Illegal to list model a multiple times in config list"),
        (
            [entry(base_path='"m/a"')],
            "Expected model a to have an absolute path or URI; got base_path()=m/a",
        ),
        ([entry(base_path='"gs://m/a"')], "Model a is at gs://m/a; this server reads local folders only."),
        (
            [entry(model_platform=None)],
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            "ModelServerConfig::model_platform, model name is a",
        ),
        (
            [entry(model_type="TENSORFLOW")],
            "Illegal setting both ModelServerConfig::model_type (deprecated) and "
            "ModelServerConfig::model_platform, model name is a",
        ),
        (
            [entry(model_platform=None, model_type="OTHER")],
            "ModelServerConfig::model_type choice 2 not supported.",
        ),
        ([entry(model_platform='"onnx"')], "Model a requests unsupported platform onnx"),
        ([entry(model_version_policy="{ specific {} }")], "No specific versions requested for servable a."),
        ([entry(name='"../a"')], "Model name '../a' cannot be served"),
        ([entry(name=None)], "Model name '' cannot be served"),
    ],
)
def test_a_wrong_list_is_refused_with_the_message_of_tensorflow_serving(tmp_path, entries, message):
    text = f"model_config_list {{ {' '.join(entries)} }}"
    with pytest.raises(RequestError) as refused:
        from_proto(text_format.Parse(text, model_server_config_pb2.ModelServerConfig()))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.message.startswith(message)
    path = tmp_path / "models.config"
    path.write_text(text)
    with pytest.raises(ServingError) as error:
        read_model_config_file(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_only_lists_are_supported():
    with pytest.raises(RequestError, match="Only ModelConfigList is currently supported"):
        from_proto(model_server_config_pb2.ModelServerConfig())
    with pytest.raises(RequestError, match="Only ModelConfigList is currently supported"):
        from_proto(text_format.Parse("custom_model_config {}", model_server_config_pb2.ModelServerConfig()))


def test_an_unreadable_file_is_one_clear_error(tmp_path):
    path = tmp_path / "models.config"
    with pytest.raises(ServingError, match="No such file"):
        read_model_config_file(path)
    path.write_text("model_config_list { config { nam: 1 } }")
    with pytest.raises(ServingError, match=r"models.config is not a readable model config: 1:30"):
        read_model_config_file(path)
