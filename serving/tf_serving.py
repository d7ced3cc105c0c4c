"""Serving an export with TensorFlow Serving itself: its configuration file and the command that starts it."""

import shlex
from pathlib import Path

from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from serving import layout
from tff_pdp.errors import ServingError

CONFIG_FILE = "models.config"
# The oldest server that has every op of an export written by this package's TensorFlow.
DOCKER_IMAGE = "tensorflow/serving:2.14.1"
_CONTAINER_DIRECTORY = "/models"


def write_models_config(base_path: str | Path, model_name: str) -> Path:
    """Writes `models.config` into the base path, for a server that sees the base path as `/models/<model_name>`.

    It lies beside the versions, where servers ignore it, so that one mount carries both.

    Args:
      base_path: directory of the model's versions.
      model_name: the name requests will use.

    Returns:
      The file.

    Raises:
      ServingError: if the name cannot be served or there is no published version: TensorFlow Serving would wait for
        one without end.
    """
    layout.check_model_name(model_name)
    base_path = Path(base_path)
    if not layout.published_versions(base_path):
        raise ServingError(f"{base_path} holds no version; export the model before configuring a server for it.")
    config = model_server_config_pb2.ModelServerConfig()  # pyright: ignore[reportAttributeAccessIssue]
    entry = config.model_config_list.config.add()
    entry.name = model_name
    entry.base_path = _container_path(model_name)
    entry.model_platform = "tensorflow"
    entry.model_version_policy.latest.num_versions = 1
    path = base_path / CONFIG_FILE
    path.write_text(text_format.MessageToString(config), encoding="utf-8")
    return path


def docker_command(base_path: str | Path, model_name: str, rest_port: int = 8501, grpc_port: int = 8500) -> str:
    """Returns the shell line that serves an export on this machine's loopback address; needs `write_models_config`.

    Args:
      base_path: directory of the model's versions and its `models.config`.
      model_name: the name requests will use.
      rest_port: port of the REST API on this machine.
      grpc_port: port of the gRPC API on this machine.
    """
    layout.check_model_name(model_name)
    inside = _container_path(model_name)
    return shlex.join(
        [
            *("docker", "run", "--rm"),
            *("-p", f"127.0.0.1:{grpc_port}:8500"),
            *("-p", f"127.0.0.1:{rest_port}:8501"),
            *("--mount", f"type=bind,source={Path(base_path).absolute()},target={inside},readonly"),
            DOCKER_IMAGE,
            f"--model_config_file={inside}/{CONFIG_FILE}",
        ]
    )


def _container_path(model_name: str) -> str:
    return f"{_CONTAINER_DIRECTORY}/{model_name}"
