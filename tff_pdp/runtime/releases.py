"""What was ever spent on an experiment's records: the ledgers of its runs, those of replaced runs included."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tff_pdp.privacy.ledger import Ledger
from tff_pdp.runtime import checkpoint as checkpoints
from tff_pdp.runtime.checkpoint import Checkpoint

EARLIER = "earlier_releases.jsonl"
# What fits of clients that were added after training are called in that record.
PERSONALIZE = "personalize"
# Where a search for hyper-parameters that is not finished keeps its state, in the method's folder.
SEARCH = "search"
# Where users' states are kept, in the method's folder.
STORE = "client_states"
_PARTS = ("checkpoints", SEARCH)


def set_aside(output: Path, folder: Path) -> None:
    """Removes a run that is to be replaced, after entering its ledger into the record of earlier releases.

    Args:
      output: the experiment's folder.
      folder: the run's.

    Raises:
      DataError: the old run's newest checkpoint cannot be read, so what it spent is not known.
    """
    for run, ledger in _runs_in(folder):
        # A run with a guessable key is not private whatever its ledger says; no figure covers it.
        if not run.run_key.is_test_only:
            entry = {"run": folder.name, "rounds": run.round_number, "ledger": ledger.to_json()}
            with open(output / EARLIER, "a") as file:
                file.write(json.dumps(entry) + "\n")
    shutil.rmtree(folder, ignore_errors=True)


def all_ledgers(output: Path, about: Sequence[str] | None = None) -> list[Ledger]:
    """Reads the ledgers of every run in an experiment's folder, and of those replaced since.

    Args:
      output: the experiment's folder.
      about: scopes; fits of clients that were added after training are left out where they are about none of these.
    """
    folders = sorted({path.parent for part in _PARTS for path in output.glob(f"*/{part}")})
    ledgers = [ledger for folder in folders for _, ledger in _runs_in(folder)]
    earlier = output / EARLIER
    if earlier.exists():
        for entry in map(json.loads, earlier.read_text().splitlines()):
            ledger = Ledger.from_json(entry["ledger"])
            of_others = about is not None and not any(scope in ledger.budgets for scope in about)
            if not (of_others and entry["run"] == PERSONALIZE):
                ledgers.append(ledger)
    return ledgers


def _runs_in(folder: Path) -> list[tuple[Checkpoint, Ledger]]:
    """The newest state of every run in a method's folder that has released anything, and its ledger."""
    found = {part: checkpoints.load_latest(folder / part) for part in _PARTS}
    started = {part: saved for part, saved in found.items() if saved is not None and saved.round_number > 0}
    if SEARCH in started:  # How far it came is a secret of the silos.
        started[SEARCH] = dataclasses.replace(started[SEARCH], round_number=0)
    # A search that was stopped while its result was saved is there twice, under one key.
    runs = {saved.run_key: saved for saved in started.values()}
    return [(run, run.ledger) for run in runs.values() if run.ledger is not None]
