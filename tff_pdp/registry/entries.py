"""Keeps the registry on disk: all runs made on this computer, the most that each run may cost, and digests of records.

<registry>/
  registry.jsonl   a journal (`tff_pdp.journal`) with lines of these kinds:
                   opened: the format version, and a fingerprint of the key that digests are made with
                   records: a file of digests, with its sha256
                   began: a run that is about to draw noise, with the most that the run may spend until its end
                   raised: a new value for the most that a run may spend until its end, and the head of the run's own
                     record (the chain hash of the last line of `charges.jsonl`)
                   reserved: the head of a run's own record, before the run continues as the record states
                   closed: the most that a run has spent, once the run has ended or was replaced
  records.key      the secret that digests are made with (mode 0600)
  records/*.npz    digests of records, eight bytes each (`tff_pdp.registry.records`)

A run whose folder was moved or deleted still counts. If the folder exists, its record states what the run has spent so
far, provided that the record contains the head that the registry entered last. The record of an outdated copy lacks
that head, and so does the record of a copy that was continued separately.
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
    """Returns the default folder: `tff_pdp/registry` in `$XDG_STATE_HOME` (if not set, in `~/.local/state`)."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    # A relative one would be another registry in each working directory; the XDG specification says to ignore it.
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "tff_pdp" / "registry"


class Registry:
    """The registry in a folder, which is created by the first entry.

    Guarantee: an entry outlasts a power cut once `begin`, `raise_to`, `reserve` or `close` has returned. No entry is
      lost if several processes write at once.
    """

    def __init__(self, folder: str | Path | None = None):
        """Sets the folder; None for `default_folder()`."""
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
        """Enters a run that is about to release something, unless the registry has an entry of the run already.

        Arguments are attributes of `Entry`; `ledger` and `rounds` state the most that the run may spend until its end.

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
        """Replaces the most that a run may spend by a new value, and enters the head of the run's own record.

        Guarantee: as in `reserve`, so that no outdated copy of the run can change the entry.

        Errors are as in `reserve`, except that a run without an entry is ignored.

        Args:
          run_id: id of the run.
          chains: chain hashes of all lines of the run's own record, in order; the last one is the head.
          rounds: number of rounds that the run may make until its end.
          ledger: all that the run may spend until its end; None without privacy.
        """
        planned = Cost.of(ledger, rounds)

        def is_known(entry: Entry) -> bool:
            entry.check_was_at(chains)
            return (entry.planned, entry.closed, entry.head) == (planned, None, chains[-1])

        self._add(run_id, {"kind": "raised", **planned.fields, "head": chains[-1]}, unless=is_known)

    def reserve(self, run_id: str, chains: Sequence[str]) -> None:
        """Enters the head of a run's own record, before the run continues as the record states.

        Guarantee: of several copies of a run that differ, only one copy can continue. Once this method has returned,
          a copy whose record does not contain the head is refused. `chains` is as in `raise_to`.

        Raises:
          DataError: another copy of the run was continued; the registry has no entry of the run, for example because
            the registry was removed meanwhile; or the registry is damaged.
          OSError: the registry cannot be written; the run must not go on.
        """

        def is_known(entry: Entry) -> bool:
            entry.check_was_at(chains)
            return (entry.head, entry.closed) == (chains[-1], None)

        if not self._add(run_id, {"kind": "reserved", "head": chains[-1]}, unless=is_known):
            raise DataError(
                f"{self.folder} has no entry of the run that is about to continue: restore the registry from a copy, "
                "or give --resume, which enters the run again"
            )

    def close(self, run_id: str, chains: Sequence[str], rounds: int, ledger: Ledger | None) -> None:
        """Enters the most that a run has spent, once the run has ended or before its folder is removed.

        Guarantee: the record of an incomplete copy never closes the run's entry. If the copy is merely outdated,
          nothing is entered. If the copy was continued separately, for instance under another registry, the copy gets
          a separate entry.

        Arguments are as in `raise_to`, except that `rounds` and `ledger` state the spending so far. A run without an
        entry is ignored. Errors are as in `begin`.
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
        """Reads the entries of all runs, in the order in which the runs began.

        Raises:
          DataError: the registry is damaged; the message names the file.
        """
        return list(read_entries(self.path, read(self.path).lines).values())

    def find(self, run_id: str) -> Entry | None:
        """Returns the entry of a run; None without an entry. Errors are as in `entries`."""
        return read_entries(self.path, read(self.path).lines).get(run_id)

    def keep_dataset(self, dataset: ClientDataset, splits: Sequence[str]) -> str:
        """Stores digests of a data set's records in a file, unless the file exists, and returns the file's name.

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
        """Stores digests of the given clients' training records, and returns the file's name; see `keep_dataset`."""
        return self._keep_examples(lambda key: records_of_clients(key, dataset, client_ids, ("train",)))

    def keep_examples(self, client_ids: Sequence[str], features: Sequence[np.ndarray]) -> str:
        """Stores digests of each client's features, float32 `[examples, ...]`, and returns the file's name."""
        return self._keep_examples(lambda key: records_of_examples(key, client_ids, features))

    def _keep_examples(self, make: Callable[[RecordKey], Records]) -> str:
        key, kept = self._key_and_kept()
        records = make(key)
        name = key.name("examples", records.to_bytes())
        if name not in kept:
            self._keep(name, records)
        return name

    def records(self, name: str) -> Records:
        """Reads the digests in the file with this name.

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
        """Reads the secret key that digests are made with.

        Raises:
          DataError: the key is missing, or is not the key that the registry was created with.
        """
        path, lines = self.folder / KEY_FILE, read(self.path).lines
        try:
            key = RecordKey(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from None
        if not lines or lines[0].get("key_fingerprint") != key.fingerprint():
            raise DataError(f"{path} is not the key of the digests in {self.folder}: restore the key from a copy")
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
