"""How far a search for hyper-parameters has come: what a silo would keep for itself, saved as a checkpoint is."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Best:
    """A silo's best run so far. Nothing of its other runs is kept.

    Attributes:
      client_state: after the run; None where there was no run yet.
      score: with noise; minus infinity where there was no run yet.
      run: its number, from 1; 0 where there was no run yet.
    """

    client_state: Any = None
    score: float = -math.inf
    run: int = 0


@dataclasses.dataclass(frozen=True)
class SearchState:
    """A search between two of its runs.

    Attributes:
      first: the state before the first round, with the key, and with a ledger that has been charged for the search.
      best: by silo, in the order of `first.client_ids`.
      runs_done: how many runs every silo has made that makes so many.
    """

    first: Checkpoint
    best: Sequence[Best]
    runs_done: int = 0


def save(folder: Path, state: SearchState) -> None:
    """Writes the state where nobody but the owner can list it: how many runs were made is a secret."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = dataclasses.replace(
        state.first,
        # Counted from 1: even before its first run a search has been charged for.
        round_number=1 + state.runs_done,
        server_state=collections.OrderedDict(),
        client_states=[
            collections.OrderedDict(
                client_state=collections.OrderedDict() if one.client_state is None else one.client_state,
                score=np.float64(one.score),
                run=np.int64(one.run),
            )
            for one in state.best
        ],
    )
    checkpoints.save(folder, content)


def load(folder: Path, first: Checkpoint) -> SearchState | None:
    """Reads the newest state, or returns None where there is none.

    Args:
      folder: where it was saved.
      first: a state before the first round, whose key and ledger are replaced by those of the search.

    Raises:
      DataError: the state cannot be read.
    """
    saved = checkpoints.load_latest(folder)
    if saved is None:
        return None
    kept = [(one["client_state"], float(one["score"]), int(one["run"])) for one in saved.client_states]
    return SearchState(
        first=dataclasses.replace(first, ledger=saved.ledger, run_key=saved.run_key, config_hash=saved.config_hash),
        best=[Best(client_state, score, run) if run else Best() for client_state, score, run in kept],
        runs_done=saved.round_number - 1,
    )
