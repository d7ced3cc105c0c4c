"""Records removals of clients from an experiment: their beginning and end, and which dataset follows which.

`forgotten.jsonl`, in the experiment's folder, is a journal (`tff_pdp.journal`) with lines of these kinds:

began: the client's keyed hash, and the SHA-256 of the manifest of the dataset that has the client.
ended: the same hash, and the SHA-256 of the manifest of the dataset without the client.

The hash shows that a repeated command is about the same client. It does not name the client: without the key, which is
in the folder, nobody can compare it with a guessed id.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp import journal
from tff_pdp.data.manifest import MANIFEST_FILE
from tff_pdp.errors import DataError
from tff_pdp.journal import Journal

FORGOTTEN, FORGOTTEN_KEY = "forgotten.jsonl", "forgotten.key"
FORMAT_VERSION = 1


class Removal(NamedTuple):
    """The removal of one client.

    Attributes:
      client: keyed hash of the client's id.
      before: SHA-256 of the manifest of the dataset before the removal; empty without a dataset.
      after: SHA-256 of the manifest after the removal; None for a removal that was stopped.
    """

    client: str
    before: str
    after: str | None


def read_removals(output: Path) -> Sequence[Removal]:
    """Reads the removals of clients from an experiment, in the order in which they began.

    Raises:
      DataError: the record is damaged, or has another format version.
    """
    path, found = output / FORGOTTEN, {}
    for number, line in enumerate(journal.read(path).lines, start=1):
        try:
            version, key = line["format_version"], (line["client"], line["before"])
            if version != FORMAT_VERSION:
                raise DataError(f"{path} has format version {version!r}; this tff_pdp reads only {FORMAT_VERSION}")
            found[key] = Removal(*key, None if line["kind"] == "began" else line["after"])
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: line {number} is not about a removed client ({error})") from error
    return list(found.values())


def begin_removal(output: Path, client: str) -> Removal:
    """Records that the removal of a client begins, unless it has begun already; returns the removal.

    Raises:
      DataError: the record is damaged.
      OSError: the record cannot be written.
    """
    for removal in read_removals(output):
        if removal.client == client and removal.after is None:
            return removal
    removal = Removal(client, manifest_digest(output), None)
    _append(output, {"kind": "began", "client": removal.client, "before": removal.before})
    return removal


def end_removal(output: Path, removal: Removal) -> None:
    """Records that a removal has ended, with the digest of the dataset that follows. Errors: as in `begin_removal`."""
    after = manifest_digest(output)
    _append(output, {"kind": "ended", "client": removal.client, "before": removal.before, "after": after})


def manifest_digest(output: Path) -> str:
    """Returns the SHA-256 of the manifest of an experiment's client dataset; empty without a dataset."""
    path = output / "clients" / MANIFEST_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _append(output: Path, line: Mapping[str, Any]) -> None:
    with Journal(output / FORGOTTEN) as record:
        record.append({"format_version": FORMAT_VERSION, **line})
