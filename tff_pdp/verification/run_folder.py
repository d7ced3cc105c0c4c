"""Checks one run's files: the digests and chains of each file, and whether the files belong together."""

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp import journal
from tff_pdp.errors import ConfigError, DataError, UserError
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.training.client_store.inspection import inspect_store
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import CHARGES_FILE, Charges, counts_of, read_charges
from tff_pdp.training.record.checkpoint_files import StoredCheckpoint
from tff_pdp.training.record.releases import CHECKPOINTS, SEARCH, STORE, check_files, check_record, in_rounds
from tff_pdp.training.record.sealing import unsealed_files
from tff_pdp.training.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    SELECTED_FILE,
    read_metrics,
    read_selected,
    read_started_with,
)


class Status(enum.StrEnum):
    """The condition of a file or folder.

    OK: unchanged since it was written. STOPPED: left unfinished by a process that was stopped; no spending is lost, and
    the next command that writes in the folder repairs the file. OLD: written by an earlier version without a digest,
    so that damage cannot be noticed. ABSENT: missing, and not required. PROBLEM: damaged, required but missing, or in
    contradiction to another file.
    """

    OK = "ok"
    STOPPED = "stopped"
    OLD = "old"
    ABSENT = "absent"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      path: path of the file or folder.
      status: condition of the file or folder.
      text: description of the result, one line.
    """

    path: Path
    status: Status
    text: str


def checked(path: Path, check: Callable[[], str | tuple[Status, str]]) -> Finding:
    """Runs a check, which returns a text (status OK) or a status and a text, or raises an error (status PROBLEM)."""
    try:
        found = check()
    except (UserError, OSError) as error:
        return Finding(path, Status.PROBLEM, str(error))
    # Files of earlier versions have no digest, and may hold anything.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Finding(path, Status.PROBLEM, f"{path} is damaged ({type(error).__name__}: {error})")
    return Finding(path, *((Status.OK, found) if isinstance(found, str) else found))


def is_run(folder: Path) -> bool:
    """Checks if a folder belongs to a run: there is a record, a folder of checkpoints, or a search."""
    return any((folder / part).exists() for part in (CHARGES_FILE, CHECKPOINTS, SEARCH))


def check_run(folder: Path) -> Iterator[Finding]:
    """Checks every file of a run."""
    yield checked(folder / CHARGES_FILE, lambda: _charges(folder))
    try:
        charges = read_charges(folder)
    except DataError:
        charges = None  # It has been said.
    saved = [path for part in (CHECKPOINTS, SEARCH) for path in checkpoint_files.complete(folder / part)]
    is_sealed = charges is not None and charges.is_sealed
    if is_sealed:
        yield checked(folder, lambda: _sealed(folder))
        # Files of others may be gone.
        saved = checkpoint_files.complete(folder / CHECKPOINTS)[-1:]
    if not saved and charges is not None and charges.through_round and not is_sealed:
        text = f"there is no checkpoint of a run with {charges.through_round} rounds on record: restore it from a copy"
        yield Finding(folder / CHECKPOINTS, Status.PROBLEM, text)
    for path in saved:
        # A search keeps its own, until its result is there.
        is_newest = path.parent.name == CHECKPOINTS and path == checkpoint_files.complete(folder / CHECKPOINTS)[-1]
        yield checked(path, lambda path=path, is_newest=is_newest: _checkpoint(folder, path, charges, is_newest))
    yield checked(folder / CONFIG_FILE, lambda: _config(folder))
    if not (folder / SEARCH).exists() or (folder / METRICS_FILE).exists():
        yield checked(folder / METRICS_FILE, lambda: _metrics(folder))
    if (folder / SELECTED_FILE).exists():
        yield checked(folder / SELECTED_FILE, lambda: _selected(folder))
    if not is_sealed and ((folder / STORE).exists() or _needs_store(folder)):
        yield checked(folder / STORE, lambda: _store(folder))
    if not is_sealed:
        yield from _leftovers(folder)


def journal_state(path: Path) -> tuple[Status, str]:
    """Checks the chained lines and the head of a journal; returns the status and its description.

    Raises:
      DataError: a line, or the head (the stored hash of the last line), is damaged or missing.
    """
    content = journal.read(path)
    lines = f"lines, chained: {len(content.lines)}"
    if path.exists() and path.stat().st_size > content.num_bytes:
        return Status.STOPPED, (
            f"{lines}; after them the beginning of a line that was never confirmed or used; the next command "
            "that writes there cuts it off"
        )
    if journal.stored_head(path) != content.head:
        return Status.STOPPED, f"{lines}, all of which count; {journal.head_path(path).name} names an earlier line"
    return Status.OK, lines


def _charges(folder: Path) -> tuple[Status, str]:
    path = folder / CHARGES_FILE
    status, text = journal_state(path)
    charges = read_charges(folder)
    if charges is None:
        return Status.OLD, "no charges are on record: the ledger of the newest checkpoint counts"
    _check_order(path, journal.read(path).lines)
    ending = "closed" if charges.is_closed else "not closed, so that reserved rounds count"
    return status, f"{text}; rounds on record: {charges.through_round}, {ending}"


def _check_order(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Checks that lines follow from each other: only the end of a run gives back, and nothing follows the sealing."""
    before: Counter[Any] = Counter()
    for number, line in enumerate(lines, start=1):
        kinds = [one["kind"] for one in lines[:number]]
        counts = counts_of(None if line["ledger"] is None else Ledger.from_json(line["ledger"]))
        if line["kind"] != "closed" and any(counts[key] < count for key, count in before.items()):
            raise DataError(f"{path}: line {number} records less spending than the line before")
        if "sealed" in kinds[:-1] or (number > 1 and line["kind"] == "opened"):
            raise DataError(f"{path}: line {number} cannot follow the lines before it")
        before = counts


