"""Conventions of TensorFlow Serving's image: its name, its paths and arguments, and as whom it should run."""

from pathlib import Path

# The oldest server that has every op of an export written by this package's TensorFlow.
DOCKER_IMAGE = "tensorflow/serving:2.14.1"
# Where the server in the image sees the models.
MODELS_DIRECTORY = "/models"
CONFIG_FILE = "models.config"
# The REST port has metrics at this path, as `monitoring.config` tells the server.
METRICS_PATH = "/monitoring/prometheus/metrics"
# A label is refused at the start for a version that is not loaded yet, which at the start is each of them.
LABELS_ARGUMENT = "--allow_version_labels_for_unavailable_models=true"
NOBODY = 65534


def owner(path: Path) -> str:
    """User and group of a folder, as containers take them; nobody's where it is root's."""
    stat = path.stat()
    return f"{stat.st_uid}:{stat.st_gid}" if stat.st_uid else f"{NOBODY}:{NOBODY}"
