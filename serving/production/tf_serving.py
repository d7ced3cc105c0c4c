"""Serving exports with TensorFlow Serving by one command: a configuration beside the versions, and the command."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from serving.production.exports import complete_versions
from serving.production.image import CONFIG_FILE, DOCKER_IMAGE, LABELS_ARGUMENT, MODELS_DIRECTORY, owner
from serving.production.models_config import write_model_config_file
from serving.saved_model import layout
from serving.tf_serving import ServedModel, read_model_config_file
from tff_pdp.errors import ServingError


def write_models_config(base_path: str | Path, model_name: str) -> Path:
    """Writes `models.config` into the base path, for a server that sees the base path as `/models/<model_name>`.

    It lies beside the versions, where servers ignore it, so that one mount carries both. A file that lists the model
    stays as it is: a rollout by labels lives in it.

    Args:
      base_path: directory of the model's versions.
      model_name: the name requests will use.

    Returns:
      The file.

    Raises:
      ServingError: if the name cannot be served or there is no complete version: TensorFlow Serving would wait for
        one without end.
    """
    layout.check_model_name(model_name)
    base_path = Path(base_path)
    if not complete_versions(base_path):
        raise ServingError(f"{base_path} holds no version; export the model before configuring a server for it.")
    path = base_path / CONFIG_FILE
    if not path.exists() or model_name not in [model.name for model in read_model_config_file(path)]:
        write_model_config_file([ServedModel(model_name, Path(MODELS_DIRECTORY) / model_name)], path)
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
    return docker_run(Path(base_path), f"{MODELS_DIRECTORY}/{model_name}", rest_port=rest_port, grpc_port=grpc_port)


def docker_run(
    folder: Path, inside: str, arguments: Sequence[str] = (), *, rest_port: int = 8501, grpc_port: int = 8500
) -> str:
    """Returns the shell line that serves the list of models in a folder, which the server can read but not write.

    The server runs as the folder's owner, so that nobody else need be able to read it; as nobody where that is root.

    Args:
      folder: an existing folder with `models.config` and the models.
      inside: where the server sees the folder.
      arguments: further arguments of the server.
      rest_port: port of the REST API on this machine's loopback address.
      grpc_port: port of the gRPC API there.
    """
    return shlex.join(
        [
            *("docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", f"--user={owner(folder)}", "--cap-drop=ALL"),
            "--security-opt=no-new-privileges",
            *("-p", f"127.0.0.1:{grpc_port}:8500"),
            *("-p", f"127.0.0.1:{rest_port}:8501"),
            *("--mount", f"type=bind,source={folder.absolute()},target={inside},readonly"),
            DOCKER_IMAGE,
            LABELS_ARGUMENT,
            *arguments,
            f"--model_config_file={inside}/{CONFIG_FILE}",
        ]
    )
