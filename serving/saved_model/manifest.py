"""The manifest of an export: what it holds, and the SHA-256 of every file, so that a damaged copy is not served."""

import hashlib
import json
from pathlib import Path
from typing import Any

from serving.saved_model import layout
from tff_pdp.errors import ServingError

FORMAT_VERSION = 1


def write_manifest(export_dir: Path, details: dict[str, Any]) -> None:
    """Writes `assets.extra/manifest.json` over the files that are there now; call it last.

    Args:
      export_dir: a complete SavedModel directory.
      details: JSON values recorded beside the hashes, such as the signatures and the TensorFlow version.
    """
    paths = [path for path in files(export_dir) if path != export_dir / layout.MANIFEST_FILE]
    write_json(
        export_dir / layout.MANIFEST_FILE,
        {
            "format_version": FORMAT_VERSION,
            **details,
            "total_bytes": sum(path.stat().st_size for path in paths),
            "files": {path.relative_to(export_dir).as_posix(): sha256(path) for path in paths},
        },
    )


def check_manifest(export_dir: Path) -> None:
    """Compares the files of an export with its manifest.

    Raises:
      ServingError: if the manifest is missing, malformed or of another format, or a file is missing, added or changed.
    """
    path = export_dir / layout.MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, expected = content["format_version"], dict(content["files"])
    except FileNotFoundError as error:
        raise ServingError(f"{export_dir} has no {layout.MANIFEST_FILE}: it is not a complete export.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{path} is not a manifest of this package; export the model again.") from error
    if version != FORMAT_VERSION:
        raise ServingError(
            f"{path} has format {version!r}, this version reads {FORMAT_VERSION}; export the model again."
        )
    present = {file.relative_to(export_dir).as_posix(): file for file in files(export_dir) if file != path}
    if missing := sorted(expected.keys() - present.keys()):
        raise ServingError(f"{export_dir} lacks {', '.join(missing)}, which its manifest lists; copy the export again.")
    if added := sorted(present.keys() - expected.keys()):
        raise ServingError(f"{export_dir} holds {', '.join(added)}, which its manifest does not list; remove it.")
    for name, file in present.items():
        if sha256(file) != expected[name]:
            raise ServingError(f"{file} does not match the SHA-256 in its manifest; copy the export again.")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes strict, indented JSON.

    Raises:
      ServingError: if `value` holds something JSON cannot express, NaN included.
    """
    try:
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ServingError(f"{path.name} cannot be written as JSON: {error}.") from error
    path.write_text(text + "\n", encoding="utf-8")


def files(export_dir: Path) -> list[Path]:
    """All files below a directory, sorted; links are not followed."""
    return sorted(path for path in export_dir.rglob("*") if path.is_file() and not path.is_symlink())


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
