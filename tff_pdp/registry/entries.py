"""The registry on disk: which runs there have been on this computer, what each spent at most, and on which records.

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
import dataclasses
import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.data.client_dataset import ClientDataset
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import naming, remove_attempts, sync, write_atomically
from tff_pdp.journal import GENESIS, Journal, head_path, read
from tff_pdp.privacy.accounting.ledger import Ledger
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
FORMAT_VERSION = 1


# Between a run's id and the chain of a copy's last line.
_COPY = ":"


def _id_of_copy(run_id: str, head: str) -> str:
    """The id under which a copy of a run is entered that went on under another registry, by the end of its record."""
    return f"{run_id}{_COPY}{head}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The registry's entry of a run, or of another release of clients' records.

    Attributes:
      run_id: of the run; of a copy that went on under another registry, as of `_id_of_copy`.
      method: the method's name, or what else was released.
      folder: of the run when it began, absolute.
      records: name of the file of digests.
      record_set: what was declared of the records.
      non_private: why no epsilon holds for the run, whatever the ledger says; None where one does.
      planned: what the run may spend until its end.
      includes: run id of a release that this run's ledger has in it; empty where there is none.
      closed: what the run has spent at most, once it has ended or was replaced; None while it may go on.
      closings: all that `closed` has ever been, as a run that was closed may go on.
      heads: where the run's own record has been, as chains of lines; none where that is not known.
      num_lines: how many lines that record has at least, of entries of earlier versions, which had no chains.
    """

    run_id: str
    method: str
    folder: str
    records: str
    record_set: RecordSet
    non_private: str | None
    planned: "Cost"
    includes: str = ""
    closed: "Cost | None" = None
    closings: "tuple[Cost, ...]" = ()
    heads: tuple[str, ...] = ()
    num_lines: int = 0

    @property
    def copy_head(self) -> str:
        """The end of the record of a copy that went on under another registry; empty of a run itself."""
        return self.run_id.partition(_COPY)[2]

    @property
    def upper(self) -> "Cost":
        """What the run has spent at most by now, as far as the registry knows."""
        return self.closed or self.planned

    @property
    def head(self) -> str:
        """Where the run's own record was last; `GENESIS` where that is not known."""
        return self.heads[-1] if self.heads else GENESIS

    def is_in(self, chains: Collection[str], size: tuple[int, int]) -> bool:
        """Checks a record for all that the registry knows the run to have done.

        Args:
          chains: of the lines of the record.
          size: of what the record says that was spent, as of `Cost.size`.
        """
        return self.was_at(chains) and all(is_as_large(size, cost.size) for cost in self.closings)

    def was_at(self, chains: Collection[str]) -> bool:
        """Checks by the chains of a record's lines that the record covers the end of the run's own, as last entered."""
        # Entries of earlier versions say only how many lines there were.
        return self.head in chains if self.heads else len(chains) >= self.num_lines


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run has spent, or may spend.

    Attributes:
      text: the ledger as text; None without privacy.
      rounds: how many rounds the ledger covers; 0 of a run that has released nothing.
    """

    text: str | None
    rounds: int

    @classmethod
    def of(cls, ledger: Ledger | None, rounds: int) -> "Cost":
        """The cost of so many rounds."""
        return cls(None if ledger is None else ledger.to_json(), rounds)

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """How much was released: numbers of rounds and of events, neither of which a run makes smaller."""
        return self.rounds, self.ledger.num_events if self.ledger else 0

    @functools.cached_property
    def ledger(self) -> Ledger | None:
        """The ledger; None without privacy."""
        return None if self.text is None else Ledger.from_json(self.text)


def is_as_large(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Compares how much was released, as of `Cost.size`: at least as many rounds, and at least as many events."""
    # Each for itself: a copy may have gone further by fewer events.
    return all(own >= least for own, least in zip(size, other, strict=True))