def _sealed(folder: Path) -> str:
    left = list(unsealed_files(folder))
    if left:
        raise DataError(f"{left[0]} is still there, and {len(left) - 1} more, though the run is sealed: seal it again")
    return "sealed: no key, no seed and no state is there"


def _checkpoint(folder: Path, path: Path, charges: Charges | None, is_newest: bool) -> tuple[Status, str]:
    stored = checkpoint_files.read_files(path)
    check_record(folder, in_rounds(stored), charges)
    check_files(folder, stored)
    if charges is not None:
        _check_counts(path, stored, charges, is_newest=is_newest)
    if stored.surroundings is None:
        return Status.OLD, f"round {stored.round_number}; its files have no digests"
    if stored.run_key is None:
        return Status.OK, f"round {stored.round_number}, sealed; agrees with the charges"
    return Status.OK, f"round {stored.round_number}; digests, key and charges agree"


def _check_counts(path: Path, stored: StoredCheckpoint, charges: Charges, *, is_newest: bool) -> None:
    """Compares the spending in a checkpoint with the spending on record."""
    own, on_record = counts_of(stored.ledger), counts_of(charges.ledger)
    if (stored.ledger is None) != (charges.ledger is None):
        raise DataError(f"{path} and {CHARGES_FILE} disagree on whether the run has a ledger: restore both from a copy")
    if charges.through_round and any(on_record[key] < count for key, count in own.items()):
        raise DataError(f"{path} records more spending than {CHARGES_FILE} does: restore both from a copy")
    if charges.is_closed and is_newest and (own != on_record or stored.round_number != charges.through_round):
        raise DataError(f"{path} differs from the end of the run in {CHARGES_FILE}: restore both from a copy")


def _config(folder: Path) -> tuple[Status, str]:
    read_started_with(folder)
    if b'"format_version"' not in (folder / CONFIG_FILE).read_bytes():
        return Status.OLD, "read; it has no digest of its own"
    return Status.OK, "its digest agrees"


def _metrics(folder: Path) -> tuple[Status, str]:
    rows = read_metrics(folder)
    stored = (folder / METRICS_FILE).read_bytes()
    rounds = [row["round"] for row in rows]
    if rounds != sorted(set(rounds)):
        raise DataError(f"{folder / METRICS_FILE}: rows are not in the order of rounds, or a round is there twice")
    if stored and not stored.endswith(b"\n"):
        return Status.STOPPED, f"rows: {len(rows)}, and the beginning of one more, which is not read"
    if any("format_version" not in row for row in rows):
        return Status.OLD, f"rows: {len(rows)}, without digests of their own"
    return Status.OK, f"rows, with digests: {len(rows)}"


def _selected(folder: Path) -> tuple[Status, str]:
    selected = read_selected(folder)
    if "format_version" not in json.loads((folder / SELECTED_FILE).read_bytes()):
        return Status.OLD, f"selections of {len(selected)} silos, without a digest of their own"
    return Status.OK, f"selections of {len(selected)} silos; the digest agrees"


def _needs_store(folder: Path) -> bool:
    """Checks if the newest checkpoint leaves users' states to a store."""
    try:
        stored = checkpoint_files.newest(folder / CHECKPOINTS, with_arrays=False)
    except DataError:
        return False
    # A sealed one has no structure at all.
    return stored is not None and "clients" in stored.structure and stored.structure["clients"] is None


def _store(folder: Path) -> tuple[Status, str]:
    found = inspect_store(folder / STORE)
    rounds = [int(path.name.removeprefix("round_")) for path in checkpoint_files.complete(folder / CHECKPOINTS)]
    if rounds and not found.oldest_round <= rounds[-1] <= found.round_number:
        raise DataError(
            f"{folder / STORE} has states of rounds {found.oldest_round} to {found.round_number}, and the newest "
            f"checkpoint is of round {rounds[-1]}: restore both from a copy"
        )
    text = f"{found.num_states} states of {found.num_clients} clients, round {found.round_number}; checksums agree"
    if found.num_left:
        return Status.STOPPED, f"{text}; {found.num_left} states of a round that was interrupted do not count"
    if found.was_interrupted:
        return Status.STOPPED, f"{text}; a commit was interrupted, and is undone when the store is opened"
    if found.is_old:
        return Status.OLD, f"{text}, in the previous format, whose checksums lack client and round"
    return Status.OK, text


def _leftovers(folder: Path) -> Iterator[Finding]:
    """Lists files that killed commands left beside the files that count."""
    parts = [folder, folder / CHECKPOINTS, folder / SEARCH]
    for path in sorted(path for part in parts if part.is_dir() for path in part.glob(".*")):
        yield Finding(path, Status.STOPPED, "left by a command that was stopped; the next command removes it")


def planned_rounds(folder: Path) -> int | None:
    """Reads the number of rounds that a run was planned with; None if the number cannot be read."""
    rounds = config_of(folder).get("training", {}).get("rounds")
    return rounds if isinstance(rounds, int) else None


def config_of(folder: Path) -> Mapping[str, Any]:
    """Reads the settings of a run; empty if they cannot be read."""
    try:
        return read_started_with(folder)
    except (DataError, ConfigError):
        return {}
