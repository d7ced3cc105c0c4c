"""Digests of files: a JSON file that carries its own (`tff_pdp.json_files`), and what was in a file up to some byte."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from tff_pdp.errors import DataError
from tff_pdp.json_files import as_text, read_json, write_json

__all__ = ["Prefix", "as_text", "prefix_of", "read_json", "write_json"]


class Prefix(NamedTuple):
    """The beginning of a file.

    Attributes:
      num_bytes: how long it is.
      sha256: of these bytes, hexadecimal.
    """

    num_bytes: int
    sha256: str

    def check(self, path: Path) -> None:
        """Checks that a file begins so.

        Raises:
          DataError: it does not, or is missing.
        """
        found = prefix_of(path, self.num_bytes)
        if found != self:
            raise DataError(f"{path} is damaged or missing: restore it from a copy")


def prefix_of(path: Path, num_bytes: int | None = None) -> Prefix:
    """The first bytes of a file, by default all of them; none of a file that is missing."""
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
