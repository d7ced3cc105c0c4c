"""Stores lines in append-only files, chained by hashes so that a damaged or missing line is noticed.

A journal is two files. `NAME.jsonl` has one JSON object per line. An object's key `chain` is the SHA-256 of the
previous line's chain and the line's own content. `NAME.head` has the chain of the last line, so that a cut-off end is
noticed, too. A line is flushed before the head; when `append` returns, both survive a power cut.

A process that dies within `append` may leave a last line, whole or torn, without having updated the head. For a torn
line, `append` never returned: readers skip the line, and the next writer cuts it off.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tff_pdp.errors import DataError
from tff_pdp.files import naming, sync, write_atomically

# The chain before the first line.
GENESIS = "0" * 64
_CHAIN = "chain"


class Content(NamedTuple):
    """The content of a journal.

    Attributes:
      lines: objects of the lines, in order, without their chains.
      chains: chain of each line, hexadecimal.
      num_bytes: size of `NAME.jsonl` in bytes, without a torn last line.
    """

    lines: Sequence[Mapping[str, Any]] = ()
    chains: Sequence[str] = ()
    num_bytes: int = 0

    @property
    def head(self) -> str:
        """The chain of the last line."""
        return self.chains[-1] if self.chains else GENESIS

    def has_been_at(self, head: str) -> bool:
        """Checks if the journal ended with the chain `head` at some time; false if the line of that time is missing."""
        return head == GENESIS or head in self.chains


def head_path(path: Path) -> Path:
    """Returns the path of the file that holds the chain of a journal's last line."""
    return path.with_suffix(".head")


def stored_head(path: Path) -> str:
    """Reads the chain of the last line from `NAME.head`, without reading the lines.

    Raises:
      DataError: the file of the head is damaged.
    """
    return _read_head(path) or GENESIS


def read(path: Path) -> Content:
    """Reads a journal; a journal without files is empty.

    Raises:
      DataError: a line or the head is damaged or missing.
    """
    # First: a writer that is at work adds the line before the head.
    head = _read_head(path)
    stored = path.read_bytes() if path.exists() else b""
    *complete, tail = stored.split(b"\n")
    lines, chains, num_bytes = [], [], 0
    for number, stored_line in enumerate(complete, start=1):
        before = chains[-1] if chains else GENESIS
        line = _checked(stored_line, before)
        if line is None:
            is_torn = number == len(complete) and not tail and head in (GENESIS, *chains)
            if is_torn:
                break
            raise DataError(
                f"{path}: line {number} is damaged, or lines before it are missing, so it is not known what was "
                "recorded; restore the file from a copy"
            )
        lines.append(line)
        chains.append(_chain(before, line))
        num_bytes += len(stored_line) + 1
    content = Content(lines, chains, num_bytes)
    if head is None and content.chains:
        raise DataError(f"{head_path(path)} is missing, so the end of {path.name} is unknown: restore both from a copy")
    if not content.has_been_at(head or GENESIS):
        raise DataError(
            f"{path}: lines at the end are damaged or missing: no line has the chain in {head_path(path).name}; "
            "restore both files from a copy"
        )
    return content


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole journal; a file at `path` that is not a journal is replaced."""
    chain, stored = GENESIS, []
    for line in lines:
        chain = _chain(chain, line)
        stored.append(_as_stored(line, chain))
    write_atomically(head_path(path), [_stored_head(chain)])
    write_atomically(path, stored)
    sync(path.parent)


class Journal:
    """A journal that is open for appending, by one process at a time; a context manager.

    Other processes that open the same journal wait until this one is closed.
    """

    def __init__(self, path: Path):
        """Opens `NAME.jsonl` in an existing folder, or creates the journal there; cuts off a torn last line.

        Raises:
          DataError: the journal is damaged.
        """
        self._path = path
        self._file = -1
        self._head_file = os.open(head_path(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._head_file, fcntl.LOCK_EX)
            if not os.fstat(self._head_file).st_size and not path.exists():
                self._write_head(GENESIS)
            self._content = read(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with naming(path):
                os.ftruncate(self._file, self._content.num_bytes)
                os.fsync(self._file)
            # The names of both files have to last, too.
            sync(path.parent)
            self._write_head(self._content.head)
        except BaseException:
            self.close()
            raise

    @property
    def content(self) -> Content:
        """The journal's content, appended lines included."""
        return self._content

    def append(self, line: Mapping[str, Any]) -> str:
        """Adds a line (plain data without a key `chain`) and returns the new head; the line then survives a power cut.

        Raises:
          OSError: the line could not be written, as on a full disk. The journal is then unchanged or contains the line.
        """
        before = self._content
        chain = _chain(before.head, line)
        stored = _as_stored(line, chain)
        try:
            with naming(self._path):
                _write(self._file, stored, before.num_bytes)
        except OSError:
            # Where not even that can be done, the line is torn, or beyond the head: readers know both.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before.num_bytes)
            raise
        self._content = Content(
            [*before.lines, line], [*before.chains, chain], num_bytes=before.num_bytes + len(stored)
        )
        self._write_head(chain)
        return chain

    def close(self) -> None:
        """Closes the journal, so that other processes can append."""
        for descriptor in (self._file, self._head_file):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._head_file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_head(self, chain: str) -> None:
        # In place and within one sector of the disk: there is no moment without a head.
        with naming(head_path(self._path)):
            _write(self._head_file, _stored_head(chain), 0)


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _chain(before: str, line: Mapping[str, Any]) -> str:
    return hashlib.sha256(before.encode() + b"\n" + _canonical(line)).hexdigest()


def _as_stored(line: Mapping[str, Any], chain: str) -> bytes:
    return _canonical({**line, _CHAIN: chain}) + b"\n"


def _checked(stored: bytes, before: str) -> Mapping[str, Any] | None:
    """Returns a stored line without its chain; None unless each byte is as it was written."""
    try:
        line = json.loads(stored)
        chain = line.pop(_CHAIN)
        is_whole = chain == _chain(before, line) and stored + b"\n" == _as_stored(line, chain)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return line if is_whole else None


def _stored_head(chain: str) -> bytes:
    return f"{chain}\n".encode()


def _read_head(path: Path) -> str | None:
    """Returns the stored head; None if its file is missing, or was left empty by its writer."""
    place = head_path(path)
    stored = place.read_bytes() if place.exists() else b""
    if not stored:
        return None
    head = stored[:-1].decode("ascii", "replace")
    if len(head) != len(GENESIS) or stored != _stored_head(head):
        raise DataError(f"{place} is damaged, so the end of {path.name} is unknown: restore both from a copy")
    return head


def _write(descriptor: int, content: bytes, offset: int) -> None:
    """Writes bytes at a place of an open file, and flushes them."""
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], offset + written)
    os.fsync(descriptor)
