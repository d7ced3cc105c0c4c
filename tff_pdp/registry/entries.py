"""Keeps the registry on disk: all runs that were made on this computer, the most that each may cost, and their records.

<registry>/
  registry.jsonl   a journal (`tff_pdp.journal`) of these lines, told apart by `kind`:
                   opened: the format version, and a fingerprint of the key of the digests
                   records: a file of digests, with its sha256
                   began: a run, before it draws noise, with what it may spend until its end
                   raised: the most that a run may spend until its end, once this has grown or the run goes on; and the
                     end of the run's own record
                   reserved: the end of a run's own record, before the run does what the record says
                   closed: the most that a run has spent, once it has ended or was replaced
  records.key      the secret that digests are made with (mode 0600)
  records/*.npz    digests of records, eight bytes each (`tff_pdp.registry.records`)

A run that was moved or deleted still counts. If a run's folder still exists, its record says what the run has spent so
far, provided that the record contains the end that was last entered for the run. The record of an older copy does not
contain that end, nor does the record of a copy that went on beside the run.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import DataError
from tff_pdp.files import naming, remove_attempts, sync, write_atomically
from tff_pdp.journal import Journal, head_path, read
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.registry.entry import FORMAT_VERSION, Cost, Entry, read_entries
from tff_pdp.registry.matching import RecordSet
from tff_pdp.registry.records import (
    KEY_BYTES,
    RecordKey,
    Records,
    name_of_dataset,
    records_of_clients,
    records_of_dataset,
    records_of_examples,
)

JOURNAL_FILE = "registry.jsonl"
KEY_FILE = "records.key"
RECORDS_FOLDER = "records"


def default_folder() -> Path:
    """Returns the folder of the user's own registry: in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    # A relative one would be another registry in each working directory; the XDG specification says to ignore it.
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "tff_pdp" / "registry"


