"""Names the files of an export, finds the versions of a base path, and writes and checks an export's manifest.

The manifest has the SHA-256 of every file, so that damage to a copy is found before the copy is served.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tff_pdp.digests import from_text, prefix_of, with_digest
from tff_pdp.errors import ServingError

# A request that names no signature gets the first of these.
PREDICT_SIGNATURES = ("serving_default", "predict")
IMAGES_SIGNATURE = "predict_images"
# The methods of TensorFlow Serving's API; a signature that takes examples has the name of its method.
PREDICT, CLASSIFY, REGRESS = "predict", "classify", "regress"

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


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The model that a request addresses, by name, and its version, by number or by label; by default the newest."""

    name: str
    version: int | None = None
    label: str | None = None

    def __post_init__(self):
        if self.version is not None and self.label is not None:
            raise ServingError(f"Ask for model {self.name!r} by version or by label, not by both.")


def check_model_name(model_name: str) -> None:
    """Raises ServingError unless a model name is valid in URLs, paths and config files."""
    if not _MODEL_NAME.fullmatch(model_name):
        raise ServingError(
            f"Model name {model_name!r} cannot be served: use letters, digits, '_', '-' and '.', and start "
            "with a letter, a digit or '_'."
        )


def published_versions(base_path: Path) -> dict[int, Path]:
    """Returns the directories of the published versions of a base path, by version number, oldest first.

    As in TensorFlow Serving, a version is a directory whose name has digits only. Links are left out.

    Raises:
      ServingError: `base_path` is not a readable directory.
    """
    try:
        children = list(base_path.iterdir())
    except OSError as error:
        hint = " `tff-pdp export` writes it and prints its path." if isinstance(error, FileNotFoundError) else ""
        raise ServingError(f"Cannot read the export directory {base_path}: {error.strerror}.{hint}") from error
    found = {
        int(child.name): child
        for child in children
        if _VERSION_NAME.fullmatch(child.name) and int(child.name) <= MAX_VERSION and is_plain_directory(child)
    }
    return dict(sorted(found.items()))


def is_plain_directory(path: Path) -> bool:
    """Returns whether a path is a directory, and not a link to a directory."""
    return path.is_dir() and not path.is_symlink()


FORMAT_VERSION = 2
# The format of manifests without a digest of their own.
_UNDIGESTED_VERSION = 1


def write_manifest(export_dir: Path, details: dict[str, Any]) -> None:
    """Writes `assets.extra/manifest.json` with `details` (JSON values) and the other files' hashes; call this last."""
    paths = [path for path in files(export_dir) if path != export_dir / MANIFEST_FILE]
    content = with_digest(
        {
            **details,
            "format_version": FORMAT_VERSION,
            "total_bytes": sum(path.stat().st_size for path in paths),
            "files": {path.relative_to(export_dir).as_posix(): prefix_of(path).sha256 for path in paths},
        }
    )
    write_json(export_dir / MANIFEST_FILE, content)


def read_manifest(export_dir: Path) -> dict[str, Any]:
    """Reads the manifest of an export; the entry `files` has the SHA-256 of each file, by path in the export.

    Raises:
      ServingError: the manifest is missing, damaged or of an unknown format.
    """
    path = export_dir / MANIFEST_FILE
    try:
        stored = path.read_bytes()
        content = json.loads(stored)
        version, _ = content["format_version"], dict(content["files"])
    except FileNotFoundError as error:
        raise ServingError(f"{export_dir} has no {MANIFEST_FILE}: it is not a complete export.") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ServingError(f"{path} is not a manifest of this package; export the model again.") from error
    if version not in (FORMAT_VERSION, _UNDIGESTED_VERSION):
        raise ServingError(
            f"{path} has format version {version!r}; this version of tff_pdp reads only {_UNDIGESTED_VERSION} and "
            f"{FORMAT_VERSION}. Export the model again."
        )
    try:
        return from_text(stored, undigested=(_UNDIGESTED_VERSION,))
    except ValueError as error:
        raise ServingError(f"{path} is damaged ({error}); copy the export again.") from error


def read_document(export_dir: Path, name: str) -> dict[str, Any]:
    """Reads the JSON document `name` of an export, such as the model card, and compares its SHA-256 with the manifest.

    Raises:
      ServingError: the manifest or the document is missing or damaged.
    """
    path = export_dir / name
    expected = read_manifest(export_dir)["files"].get(name)
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == expected:
            return dict(json.loads(content))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ServingError(f"{path} cannot be read ({error}): restore it.") from error
    raise ServingError(f"{path} does not match the SHA-256 in its manifest; copy the export again.")


def check_manifest(export_dir: Path) -> None:
    """Checks that an export has exactly the files that its manifest lists, and that the files have the listed hashes.

    Raises:
      ServingError: the manifest is missing, damaged or of an unknown format, or a file is missing, added or changed.
    """
    path = export_dir / MANIFEST_FILE
    expected = read_manifest(export_dir)["files"]
    present = {file.relative_to(export_dir).as_posix(): file for file in files(export_dir) if file != path}
    if missing := sorted(expected.keys() - present.keys()):
        raise ServingError(f"{export_dir} lacks {', '.join(missing)}, which its manifest lists; copy the export again.")
    if added := sorted(present.keys() - expected.keys()):
        raise ServingError(f"{export_dir} holds {', '.join(added)}, which its manifest does not list; remove it.")
    for name, file in present.items():
        if prefix_of(file).sha256 != expected[name]:
            raise ServingError(f"{file} does not match the SHA-256 in its manifest; copy the export again.")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes strict, indented JSON; raises ServingError if JSON cannot express a value, such as NaN."""
    try:
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ServingError(f"{path.name} cannot be written as JSON: {error}.") from error
    path.write_text(text + "\n", encoding="utf-8")


def files(export_dir: Path) -> list[Path]:
    """Returns all files below a directory, sorted; links are not followed."""
    return sorted(path for path in export_dir.rglob("*") if path.is_file() and not path.is_symlink())
