"""Where things are inside an export: names of files and directories, and which versions a base path holds."""

import re
from pathlib import Path

from tff_pdp.errors import ServingError

# The first is what a request gets that names none.
PREDICT_SIGNATURES = ("serving_default", "predict")
IMAGES_SIGNATURE = "predict_images"
CLASSIFY_SIGNATURE, REGRESS_SIGNATURE = "classify", "regress"

SAVED_MODEL_FILE = "saved_model.pb"
VARIABLES_PREFIX = "variables/variables"
ASSETS_DIRECTORY = "assets"
VOCABULARY_FILE = f"{ASSETS_DIRECTORY}/client_ids.txt"
EXTRA_DIRECTORY = "assets.extra"
MANIFEST_FILE = f"{EXTRA_DIRECTORY}/manifest.json"
MODEL_CARD_FILE = f"{EXTRA_DIRECTORY}/model_card.json"
PRIVACY_REPORT_FILE = f"{EXTRA_DIRECTORY}/privacy_report.json"
# TensorFlow Serving looks for exactly this name and replays the file before a version takes traffic.
WARMUP_FILE = f"{EXTRA_DIRECTORY}/tf_serving_warmup_requests"

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSION_NAME = re.compile(r"[0-9]{1,19}")
MAX_VERSION = 2**63 - 1


def check_model_name(model_name: str) -> None:
    """Refuses a model name that could not stand in a URL, a path and a config file alike.

    Raises:
      ServingError: if the name has other characters than letters, digits, `_`, `-` and `.`.
    """
    if not _MODEL_NAME.fullmatch(model_name):
        raise ServingError(
            f"Model name {model_name!r} cannot be served: use letters, digits, '_', '-' and '.', and start "
            "with a letter, a digit or '_'."
        )


def published_versions(base_path: Path) -> dict[int, Path]:
    """Returns the published version directories of a base path, oldest first.

    Only all-digit directories that are not links count, as for TensorFlow Serving; staging directories end in `.tmp`.

    Raises:
      ServingError: if `base_path` is not a readable directory.
    """
    try:
        children = list(base_path.iterdir())
    except OSError as error:
        raise ServingError(f"Cannot read the export directory {base_path}: {error.strerror}.") from error
    found = {
        int(child.name): child
        for child in children
        if _VERSION_NAME.fullmatch(child.name) and int(child.name) <= MAX_VERSION and is_plain_directory(child)
    }
    return dict(sorted(found.items()))


def is_plain_directory(path: Path) -> bool:
    """True for a directory that is not a link to one."""
    return path.is_dir() and not path.is_symlink()
