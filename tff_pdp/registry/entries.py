"""The registry on disk: which runs there have been on this computer, what each spent at most, and on which records.

<registry>/
  registry.jsonl   a journal (`tff_pdp.journal`) of these lines, told apart by `kind`:
                   opened: whose digests follow
                   records: a file of digests, with its sha256
                   began: a run, before it draws noise, with what it may spend until its end
                   raised: what a run may spend until its end, once that has become more, or the run goes on
                   reserved: how far a run may have come by now
                   closed: what a run has spent at most, once it has ended or was replaced
  records.key      the secret that digests are made with (mode 0600)
  records/*.npz    digests of records, eight bytes each (`tff_pdp.registry.records`)

A run that was moved or deleted still counts. A folder that is there says itself what its run has spent so far, unless
the registry knows that the run has come further: such a folder is an older copy.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import naming, remove_attempts, sync, write_atomically
from tff_pdp.journal import Journal, head_path, read
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.registry.matching import RecordSet
from tff_pdp.registry.records import (
    KEY_BYTES,
    RecordKey,
    Records,
    name_of_dataset,
    records_of_dataset,
    records_of_examples,
)

JOURNAL_FILE = "registry.jsonl"
KEY_FILE = "records.key"
RECORDS_FOLDER = "records"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """The registry's entry of a run, or of another release of clients' records.

    Attributes:
      run_id: of the run.
      method: the method's name, or what else was released.
      folder: of the run when it began, absolute.
      records: name of the file of digests.
      record_set: what was declared of the records.
      non_private: why no epsilon holds for the run, whatever the ledger says; None where one does.
      ledger: as text, what the run may spend until its end or, once it is closed, has spent at most; None without
        privacy.
      rounds: how many rounds the ledger covers; 0 of a run that was closed without having released anything.
      is_closed: whether the run has ended, or was replaced.
      includes: run id of a release that this run's ledger has in it; empty where there is none.
      reached: how far the run may have come: how many lines its own record has, and the last round reserved.
    """

    run_id: str
    method: str
    folder: str
    records: str
    record_set: RecordSet
    non_private: str | None
    ledger: str | None
    rounds: int
    is_closed: bool = False
    includes: str = ""
    reached: tuple[int, int] = (0, 0)

    @functools.cached_property
    def upper(self) -> Ledger | None:
        """The ledger."""
        return None if self.ledger is None else Ledger.from_json(self.ledger)


def default_folder() -> Path:
    """The user's own registry: in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "tff_pdp" / "registry"


