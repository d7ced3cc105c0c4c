"""Defines TensorFlow Serving's names and formats (Docker image, paths, JSON); reads and writes `models.config`."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.message import Message
from tensorflow_serving.config import model_server_config_pb2

from serving.errors import RequestError, invalid_argument
from serving.saved_model import layout
from tff_pdp.errors import ServingError
from tff_pdp.files import replace_text

# TensorFlow Serving's message classes are built at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

# The oldest server that has every op in exports of this package's TensorFlow.
DOCKER_IMAGE = "tensorflow/serving:2.14.1"
# The models' folder inside the image.
MODELS_DIRECTORY = "/models"
CONFIG_FILE = "models.config"
# The REST port has metrics at this path, as `monitoring.config` tells the server.
METRICS_PATH = "/monitoring/prometheus/metrics"
# Otherwise labels are refused at the start, when no version is loaded yet.
LABELS_ARGUMENT = "--allow_version_labels_for_unavailable_models=true"
NOBODY = 65534
_PLATFORM = "tensorflow"
_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Latest:
    """The policy to serve the `num_versions` newest versions (at least 1); None serves all versions."""

    num_versions: int | None

    def choose(self, versions: Iterable[int]) -> set[int]:
        """Returns the versions to serve, chosen from the versions found on disk."""
        return set(sorted(versions)[-self.num_versions :] if self.num_versions else versions)


@dataclasses.dataclass(frozen=True)
class Specific:
    """The policy to serve exactly the versions listed in `versions`."""

    versions: tuple[int, ...]

    def choose(self, versions: Iterable[int]) -> set[int]:
        """Returns the versions to serve, chosen from the versions found on disk."""
        return set(versions) & set(self.versions)


VersionPolicy = Latest | Specific


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One model to serve.

    Attributes:
      name: model's name in requests.
      base_path: folder of the model, with one folder for each version, named by the version's number.
      policy: policy that chooses the versions to serve.
      labels: version numbers, by label.
    """

    name: str
    base_path: Path
    policy: VersionPolicy = Latest(1)
    labels: Mapping[str, int] = dataclasses.field(default_factory=dict)


def read_model_config_file(path: Path) -> list[ServedModel]:
    """Reads TensorFlow Serving's `models.config`, the text form of a `ModelServerConfig`.

    Raises:
      ServingError: the file cannot be read, or `from_proto` refuses its list of models.
    """
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_server_config_pb2.ModelServerConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ServingError(f"{path} is not a readable model config: {error}") from error
    try:
        return from_proto(config)
    except RequestError as error:
        raise ServingError(f"{path}: {error.message}") from error


def from_proto(config: model_server_config_pb2.ModelServerConfig) -> list[ServedModel]:
    """Converts a `ModelServerConfig` to a list of models, with TensorFlow Serving's checks and error messages.

    Two checks are stricter than TensorFlow Serving's: names must be valid in URLs, and folders must be local paths.

    Raises:
      RequestError: INVALID_ARGUMENT for the first entry that is wrong.
    """
    if config.WhichOneof("config") != "model_config_list":
        raise invalid_argument(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    entries = config.model_config_list.config
    seen = set()
    for entry in entries:
        if entry.name in seen:
            raise invalid_argument(f"Illegal to list model {entry.name} multiple times in config list")
        seen.add(entry.name)
    return [_served_model(entry) for entry in entries]


def _served_model(entry: model_server_config_pb2.ModelConfig) -> ServedModel:
    try:
        layout.check_model_name(entry.name)
    except ServingError as error:
        raise invalid_argument(str(error)) from error
    if "://" in entry.base_path:
        raise invalid_argument(f"Model {entry.name} is at {entry.base_path}; this server reads local folders only.")
    if not Path(entry.base_path).is_absolute() or "\0" in entry.base_path:
        raise invalid_argument(
            f"Expected model {entry.name} to have an absolute path or URI; got base_path()={entry.base_path}"
        )
    _check_platform(entry)
    if entry.HasField("logging_config"):
        _LOGGER.warning("logging_config of model %s is ignored: this server does not record requests.", entry.name)
    return ServedModel(entry.name, Path(entry.base_path), _policy(entry), dict(entry.version_labels))


def _check_platform(entry: model_server_config_pb2.ModelConfig) -> None:
    platform = entry.model_platform
    if entry.model_type != model_server_config_pb2.MODEL_TYPE_UNSPECIFIED:
        if platform:
            raise invalid_argument(
                "Illegal setting both ModelServerConfig::model_type (deprecated) and "
                f"ModelServerConfig::model_platform, model name is {entry.name}"
            )
        if entry.model_type != model_server_config_pb2.TENSORFLOW:
            raise invalid_argument(f"ModelServerConfig::model_type choice {entry.model_type} not supported.")
        platform = _PLATFORM
    if not platform:
        raise invalid_argument(
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            f"ModelServerConfig::model_platform, model name is {entry.name}"
        )
    if platform != _PLATFORM:
        raise invalid_argument(f"Model {entry.name} requests unsupported platform {platform}")


def _policy(entry: model_server_config_pb2.ModelConfig) -> VersionPolicy:
    policy = entry.model_version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return Latest(None)
    if choice == "specific":
        if not policy.specific.versions:
            raise invalid_argument(f"No specific versions requested for servable {entry.name}.")
        return Specific(tuple(policy.specific.versions))
    return Latest(max(policy.latest.num_versions, 1))


def write_model_config_file(models: Iterable[ServedModel], path: Path) -> None:
    """Writes a `models.config`, for TensorFlow Serving's `--model_config_file` and for `read_model_config_file`."""
    replace_text(path, text_format.MessageToString(to_proto(models)))


def to_proto(models: Iterable[ServedModel]) -> model_server_config_pb2.ModelServerConfig:
    """Converts a list of models to a `ModelServerConfig`, for `models.config` files and `ReloadConfigRequest`s."""
    config = model_server_config_pb2.ModelServerConfig()
    for model in models:
        entry = config.model_config_list.config.add(
            name=model.name,
            base_path=str(model.base_path),
            model_platform=_PLATFORM,
            version_labels=dict(model.labels),
        )
        policy = entry.model_version_policy
        if isinstance(model.policy, Specific):
            policy.specific.versions.extend(model.policy.versions)
        elif model.policy.num_versions:
            policy.latest.num_versions = model.policy.num_versions
        else:
            policy.all.SetInParent()
    return config


def owner(path: Path) -> str:
    """Returns a folder's owner as numbers `user:group`, for containers; nobody's numbers if root owns the folder."""
    stat = path.stat()
    return f"{stat.st_uid}:{stat.st_gid}" if stat.st_uid else f"{NOBODY}:{NOBODY}"


def to_dict(message: Message) -> dict[str, Any]:
    """Converts a message to JSON values; fields keep their names, and fields with default values are included."""
    return json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        including_default_value_fields=True,  # pyright: ignore[reportCallIssue]  # Named differently from protobuf 5 on.
    )
