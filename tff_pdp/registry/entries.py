"""The registry on disk: all runs there have been on this computer, their greatest costs, and their records.

<registry>/
  registry.jsonl   a journal (`tff_pdp.journal`) of these lines, told apart by `kind`:
                   opened: whose digests follow
                   records: a file of digests, with its sha256
                   began: a run, before it draws noise, with what it may spend until its end
                   raised: what a run may spend until its end, once that has become more, or the run goes on, and where
                     its own record ends
                   reserved: where a run's own record ends, before it runs what is in there
                   closed: what a run has spent at most, once it has ended or was replaced
  records.key      the secret that digests are made with (mode 0600)
  records/*.npz    digests of records, eight bytes each (`tff_pdp.registry.records`)

A run that was moved or deleted still counts. A folder that is there says itself what its run has spent so far, if its
record has been where the registry knows the run's record to have been. One of an older copy has not, nor has that of a
copy that went on beside the run.
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
    """Returns the user's own registry: in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    # A relative one would be another registry in each working directory; the XDG specification says to ignore it.
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "tff_pdp" / "registry"


class Registry:
    """The registry in a folder, which is made with the first entry.

    Guarantee: what `begin`, `raise_to` and `close` are told outlasts a power cut before they return; entries of several
      processes at once are all kept.
    """

    def __init__(self, folder: str | Path | None = None):
        """Names the folder; None for the user's own."""
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

        Args are the attributes of `Entry`; `ledger` and `rounds` are all that the run may spend until its end.

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
        """Enters that a run is about to spend more than was entered, and where its own record ends.

        Guarantee: as of `reserve`, and with its errors. So no copy lowers the entry of one that goes on.

        Args:
          run_id: of the run.
          chains: of the lines of its record.
          rounds: number of rounds the run may have made at its end.
          ledger: all that the run may spend until then; None without privacy.
        """
        planned = Cost.of(ledger, rounds)

        def is_known(entry: Entry) -> bool:
            entry.check_was_at(chains)
            return (entry.planned, entry.closed, entry.head) == (planned, None, chains[-1])

        self._add(run_id, {"kind": "raised", **planned.fields, "head": chains[-1]}, unless=is_known)

    def reserve(self, run_id: str, chains: Sequence[str]) -> None:
        """Enters where the record of a run that is about to go on ends: whatever the run does next is in there.

        Guarantee: of several copies of a run one goes on, or all do the same: where this returns, the record of any
          other goes on from this one, or is refused.

        Raises:
          DataError: a copy of the run has gone on in another way, or the registry does not have the run, such as where
            it was removed meanwhile; or as `begin`.
          OSError: as `begin`.
        """

        def is_known(entry: Entry) -> bool:
            entry.check_was_at(chains)
            return (entry.head, entry.closed) == (chains[-1], None)

        if not self._add(run_id, {"kind": "reserved", "head": chains[-1]}, unless=is_known):
            raise DataError(
                f"{self.folder} does not have the run that is about to go on, which was entered there: restore it from "
                "a copy, or go on with --resume, which enters the run again"
            )

    def close(self, run_id: str, chains: Sequence[str], rounds: int, ledger: Ledger | None) -> None:
        """Enters the most that a run has spent, once it has ended or is about to be removed.

        Guarantee: a copy of a run that does not have all that the run has done is not believed. Where its record ends
          as the run's own has at some time, nothing is entered; where it went on in another way, such as under another
          registry, it is entered beside the run.

        Arguments are those of `raise_to`, but of rounds that may have been run; a run that was never entered is left
        alone. Errors are those of `begin`.
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
        """Returns the entry of a run; None where there is none. Raises DataError as `entries`."""
        return read_entries(self.path, read(self.path).lines).get(run_id)

    def keep_dataset(self, dataset: ClientDataset, splits: Sequence[str]) -> str:
        """Keeps digests of a data set's records, unless they are kept already, and returns their name.

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
        """Keeps digests of some clients' training records, as `keep_dataset` those of all, and returns their name."""
        return self._keep_examples(lambda key: records_of_clients(key, dataset, client_ids, ("train",)))

    def keep_examples(self, client_ids: Sequence[str], features: Sequence[np.ndarray]) -> str:
        """Keeps digests of examples, float32 `[n, ...]` of each client, as `keep_dataset`, and returns their name."""
        return self._keep_examples(lambda key: records_of_examples(key, client_ids, features))

    def _keep_examples(self, make: Callable[[RecordKey], Records]) -> str:
        key, kept = self._key_and_kept()
        records = make(key)
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
        """Adds a line about a run, unless it says nothing new; whether there is such a run."""
        # Where the head alone is left, to open the journal says so.
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
