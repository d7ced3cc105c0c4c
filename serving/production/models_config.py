"""Writing TensorFlow Serving's `models.config`: the list of all models, their versions and labels."""

from collections.abc import Iterable
from pathlib import Path

from google.protobuf import text_format

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false
from tensorflow_serving.config import model_server_config_pb2

from serving.tf_serving import All, Latest, ServedModel
from tff_pdp.files import replace_text


def write_model_config_file(models: Iterable[ServedModel], path: Path) -> None:
    """Writes a file that `--model_config_file` and `serving.server.model_config.read_model_config_file` read."""
    replace_text(path, text_format.MessageToString(to_proto(models)))


def to_proto(models: Iterable[ServedModel]) -> model_server_config_pb2.ModelServerConfig:
    """The same list as a message, as `ReloadConfigRequest` wants it."""
    config = model_server_config_pb2.ModelServerConfig()
    for model in models:
        entry = config.model_config_list.config.add(
            name=model.name,
            base_path=str(model.base_path),
            model_platform="tensorflow",
            version_labels=dict(model.labels),
        )
        policy = entry.model_version_policy
        if isinstance(model.policy, Latest):
            policy.latest.num_versions = model.policy.num_versions
        elif isinstance(model.policy, All):
            policy.all.SetInParent()
        else:
            policy.specific.versions.extend(model.policy.versions)
    return config