def default_folder() -> Path:
    """The user's own registry: in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    # A relative one would be another registry in each working directory; the XDG specification says to ignore it.
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "tff_pdp" / "registry"


def _check_head(entry: Entry, chains: Collection[str]) -> None:
    """Checks that a run's record has been where the registry knows the run's own to have been."""
    if not entry.was_at(chains):
        raise DataError(
            f"a copy of the run that began in {entry.folder} has gone on, and this one is older than that, or went on "
            "in another way: go on with that copy, or give --overwrite"
        )


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
        """Enters, before it does, that a run may spend more than was entered, and where its own record ends.

        Guarantee: as of `reserve`. So no copy lowers what is entered of one that goes on.

        Args:
          run_id: of the run.
          chains: of the lines of its record.
          rounds: how many rounds the run may have made at its end.
          ledger: all that the run may spend until then; None without privacy.

        Raises:
          DataError, OSError: as `reserve`.
        """
        planned = Cost.of(ledger, rounds)

        def is_known(entry: Entry) -> bool:
            _check_head(entry, chains)
            return (entry.planned, entry.closed, entry.head) == (planned, None, chains[-1])

        self._add(run_id, {"kind": "raised", **_line(planned), "head": chains[-1]}, unless=is_known)

    def reserve(self, run_id: str, chains: Sequence[str]) -> None:
        """Enters, before a run goes on, where its own record ends: whatever the run does next is in there.

        Guarantee: of several copies of a run one goes on, or all do the same: where this returns, the record of any
          other goes on from this one, or is refused.

        Args:
          run_id: of the run.
          chains: of the lines of its record.

        Raises:
          DataError: a copy of the run has gone on in another way, or the registry does not have the run, such as where
            it was removed meanwhile; or as `begin`.
          OSError: as `begin`.
        """

        def is_known(entry: Entry) -> bool:
            _check_head(entry, chains)
            return (entry.head, entry.closed) == (chains[-1], None)

        if not self._add(run_id, {"kind": "reserved", "head": chains[-1]}, unless=is_known):
            raise DataError(
                f"{self.folder} does not have the run that is about to go on, which was entered there: restore it from "
                "a copy, or go on with --resume, which enters the run again"
            )

    def close(self, run_id: str, chains: Sequence[str], rounds: int, ledger: Ledger | None) -> None:
        """Enters what a run has spent at most, once it has ended or is about to be removed.

        Guarantee: a copy of a run that does not have all that the run has done is not believed. Where its record ends
          as the run's own has at some time, nothing is entered; where it went on in another way, such as under another
          registry, it is entered beside the run.

        Args:
          run_id: of the run; one that was never entered is left alone.
          chains: of the lines of its record.
          rounds: how many may have been run.
          ledger: what has been spent; None without privacy.

        Raises:
          DataError, OSError: as `begin`.
        """
        spent, other = Cost.of(ledger, rounds), self.find(run_id)
        if other is not None and not other.is_in(chains, spent.size):
            if other.heads and chains[-1] not in other.heads and rounds:
                self._begin(dataclasses.replace(other, run_id=_id_of_copy(run_id, chains[-1]), planned=spent))
            return
        self._add(
            run_id,
            {"kind": "closed", **_line(spent), "head": chains[-1]},
            unless=lambda entry: (
                not entry.is_in(chains, spent.size) or (entry.closed, entry.head) == (spent, chains[-1])
            ),
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

    def keep_clients(self, dataset: ClientDataset, client_ids: Sequence[str]) -> str:
        """Keeps digests of some clients' training records, as `keep_dataset` those of all, and returns their name.

        Raises:
          DataError, OSError: as `keep_dataset`.
        """
        key, kept = self._key_and_kept()
        return self._keep_examples(key, kept, records_of_clients(key, dataset, client_ids, ("train",)))

    def keep_examples(self, client_ids: Sequence[str], features: Sequence[np.ndarray]) -> str:
        """Keeps digests of examples, float32 `[n, ...]` of each client, and returns their name.

        Raises:
          DataError, OSError: as `keep_dataset`.
        """
        key, kept = self._key_and_kept()
        return self._keep_examples(key, kept, records_of_examples(key, client_ids, features))

    def _keep_examples(self, key: RecordKey, kept: Collection[str], records: Records) -> str:
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
            if entry.run_id not in _entries(self.path, journal.content.lines):
                line = {name: getattr(entry, name) for name in _BEGAN}
                journal.append({"kind": "began", **line, **_line(entry.planned)})

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

    def _add(self, run_id: str, line: Mapping[str, Any], unless: Callable[[Entry], bool]) -> bool:
        """Adds a line about a run, unless it says nothing new; whether there is such a run."""
        # Where the head alone is left, to open the journal says so.
        if not self.path.exists() and not head_path(self.path).exists():
            return False
        with self._open() as journal:
            entry = _entries(self.path, journal.content.lines).get(run_id)
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


# What a line that begins an entry has, besides what is planned.
_BEGAN = ("run_id", "method", "folder", "records", "record_set", "non_private", "includes")


def _line(cost: Cost) -> dict[str, Any]:
    return {"ledger": cost.text, "rounds": cost.rounds}


def _after(entry: Entry, line: Mapping[str, Any]) -> Entry:
    """An entry after one more line."""
    # Lines of earlier versions have no chain of the run's own record, but its number of lines, or neither.
    heads = (*entry.heads, line["head"]) if "head" in line else entry.heads
    num_lines = max(entry.num_lines, line["reached"][0]) if "reached" in line else entry.num_lines
    # A run that had been closed, by a copy that was to be replaced, goes on after all.
    entry = dataclasses.replace(entry, closed=None, heads=heads, num_lines=num_lines)
    if line["kind"] == "reserved":
        return entry
    # An earlier version raised what is planned without saying for how many rounds.
    cost = Cost(line["ledger"], line.get("rounds", entry.planned.rounds))
    if line["kind"] == "raised":
        return dataclasses.replace(entry, planned=cost)
    return dataclasses.replace(entry, closed=cost, closings=(*entry.closings, cost))


def _entries(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """By run id, what the registry holds."""
    found: dict[str, Entry] = {}
    try:
        if lines and lines[0]["format_version"] != FORMAT_VERSION:
            version = lines[0]["format_version"]
            raise DataError(f"{path} has format version {version!r}, this version reads {FORMAT_VERSION}")
        for line in lines:
            kind = line["kind"]
            if kind == "began":
                planned = Cost(line["ledger"], line["rounds"])
                found[line["run_id"]] = Entry(**{name: line[name] for name in _BEGAN}, planned=planned)
            elif kind in ("raised", "reserved", "closed"):
                found[line["run_id"]] = _after(found[line["run_id"]], line)
            elif kind not in ("opened", "records"):
                raise ValueError(f"kind {kind!r}")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"{path} is no registry of runs ({type(error).__name__}: {error})") from error
    return found
