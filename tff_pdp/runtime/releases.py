"""What was ever spent on an experiment's records: the ledgers of its runs, those of replaced runs included."""

import json
import shutil
from pathlib import Path

from tff_pdp.privacy.ledger import Ledger
from tff_pdp.runtime import checkpoint as checkpoints

EARLIER = "earlier_releases.jsonl"


def set_aside(output: Path, folder: Path) -> None:
    """Removes a run that is to be replaced, after entering its ledger into the record of earlier releases.

    Args:
      output: the experiment's folder.
      folder: the run's.

    Raises:
      DataError: the old run's newest checkpoint cannot be read, so what it spent is not known.
    """
    saved = checkpoints.load_latest(folder / "checkpoints")
    # A run with a guessable key, or without noise, is not private whatever its ledger says; no figure covers it.
    if saved is not None and saved.ledger is not None and saved.round_number > 0 and not saved.run_key.is_test_only:
        entry = {"run": folder.name, "rounds": saved.round_number, "ledger": saved.ledger.to_json()}
        with open(output / EARLIER, "a") as file:
            file.write(json.dumps(entry) + "\n")
    shutil.rmtree(folder, ignore_errors=True)


def all_ledgers(output: Path) -> list[Ledger]:
    """Reads the ledgers of every run in an experiment's folder, and of those replaced since."""
    ledgers = []
    for folder in sorted(output.glob("*/checkpoints")):
        saved = checkpoints.load_latest(folder)
        if saved is not None and saved.ledger is not None and saved.round_number > 0:
            ledgers.append(saved.ledger)
    earlier = output / EARLIER
    if earlier.exists():
        ledgers += [Ledger.from_json(json.loads(line)["ledger"]) for line in earlier.read_text().splitlines()]
    return ledgers