class Registry:
    """The registry in a folder; the first entry makes the folder.

    Guarantee: once `begin`, `raise_to` or `close` has returned, its entry outlasts a power cut; entries that several
      processes make at once are all kept.
    """

    def __init__(self, folder: str | Path | None = None):
        """Sets the folder; None stands for `default_folder()`."""
        self.folder = default_folder() if folder is None else Path(folder)

    @property
    def path(self) -> Path:
        """Path of the journal."""
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
        """Enters a run that is about to release something; a run that is entered already is not changed.

        Args are as in `Entry`; `ledger` and `rounds` state the most that the run may have spent at its end.

        Raises:
          DataError: the registry is damaged.
          OSError: the registry cannot be written; the run must not begin.
        """
        self._begin(
            Entry(
                run_id=run_id,
                method=method,
                folder=str(folder.absolute()),
                records=records,
                record_set=dict(record_set) if isinstance(record_set, Mapping) else record_set,
                non_private=non_private,
                planned=Cost.of(ledger, rounds),
                includes=includes,
            )
        )

    def raise_to(self, run_id: str, chains: Sequence[str], rounds: int, ledger: Ledger | None) -> None:
        """Raises the most that a run may spend, before the run spends it, and enters the end of the run's own record.

        Guarantee: the guarantee of `reserve`, so that no copy lowers the entry of a copy that goes on.

        Errors are as in `reserve`, but a run that was never entered is ignored.

        Args:
          run_id: id of the run.
          chains: chains of the lines of the run's record.
          rounds: number of rounds that the run may have made at its end.
          ledger: all that the run may spend until its end; None without privacy.
        """
        planned = Cost.of(ledger, rounds)

        def is_known(entry: Entry) -> bool:
            entry.check_was_at(chains)
            return (entry.planned, entry.closed, entry.head) == (planned, None, chains[-1])

        self._add(run_id, {"kind": "raised", **planned.fields, "head": chains[-1]}, unless=is_known)

    def reserve(self, run_id: str, chains: Sequence[str]) -> None:
        """Enters the end of a run's own record before the run does the next things that this record states.

        Guarantee: only one of several copies of a run goes on, unless all do the same: once this returns, a copy whose
          record does not contain this end is refused.

        Raises:
          DataError: a copy of the run has gone on in another way; the registry does not have the run, for example
            because the registry was removed meanwhile; or the registry is damaged.
          OSError: the registry cannot be written; the run must not go on.
        """

        def is_known(entry: Entry) -> bool:
            entry.check_was_at(chains)
            return (entry.head, entry.closed) == (chains[-1], None)

        if not self._add(run_id, {"kind": "reserved", "head": chains[-1]}, unless=is_known):
            raise DataError(
                f"{self.folder} does not have the run that is about to go on: restore the folder from a copy, or go on "
                "with --resume, which enters the run again"
            )

    def close(self, run_id: str, chains: Sequence[str], rounds: int, ledger: Ledger | None) -> None:
        """Enters the most that a run has spent, once it has ended or is about to be removed.

        Guarantee: a copy that lacks something that its run has done does not close the run's entry. If the copy's
          record ends where the run's own record once ended, nothing is entered; if the copy went on in another way, for
          instance under another registry, the copy gets an entry of its own.

        Arguments are as in `raise_to`, but state the rounds and the spending so far; a run that was never entered is
        ignored. Errors are as in `begin`.
        """
        spent, other = Cost.of(ledger, rounds), self.find(run_id)
        if other is not None and not other.is_in(chains, spent.size):
            if other.heads and chains[-1] not in other.heads and rounds:
                self._begin(other.copy_of(chains[-1], spent))
            return
        self._add(
            run_id,
            {"kind": "closed", **spent.fields, "head": chains[-1]},
            unless=lambda entry: (
                not entry.is_in(chains, spent.size) or (entry.closed, entry.head) == (spent, chains[-1])
            ),
        )

    def entries(self) -> list[Entry]:
        """Reads all entries, in the order in which runs began.

        Raises:
          DataError: the registry is damaged; the message names the file.
        """
        return list(read_entries(self.path, read(self.path).lines).values())

    def find(self, run_id: str) -> Entry | None:
        """Returns the entry of a run; None if there is none. Raises DataError, as `entries` does."""
        return read_entries(self.path, read(self.path).lines).get(run_id)

    def keep_dataset(self, dataset: ClientDataset, splits: Sequence[str]) -> str:
        """Stores digests of a data set's records, unless they are stored already, and returns the name of their file.

        Raises:
          DataError: the registry or the data set is damaged.
          OSError: the registry cannot be written.
        """
        key, kept = self._key_and_kept()
        name = name_of_dataset(key, dataset, splits)
        if name not in kept:
            self._keep(name, records_of_dataset(key, dataset, splits))
        return name

    def keep_clients(self, dataset: ClientDataset, client_ids: Sequence[str]) -> str:
        """Stores digests of some clients' training records, as `keep_dataset` does; returns the name of their file."""
        return self._keep_examples(lambda key: records_of_clients(key, dataset, client_ids, ("train",)))

    def keep_examples(self, client_ids: Sequence[str], features: Sequence[np.ndarray]) -> str:
        """Stores digests of examples as `keep_dataset` does; `features` has float32 `[n, ...]` for each client."""
        return self._keep_examples(lambda key: records_of_examples(key, client_ids, features))

    def _keep_examples(self, make: Callable[[RecordKey], Records]) -> str:
        key, kept = self._key_and_kept()
        records = make(key)
        name = key.name("examples", records.to_bytes())
        if name not in kept:
            self._keep(name, records)
        return name

    def records(self, name: str) -> Records:
        """Reads digests by the name of their file.

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
          DataError: the secret is missing, or is not the secret that the registry began with.
        """
        path, lines = self.folder / KEY_FILE, read(self.path).lines
        try:
            key = RecordKey(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from None
        if not lines or lines[0].get("key_fingerprint") != key.fingerprint():
            raise DataError(f"{path} is not the key that the digests in {self.folder} were made with: restore it")
        return key

    def _begin(self, entry: Entry) -> None:
        with self._open() as journal:
            if entry.run_id not in read_entries(self.path, journal.content.lines):
                journal.append(entry.first_line)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Journal]:
        """Opens the journal, and begins it where there is none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Journal(self.path) as journal:
            if not journal.content.lines:
                path = self.folder / KEY_FILE
                if not path.exists():
                    _write_key(path)
                fingerprint = RecordKey(path.read_bytes()).fingerprint()
                journal.append({"kind": "opened", "format_version": FORMAT_VERSION, "key_fingerprint": fingerprint})
            yield journal

    def _add(self, run_id: str, line: Mapping[str, Any], unless: Callable[[Entry], bool]) -> bool:
        """Adds a line about a run, unless the line says nothing new; returns whether the run is entered."""
        # If only the head is left, opening the journal raises an error.
        if not self.path.exists() and not head_path(self.path).exists():
            return False
        with self._open() as journal:
            entry = read_entries(self.path, journal.content.lines).get(run_id)
            if entry is not None and not unless(entry):
                journal.append({**line, "run_id": run_id})
            return entry is not None

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
                # The holder of the journal is the only one who writes here.
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
    """Returns the sha256 of files of digests, by name."""
    return {line["name"]: line["sha256"] for line in lines if line["kind"] == "records"}
