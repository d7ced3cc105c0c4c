"""Computes digests: of JSON content, stored with a digest of itself, and of the first bytes of a file."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp.errors import DataError
from tff_pdp.files import write_atomically

_DIGEST = "digest"


class Prefix(NamedTuple):
    """The beginning of a file.

    Attributes:
      num_bytes: number of bytes of the beginning.
      sha256: SHA-256 of these bytes, hexadecimal.
    """

    num_bytes: int
    sha256: str

    def check(self, path: Path) -> None:
        """Checks that the first `num_bytes` bytes of a file have the digest `sha256`.

        Raises:
          DataError: the file begins with other bytes, or is missing.
        """
        if prefix_of(path, self.num_bytes) != self:
            raise DataError(f"{path} is damaged or missing: restore it from a copy")


def prefix_of(path: Path, num_bytes: int | None = None) -> Prefix:
    """Returns the size and digest of a file's first bytes (by default, all); a missing file is treated as empty."""
    digest, left = hashlib.sha256(), num_bytes
    if not path.is_file():
        return Prefix(0, digest.hexdigest())
    size = 0
    with open(path, "rb") as file:
        while part := file.read(2**20 if left is None else min(left, 2**20)):
            digest.update(part)
            size += len(part)
            left = None if left is None else left - len(part)
    return Prefix(size, digest.hexdigest())


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with an added digest of itself; an earlier digest is replaced."""
    bare = {key: value for key, value in content.items() if key != _DIGEST}
    return {**bare, _DIGEST: _digest(bare)}


def as_text(content: Mapping[str, Any]) -> str:
    """Returns the content as indented JSON text with a digest of itself, which `from_text` checks."""
    return json.dumps(with_digest(content), indent=2) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes plain data as JSON with a digest; once the call returns, the file survives a power cut."""
    write_atomically(path, [as_text(content).encode()])


def read_json(path: Path, *, undigested: Collection[int | None] = ()) -> dict[str, Any]:
    """Reads a JSON file that `write_json` wrote, checks the digest, and returns the content without the digest.

    Args:
      path: the file.
      undigested: values of `format_version` with which a file may lack a digest; None means a file without version.

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
    """Returns the content of UTF-8 text that `as_text` or `as_line` wrote; `undigested` is as in `read_json`.

    Raises:
      ValueError: the text is damaged.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    version = content.get("format_version")
    is_known = (version is None or isinstance(version, int)) and version in undigested
    if (_DIGEST in content or not is_known) and content.pop(_DIGEST, None) != _digest(content):
        raise ValueError("its digest does not match")
    return content


def as_line(content: Mapping[str, Any]) -> str:
    """Returns the content as one line of JSON with a digest of itself, which `from_text` checks."""
    return json.dumps(with_digest(content)) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
