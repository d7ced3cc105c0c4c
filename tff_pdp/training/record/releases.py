"""Collects all spending on an experiment's records: by its runs, by replaced runs, and by fits of added clients.

The spending of a run is in the run's own charges. Replaced runs and fits are entered into a journal in the
experiment's folder, the record of earlier releases. Records of the first version are read without conversion.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp import journal
from tff_pdp.digests import prefix_of
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import discard
from tff_pdp.journal import Journal
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.registry.entry import is_as_large
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import CHARGES_FILE, Charges, read_charges
from tff_pdp.training.record.checkpoint_files import Saved, StoredCheckpoint, Surroundings

EARLIER = "earlier_releases.jsonl"
# Name, in that record, of fits of clients that were added after training.
PERSONALIZE = "personalize"
# Folder, in the method's folder, of the state of an unfinished search for hyper-parameters.
SEARCH = "search"
# Folder, in the method's folder, of users' states.
STORE = "client_states"
CHECKPOINTS = "checkpoints"
# Reasons why nothing is claimed of a run that are not in the run's plan.
KNOWN_SEED = "the noise follows from training.test_only_seed"
NO_PRIVACY = "privacy is switched off"


class Release(NamedTuple):
    """The spending of one run, or of one fit of added clients.

    Attributes:
      ledger: ledger of all that the release may have spent; None without privacy.
      non_private: reason why no epsilon holds for the release, even if there is a ledger; None if an epsilon holds.
      run: name of the method; `PERSONALIZE` for a fit.
      rounds: number of rounds that the ledger covers.
      run_id: id of the run; empty for fits, and for runs of early versions without ids.
      head: chain hash of the last line of the run's own record; empty if unknown.
      chains: chain hashes of all lines of the run's own record, which distinguish the run's copies; empty if unknown.
    """

    ledger: Ledger | None
    non_private: str | None = None
    run: str = PERSONALIZE
    rounds: int = 1
    run_id: str = ""
    head: str = ""
    chains: Sequence[str] = ()

    @property
    def size(self) -> tuple[int, int]:
        """The number of rounds and the number of released events; during a run, neither number decreases."""
        return self.rounds, self.ledger.num_events if self.ledger else 0


def release_of(charges: Charges) -> Release:
    """Returns all that a run may have spent, according to its charges, as a release."""
    own, rounds = charges.identity, charges.through_round
    return Release(charges.ledger, own.non_private, own.method, rounds, own.run_id, charges.head, charges.chains)


def set_aside(output: Path, folder: Path) -> None:
    """Removes a run that is to be replaced; before that, enters its spending into the record of earlier releases.

    Raises:
      DataError: the record of the run to be replaced cannot be read.
    """
    # If a command was killed after the entry, the run is found once more.
    on_record = [_line(entry) for entry in _entries(output)]
    for found in _runs_in(folder):
        if not found.run_id or _line(found) not in on_record:
            enter(output, found)
    discard(folder)


def enter(output: Path, release: Release) -> None:
    """Appends a release to the record of earlier releases in an experiment's folder; the entry outlasts a power cut.

    Raises:
      DataError: the record is damaged.
      OSError: the release cannot be written; the record is unchanged.
    """
    path = output / EARLIER
    if is_unchained(path):
        journal.write(path, map(_line, _unchained(path)))
    with Journal(path) as record:
        record.append(_line(release))


def surroundings_of(folder: Path, files: Iterable[str]) -> Surroundings:
    """Returns the state of the files beside a run's checkpoints, to be stored in the next checkpoint."""
    return Surroundings(
        charges_head=journal.stored_head(folder / CHARGES_FILE),
        earlier_head=earlier_head(folder.parent),
        files={name: prefix_of(folder / name) for name in files},
    )


def earlier_head(output: Path) -> str:
    """Reads the last chain hash of the record of earlier releases; runs store the hash to notice lost lines."""
    path = output / EARLIER
    return journal.GENESIS if is_unchained(path) else journal.stored_head(path)


def all_releases(output: Path) -> list[Release]:
    """Reads the most that each run, each replaced run and each fit in an experiment's folder has spent.

    If there are several records of a run, the most complete record counts. If copies of a run were continued
    separately, each copy is in the result, because each copy has released something.

    Raises:
      DataError: the record of earlier releases, or a run's record, cannot be read.
    """
    parts = (CHARGES_FILE, CHECKPOINTS, SEARCH)
    folders = sorted({path.parent for part in parts for path in output.glob(f"*/{part}")})
    own = [found for folder in folders if not folder.name.startswith(".") for found in _runs_in(folder)]
    return without_beginnings([*_entries(output), *own])


def without_beginnings(records: Sequence[Release]) -> list[Release]:
    """Returns the releases except those that another release of the same run contains in full."""
    kept: list[Release] = []
    for found in records:
        others = [other for other in kept if found.run_id and other.run_id == found.run_id]
        if any(_has_all_of(other, found) for other in others):
            continue
        kept = [other for other in kept if other not in others or not _has_all_of(found, other)]
        kept.append(found)
    return kept


def _has_all_of(one: Release, other: Release) -> bool:
    """Checks if a record of a run contains all of another record of the same run."""
    if one.chains and other.head:
        return other.head in one.chains
    if one.head and other.head:
        # Both were entered by an earlier version: if they differ, one may have gone on in another way.
        return one.head == other.head
    # Entries of earlier versions can be compared by size alone: ledgers only grow.
    return not other.chains and is_as_large(one.size, other.size)


