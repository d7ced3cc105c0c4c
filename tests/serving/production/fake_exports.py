"""Folders that look like exports, for what reads their names and sizes only."""

import json
from pathlib import Path

from serving.saved_model import layout


def write_export(base_path: Path, version: int, nbytes: int = 10) -> Path:
    """A version whose one file has `nbytes` bytes."""
    export_dir = base_path / str(version)
    (export_dir / layout.EXTRA_DIRECTORY).mkdir(parents=True)
    (export_dir / layout.SAVED_MODEL_FILE).write_bytes(bytes(nbytes))
    manifest = {"files": {layout.SAVED_MODEL_FILE: "0"}}
    (export_dir / layout.MANIFEST_FILE).write_text(json.dumps(manifest))
    return export_dir
