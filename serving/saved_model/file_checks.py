"""Checks on the files of an export: nothing but the files that a server expects, and documents that are JSON."""

import json
from pathlib import Path

from serving.saved_model import layout
from tff_pdp.errors import ServingError

# A loader that finds the same graph under another name, or settings of a server, would use them instead.
_TOP_LEVEL = frozenset({layout.SAVED_MODEL_FILE, "fingerprint.pb", "variables", "assets", "assets.extra"})
_SERVER_SETTINGS = f"{layout.EXTRA_DIRECTORY}/saved_model_config.pbtxt"


def check_files(export_dir: Path) -> None:
    """Refuses links, special files and files that loaders read instead of those that are checked.

    Raises:
      ServingError: naming the first one.
    """
    if not export_dir.is_dir():
        raise ServingError(f"{export_dir} is not a directory.")
    for path in (export_dir, *export_dir.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ServingError(f"{path} is a link or a special file; an export may hold plain files only.")
        if (path.parent == export_dir and path.name not in _TOP_LEVEL) or path == export_dir / _SERVER_SETTINGS:
            raise ServingError(f"{path} is no part of an export; remove it.")


def check_documents(export_dir: Path) -> None:
    """Refuses a model card, a privacy report or another document beside them that is not JSON.

    Raises:
      ServingError: naming the file.
    """
    for path in sorted((export_dir / layout.EXTRA_DIRECTORY).glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ServingError(f"{path} is not JSON: {error}.") from error


def check_complete(export_dir: Path) -> None:
    """Refuses an export without a file that a server can do without and the exporter always writes.

    Raises:
      ServingError: naming the file.
    """
    for name in (layout.MODEL_CARD_FILE, layout.PRIVACY_REPORT_FILE, layout.WARMUP_FILE):
        if not (export_dir / name).is_file():
            raise ServingError(f"{export_dir} has no {name}: it is not a complete export; export the model again.")
