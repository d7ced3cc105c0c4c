"""Seals runs: destroys a run's key and states, and retains its ledger and results.

Anyone who has a run's key can generate its noise again and subtract the noise. Users' states contain no noise at all,
and server states contain the seeds of the noise. A finished and exported run needs neither key nor states.

The order of the steps makes a kill at any point harmless. First, `sealed` is written to the charges, so that no command
continues the run; then the newest checkpoint is replaced by a checkpoint without key and arrays; then files are
destroyed. Sealing the run again completes an interrupted sealing.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tff_pdp import journal
from tff_pdp.errors import ConfigError, DataError
from tff_pdp.files import overwrite_and_remove, sync
from tff_pdp.lock import only_writer
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import CHARGES_FILE, ChargesWriter, RunIdentity, read_charges
from tff_pdp.training.record.checkpoint_files import CONTENT_FILE, StoredCheckpoint, Surroundings, newest_of
from tff_pdp.training.record.releases import (
    CHECKPOINTS,
    SEARCH,
    STORE,
    check_files,
    check_record,
    earlier_head,
    first_version_reason,
    in_rounds,
)


class Sealed(NamedTuple):
    """The number and the total size of the files that a sealing destroyed.

    Attributes:
      folder: folder of the run.
      num_files: number of destroyed files; 0 if an earlier sealing had destroyed all files.
      num_bytes: total size of the destroyed files.
    """

    folder: Path
    num_files: int
    num_bytes: int


def check_can_be_sealed(folder: Path, planned_rounds: int | None, *, is_unfinished_too: bool = False) -> bool:
    """Checks that `seal_run` can seal a run; changes nothing. Arguments and errors are as in `seal_run`.

    Returns:
      True if the run has finished all planned rounds.
    """
    _check_links(folder)
    charges = read_charges(folder)
    if charges is not None and charges.is_sealed:
        return charges.is_closed
    saved = newest_of(folder, (CHECKPOINTS, SEARCH))
    if charges is None and not saved:
        raise ConfigError(f"{folder} holds no run")
    for one in saved:
        check_record(folder, in_rounds(one), charges)
        check_files(folder, one)
    done = max((one.round_number for one in saved if one.folder.parent.name == CHECKPOINTS), default=0)
    is_old_and_done = charges is None and planned_rounds is not None and done >= planned_rounds
    is_finished = is_old_and_done or (charges is not None and charges.is_closed)
    if not is_finished and not is_unfinished_too:
        raise ConfigError(
            f"{folder} has not been run to its end ({done} of {planned_rounds or 'the planned'} rounds): finish it "
            "with --resume, or give --unfinished, after which the run can never be resumed"
        )
    return is_finished


def seal_run(folder: Path, planned_rounds: int | None, *, is_unfinished_too: bool = False) -> Sealed:
    """Destroys the key and the states of one run, or completes a sealing that was interrupted.

    Guarantee: when this function returns, no file in the run's folder contains the key, a seed of noise, or a client's
      state. Spending on record is unchanged.
    Assumes: as in `tff_pdp.files.overwrite_and_remove`; nobody has copied the folder.

    Args:
      folder: folder of the run.
      planned_rounds: planned number of rounds; needed for runs of the first version, which do not record their end.
      is_unfinished_too: whether to seal an unfinished run, too, although the run can then never be finished.

    Raises:
      ConfigError: the run is unfinished, the folder has no run, or the folder or a part of it is a link. Nothing was
        changed.
      DataError: a file of the run's record is damaged, or another process writes to the folder; nothing was changed.
      OSError: a file cannot be written or removed; sealing again continues from there.
    """
    with only_writer(folder):
        is_finished = check_can_be_sealed(folder, planned_rounds, is_unfinished_too=is_unfinished_too)
        # Opening the record repairs what a kill has left of it.
        with ChargesWriter(folder) as writer:
            if writer.charges is None or not writer.charges.is_sealed:
                _take_over(writer, folder, is_finished=is_finished)
                writer.seal_run()
        # A search keeps no checkpoint: how far it came is a secret of the silos.
        for one in newest_of(folder, (CHECKPOINTS,)):
            checkpoint_files.seal(one.folder, _surroundings(folder, one))
        return _destroyed(folder)


def unsealed_files(folder: Path) -> Iterator[Path]:
    """Yields the files of a run that contain its key, seeds or states, including files that killed commands left.

    A sealed run has no such files, unless a kill interrupted the sealing.
    """
    # Leftovers of a killed `discard` of runs, and of users' states, too.
    places = [folder / CHECKPOINTS, folder / SEARCH, folder / STORE, folder.with_name(f".{folder.name}.removed")]
    places += [
        folder / f".{name}.{end}" for name in (CHECKPOINTS, SEARCH, STORE) for end in ("removed", "tmp", "moved")
    ]
    newest = checkpoint_files.complete(folder / CHECKPOINTS)[-1:]
    kept = [path / CONTENT_FILE for path in newest]
    for place in places:
        # A link counts as a file, and is not followed: it may lead to another run's files.
        inside = [place] if place.is_symlink() else sorted(place.rglob("*"))
        found = (path for path in inside if path.is_symlink() or not path.is_dir())
        yield from (path for path in found if path not in kept)


def _check_links(folder: Path) -> None:
    """Refuses to destroy anything through a link: the files may belong to another folder, whose run needs them."""
    if folder.is_symlink():
        raise ConfigError(
            f"{folder} is a link, and nothing is destroyed through a link: seal {folder.resolve()}, which it leads to, "
            "or move that folder to the place of the link"
        )
    # Also the run's own record: sealed through a link, the record of another run would say `sealed`.
    for path in [*folder.glob("*"), *unsealed_files(folder)]:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link: to keep the file or folder that the link leads to, remove the link; to seal that "
                "file or folder, move it to the place of the link"
            )


def _take_over(writer: ChargesWriter, folder: Path, *, is_finished: bool) -> None:
    """Begins the record of a run of the first version, whose checkpoints say what it has spent."""
    saved = newest_of(folder, (CHECKPOINTS, SEARCH))
    if not saved or (writer.charges is not None and writer.charges.through_round):
        return
    one = saved[0]
    if one.run_key is None:
        raise DataError(f"{folder / CHARGES_FILE} is missing, and {one.folder} is sealed: restore it from a copy")
    if writer.charges is None:
        why, head = first_version_reason(one), earlier_head(folder.parent)
        identity = RunIdentity(folder.name, why, one.run_key.fingerprint(), one.config_hash, head)
        writer.open_run(identity, one.ledger)
    # A search counts from 1, and how far it came is a secret of the silos.
    is_search = one.folder.parent.name == SEARCH
    if one.round_number:
        writer.reserve(1 if is_search else one.round_number, one.ledger, {})
        if is_finished:
            writer.close_run(one.round_number, one.ledger)


def _surroundings(folder: Path, stored: StoredCheckpoint) -> Surroundings:
    """Returns the state of the files beside a checkpoint, as the checkpoint has it or, if it has none, as it is now."""
    kept = stored.surroundings or Surroundings(earlier_head=earlier_head(folder.parent))
    return dataclasses.replace(kept, charges_head=journal.stored_head(folder / CHARGES_FILE))


def _destroyed(folder: Path) -> Sealed:
    files = list(unsealed_files(folder))
    num_bytes = 0
    # Keys first: without keys, the files that are left reveal least.
    for path in sorted(files, key=lambda one: one.name != checkpoint_files.KEY_FILE):
        num_bytes += path.stat().st_size
        overwrite_and_remove(path)
    # Neither is a link: `_check_links`.
    for place in (folder, folder.with_name(f".{folder.name}.removed")):
        for root, _, inside in os.walk(place, topdown=False):
            if not inside and not os.listdir(root) and Path(root) != folder:
                os.rmdir(root)
    sync(folder)
    sync(folder.parent)
    return Sealed(folder, len(files), num_bytes)
