"""Names conventions of TensorFlow Serving: its image, paths and arguments, its user, and its JSON."""

from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

# The oldest server with every op of an export of this package's TensorFlow.
DOCKER_IMAGE = "tensorflow/serving:2.14.1"
# The models' folder inside the image.
MODELS_DIRECTORY = "/models"
CONFIG_FILE = "models.config"
# The REST port has metrics at this path, as `monitoring.config` tells the server.
METRICS_PATH = "/monitoring/prometheus/metrics"
# Otherwise labels are refused at the start, when no version is loaded yet.
LABELS_ARGUMENT = "--allow_version_labels_for_unavailable_models=true"
NOBODY = 65534


def owner(path: Path) -> str:
    """Returns a folder's user and group as containers take them; nobody's where the folder is root's."""
    stat = path.stat()
    return f"{stat.st_uid}:{stat.st_gid}" if stat.st_uid else f"{NOBODY}:{NOBODY}"


def to_dict(message: Message) -> dict[str, Any]:
    """Converts a message to JSON values, every field under its own name, zeros included."""
    return json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        including_default_value_fields=True,  # pyright: ignore[reportCallIssue]  # Named differently from protobuf 5 on.
    )