class Registry:
    """The registry in a folder, which is made with the first entry.

    Guarantee: what `begin`, `raise_to` and `close` are told outlasts a power cut before they return; entries of several
      processes at once are all kept.
    """

    def __init__(self, folder: str | Path | None = None):
        """Names the folder.

        Args:
          folder: where it is; None for the user's own.
        """
        self.folder = default_folder() if folder is None else Path(folder)

    @property
    def path(self) -> Path:
        """The journal."""
        return self.folder / JOURNAL_FILE

    def begin(
        self,
        run_id: str,
        method: str,
        folder: Path,
        *,
        records: str,
        record_set: RecordSet,
        non_private: str | None,
        ledger: Ledger | None,
        rounds: int,
        includes: str = "",
    ) -> None:
        """Enters a run that is about to release something; one that is entered already stays as it is.

        Args:
          run_id: of the run.
          method: the method's name.
          folder: of the run.
          records: as of `keep_dataset` or `keep_examples`.
          record_set: what is declared of the records.
          non_private: why no epsilon holds for the run; None where one does.
          ledger: all that the run may spend until its end; None without privacy.
          rounds: how many rounds that are.
          includes: run id of a release that the ledger has in it.

        Raises:
          DataError: the registry is damaged.
          OSError: the registry cannot be written; the run must not begin.
        """
        with self._open() as journal:
            if run_id not in _entries(self.path, journal.content.lines):
                entry = Entry(
                    run_id=run_id,
                    method=method,
                    folder=str(folder.absolute()),
                    records=records,
                    record_set=dict(record_set) if isinstance(record_set, Mapping) else record_set,
                    non_private=non_private,
                    ledger=None if ledger is None else ledger.to_json(),
                    rounds=rounds,
                    includes=includes,
                )
                line = dataclasses.asdict(entry)
                del line["is_closed"], line["reached"]
                journal.append({"kind": "began", **line})

    def raise_to(self, run_id: str, rounds: int, ledger: Ledger | None) -> None:
        """Enters, before it does, that a run may spend more than was entered, or that a closed one goes on.

        Args:
          run_id: of the run.
          rounds: how many rounds the run may have made at its end.
          ledger: all that the run may spend until then; None without privacy.

        Raises:
          DataError, OSError: as `begin`.
        """
        text = None if ledger is None else ledger.to_json()
        self._add(
            run_id,
            {"kind": "raised", "rounds": rounds, "ledger": text},
            unless=lambda entry: (entry.rounds, entry.ledger, entry.is_closed) == (rounds, text, False),
        )

    def reserve(self, run_id: str, reached: tuple[int, int], *, goes_on: bool = False) -> None:
        """Enters, before rounds are run, how far the run may have come after them.

        Guarantee: of several copies of a run one goes on: where this returns, no other may have come as far.

        Args:
          run_id: of the run; one that was never entered is left alone.
          reached: as of `Entry`.
          goes_on: whether this may be known already: no round has been reserved, the run goes on.

        Raises:
          DataError: another copy of the run has come as far, or further; or as `begin`.
          OSError: as `begin`.
        """

        def is_known(entry: Entry) -> bool:
            if entry.reached > reached or (entry.reached == reached and not goes_on):
                raise DataError(
                    f"{entry.folder}: another copy of this run has gone on, and may have come to round "
                    f"{entry.reached[1]}: go on with that one, or give --overwrite"
                )
            return entry.reached == reached

        self._add(run_id, {"kind": "reserved", "reached": list(reached)}, unless=is_known)

    def close(self, run_id: str, reached: tuple[int, int], ledger: Ledger | None) -> None:
        """Enters what a run has spent at most, once it has ended or is about to be removed.

        Guarantee: of an older copy of a run, which has not come as far as is entered, nothing is believed: what is
          entered stays.

        Args:
          run_id: of the run; one that was never entered is left alone.
          reached: as of `Entry`, with the last round that may have been run.
          ledger: what has been spent; None without privacy.

        Raises:
          DataError, OSError: as `begin`.
        """
        text = None if ledger is None else ledger.to_json()

        def line(entry: Entry) -> dict[str, Any]:
            rounds, spent = (entry.rounds, entry.ledger) if entry.reached > reached else (reached[1], text)
            return {"kind": "closed", "rounds": rounds, "ledger": spent, "reached": list(max(entry.reached, reached))}

        self._add(
            run_id,
            line,
            unless=lambda entry: entry.is_closed and dataclasses.replace(entry, **_changes(line(entry))) == entry,
        )

    def entries(self) -> list[Entry]:
        """Reads all entries, in the order in which runs began.

        Raises:
          DataError: the registry is damaged; the message names the file.
        """
        return list(_entries(self.path, read(self.path).lines).values())

    def find(self, run_id: str) -> Entry | None:
        """The entry of a run; None where there is none.

        Raises:
          DataError: as `entries`.
        """
        return _entries(self.path, read(self.path).lines).get(run_id)

    def keep_dataset(self, dataset: ClientDataset, splits: Sequence[str]) -> str:
        """Keeps digests of a data set's records, unless they are kept already, and returns their name.

        Args:
          dataset: the data set.
          splits: whose records.

        Raises:
          DataError: the registry or the data set is damaged.
          OSError: the registry cannot be written.
        """
        key, kept = self._key_and_kept()
        name = name_of_dataset(key, dataset, splits)
        if name not in kept:
            self._keep(name, records_of_dataset(key, dataset, splits))
        return name

    def keep_examples(self, client_ids: Sequence[str], features: Sequence[np.ndarray]) -> str:
        """Keeps digests of examples, float32 `[n, ...]` of each client, and returns their name.

        Raises:
          DataError, OSError: as `keep_dataset`.
        """
        key, kept = self._key_and_kept()
        records = records_of_examples(key, client_ids, features)
        name = key.name("examples", records.to_bytes())
        if name not in kept:
            self._keep(name, records)
        return name

    def records(self, name: str) -> Records:
        """Reads kept digests.

        Raises:
          DataError: the file is missing or damaged.
        """
        path = self._records_path(name)
        kept = _kept(read(self.path).lines)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from None
        if name not in kept or hashlib.sha256(content).hexdigest() != kept[name]:
            raise DataError(f"{path} is damaged: restore it from a copy")
        return Records.from_bytes(content)

    def key(self) -> RecordKey:
        """Reads the secret that digests are made with.

        Raises:
          DataError: it is missing, or not the one that the registry began with.
        """
        path, lines = self.folder / KEY_FILE, read(self.path).lines
        try:
            key = RecordKey(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from None
        if not lines or lines[0].get("key_fingerprint") != key.fingerprint():
            raise DataError(f"{path} is not the key that the digests in {self.folder} were made with: restore it")
        return key

    @contextlib.contextmanager
    def _open(self) -> Iterator[Journal]:
        """The journal, begun where there is none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Journal(self.path) as journal:
            if not journal.content.lines:
                path = self.folder / KEY_FILE
                if not path.exists():
                    _write_key(path)
                fingerprint = RecordKey(path.read_bytes()).fingerprint()
                journal.append({"kind": "opened", "format_version": FORMAT_VERSION, "key_fingerprint": fingerprint})
            yield journal

    def _add(
        self,
        run_id: str,
        line: Mapping[str, Any] | Callable[[Entry], Mapping[str, Any]],
        unless: Callable[[Entry], bool],
    ) -> None:
        # Where the head alone is left, to open the journal says so.
        if not self.path.exists() and not head_path(self.path).exists():
            return
        with self._open() as journal:
            entry = _entries(self.path, journal.content.lines).get(run_id)
            if entry is not None and not unless(entry):
                journal.append({**(line(entry) if callable(line) else line), "run_id": run_id})

    def _key_and_kept(self) -> tuple[RecordKey, dict[str, str]]:
        # A process that was stopped may have begun the journal without a line, and without the key.
        if not read(self.path).lines:
            with self._open():
                pass
        return self.key(), _kept(read(self.path).lines)

    def _keep(self, name: str, records: Records) -> None:
        content, path = records.to_bytes(), self._records_path(name)
        with self._open() as journal:
            if name not in _kept(journal.content.lines):
                path.parent.mkdir(exist_ok=True, mode=0o700)
                # Who holds the journal is the only one who writes here.
                remove_attempts(path.parent)
                write_atomically(path, [content])
                sync(path.parent)
                sha256 = hashlib.sha256(content).hexdigest()
                journal.append({"kind": "records", "name": name, "sha256": sha256})

    def _records_path(self, name: str) -> Path:
        return self.folder / RECORDS_FOLDER / f"{name}.npz"


def _write_key(path: Path) -> None:
    """Draws the secret. Nobody but the owner may read any of it at any time."""
    attempt = path.with_suffix(".new")
    with naming(path), open(os.open(attempt, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    attempt.rename(path)
    sync(path.parent)


def _kept(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By name, the sha256 of files of digests."""
    return {line["name"]: line["sha256"] for line in lines if line["kind"] == "records"}


def _changes(line: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an entry that a line changes."""
    reached = {"reached": (line["reached"][0], line["reached"][1])} if "reached" in line else {}
    if line["kind"] == "reserved":
        return reached
    return {"ledger": line["ledger"], "rounds": line["rounds"], "is_closed": line["kind"] == "closed", **reached}


def _entries(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """By run id, what the registry holds."""
    found: dict[str, Entry] = {}
    names = [field.name for field in dataclasses.fields(Entry) if field.name not in ("is_closed", "reached")]
    try:
        if lines and lines[0]["format_version"] != FORMAT_VERSION:
            version = lines[0]["format_version"]
            raise DataError(f"{path} has format version {version!r}, this version reads {FORMAT_VERSION}")
        for line in lines:
            kind = line["kind"]
            if kind == "began":
                found[line["run_id"]] = Entry(**{name: line[name] for name in names})
            elif kind in ("raised", "reserved", "closed"):
                found[line["run_id"]] = dataclasses.replace(found[line["run_id"]], **_changes(line))
            elif kind not in ("opened", "records"):
                raise ValueError(f"kind {kind!r}")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"{path} is no registry of runs ({type(error).__name__}: {error})") from error
    return found
