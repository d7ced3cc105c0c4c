"""JSON files that carry a digest of themselves, so that a damaged one is told from another."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tff_pdp.errors import DataError
from tff_pdp.files import write_atomically

_DIGEST = "digest"


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with a digest of itself, in place of one that the content may have."""
    bare = {key: value for key, value in content.items() if key != _DIGEST}
    return {**bare, _DIGEST: _digest(bare)}


def as_text(content: Mapping[str, Any]) -> str:
    """JSON text with a digest of itself, which `from_text` checks."""
    return json.dumps(with_digest(content), indent=2) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes plain data as JSON with a digest; when this returns, the file outlasts a power cut."""
    write_atomically(path, [as_text(content).encode()])


def read_json(path: Path, *, undigested: Collection[int | None] = ()) -> dict[str, Any]:
    """Reads what `write_json` wrote.

    Args:
      path: the file.
      undigested: each `format_version` of files without a digest; None of those without that either.

    Raises:
      DataError: the file is missing or damaged.
    """
    try:
        return from_text(path.read_bytes(), undigested=undigested)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: restore it from a copy") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): restore it from a copy") from None


def from_text(text: bytes, *, undigested: Collection[int | None] = ()) -> dict[str, Any]:
    """The content of what `as_text` gave.

    Args:
      text: UTF-8.
      undigested: as of `read_json`.

    Raises:
      ValueError: the text is damaged.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    version = content.get("format_version")
    is_known = (version is None or isinstance(version, int)) and version in undigested
    if (_DIGEST in content or not is_known) and content.pop(_DIGEST, None) != _digest(content):
        raise ValueError("its digest is another")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