def why_without_bound(releases: Sequence[Release]) -> str:
    """Returns the reason why no epsilon holds for all the releases together; empty if an epsilon holds."""
    for release in releases:
        if release.non_private:
            return f"a run on record ({release.run}) has no bound: {release.non_private}"
    if len({(release.ledger.unit, release.ledger.adjacency) for release in releases if release.ledger}) > 1:
        return "runs on record protect different things"
    return ""


def _line(release: Release) -> dict[str, Any]:
    ledger = release.ledger.to_json() if release.ledger else None
    return {"format_version": 2, **release._asdict(), "ledger": ledger, "chains": list(release.chains)}


def _entries(output: Path) -> list[Release]:
    """Reads the record of earlier releases."""
    path = output / EARLIER
    if is_unchained(path):
        return list(_unchained(path))
    found = []
    for number, line in enumerate(journal.read(path).lines, start=1):
        try:
            ledger = None if line["ledger"] is None else Ledger.from_json(line["ledger"])
            own = line["run"], line["rounds"], line["run_id"], line.get("head", ""), tuple(line.get("chains", ()))
            found.append(Release(ledger, line["non_private"], *own))
        except (KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{path}: line {number} is not a release ({type(error).__name__}: {error})") from error
    return found


def is_unchained(path: Path) -> bool:
    """Checks if a record of earlier releases is of the first version, whose lines have no chain hashes."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        first = file.readline()
        return bool(first) and b'"chain"' not in first
    return False


def _unchained(path: Path) -> Iterator[Release]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if entry.keys() != {"run", "rounds", "ledger"}:
                raise ValueError("other keys")
            yield Release(Ledger.from_json(entry["ledger"]), None, entry["run"], entry["rounds"])
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            if number == len(lines):
                return  # Cut off by a crash: its run is still in its folder, or had not begun.
            raise DataError(
                f"{path}: line {number} cannot be read ({type(error).__name__}: {error}), so it is not known what was "
                "spent; restore the file from a copy"
            ) from error


def _runs_in(folder: Path) -> list[Release]:
    """Reads the run in a method's folder, with all that it may have spent; two with an old search."""
    charges = read_charges(folder)
    # Files of a search that is being sealed may be gone.
    parts = (CHECKPOINTS,) if charges is not None and charges.is_sealed else (CHECKPOINTS, SEARCH)
    saved = checkpoint_files.newest_of(folder, parts)
    for stored in saved:
        check_record(folder, in_rounds(stored), charges)
    if charges is not None and charges.through_round:
        _check_earlier(folder.parent, charges.identity.earlier_head)
        return [release_of(charges)]
    # A run of the first version. A search that was stopped while its result was saved is there twice, under one key.
    started = {stored.run_key: stored for stored in saved if stored.round_number > 0}
    return [_of_first_version(folder, stored) for stored in started.values()]


def _of_first_version(folder: Path, stored: StoredCheckpoint) -> Release:
    # How far a search came is a secret of the silos.
    rounds = 0 if stored.folder.parent.name == SEARCH else stored.round_number
    return Release(stored.ledger, first_version_reason(stored), folder.name, rounds)


def first_version_reason(stored: StoredCheckpoint) -> str | None:
    """Returns the reason why no privacy is claimed for a run of the first version; None if privacy is claimed."""
    if stored.ledger is None:
        return NO_PRIVACY
    return KNOWN_SEED if stored.run_key and stored.run_key.is_test_only else None


def in_rounds(stored: StoredCheckpoint) -> StoredCheckpoint:
    """Returns a checkpoint for `check_record`; a checkpoint of a search, which counts runs, gets 0 rounds instead."""
    return dataclasses.replace(stored, round_number=0) if stored.folder.parent.name == SEARCH else stored


def check_record(folder: Path, saved: Saved, charges: Charges | None) -> None:
    """Checks that a checkpoint, the run's charges and the record of earlier releases belong together and are complete.

    Raises:
      DataError: a file is missing, lacks lines, or belongs to another run; the message names the file.
    """
    kept, path = saved.surroundings, folder / CHARGES_FILE
    if kept is None:
        return
    _check_earlier(folder.parent, kept.earlier_head)
    if charges is None:
        if kept.charges_head != journal.GENESIS:
            raise DataError(f"{path} is missing, but a checkpoint refers to its lines: restore it from a copy")
        return
    if kept.charges_head not in charges.chains or saved.round_number > charges.through_round:
        raise DataError(f"{path} lacks lines that a checkpoint refers to: restore it from a copy")
    if saved.run_key is not None and saved.run_key.fingerprint() != charges.identity.key_fingerprint:
        raise DataError(f"{path} and the checkpoint are of runs with different keys: restore both from a copy")


def check_files(folder: Path, saved: Saved) -> None:
    """Checks that files beside a checkpoint still begin with the content that the files had when it was saved.

    Raises:
      DataError: a file begins differently; the message names the file.
    """
    for name, prefix in saved.surroundings.files.items() if saved.surroundings else ():
        prefix.check(Path(os.path.normpath(folder / name)))


def _check_earlier(output: Path, head: str) -> None:
    path = output / EARLIER
    if head != journal.GENESIS and (is_unchained(path) or not journal.read(path).has_been_at(head)):
        raise DataError(f"{path} is missing, or lacks lines that a run in the folder refers to: restore it from a copy")
