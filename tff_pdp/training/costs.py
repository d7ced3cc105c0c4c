"""Sums up what was ever spent on an experiment's records: the ledgers of its runs, those of replaced runs included.

It says what a run cost, what all runs on record cost together, and what tuning would have cost.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.files import sync
from tff_pdp.privacy.accounting.accountants import EpsilonBounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import Ledger, compose_worst_case
from tff_pdp.training import checkpoint as checkpoints
from tff_pdp.training.checkpoint import Checkpoint

EARLIER = "earlier_releases.jsonl"
# What fits of clients that were added after training are called in that record.
PERSONALIZE = "personalize"
# Where a search for hyper-parameters that is not finished keeps its state, in the method's folder.
SEARCH = "search"
# Where users' states are kept, in the method's folder.
STORE = "client_states"
_PARTS = ("checkpoints", SEARCH)


class Release(NamedTuple):
    """What one run, or one fit of added clients, has spent.

    Attributes:
      ledger: its own.
      is_test_only: its noise follows from a seed that anyone can guess, whatever the ledger says.
    """

    ledger: Ledger
    is_test_only: bool = False


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
            enter(output, folder.name, run.round_number, ledger)
    shutil.rmtree(folder, ignore_errors=True)


def enter(output: Path, run: str, rounds: int, ledger: Ledger) -> None:
    """Appends to the record of earlier releases; when this returns, the entry outlasts a power cut.

    Args:
      output: the experiment's folder.
      run: a method's name, or `PERSONALIZE`.
      rounds: how many rounds the ledger covers.
      ledger: what was spent.
    """
    path = output / EARLIER
    entry = json.dumps({"run": run, "rounds": rounds, "ledger": ledger.to_json()}).encode()
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            # Behind a line that a crash cut off, this one must stay readable.
            entry = entry if file.read(1) == b"\n" else b"\n" + entry
        file.write(entry + b"\n")
    sync(path)
    # Of a file that is new, the name must last, too.
    sync(output)


def all_releases(output: Path, about: Sequence[str] | None = None) -> list[Release]:
    """Reads what every run in an experiment's folder has spent, and those replaced since.

    Args:
      output: the experiment's folder.
      about: scopes; fits of clients that were added after training are left out where they are about none of these.

    Raises:
      DataError: the record of earlier releases, or a run's newest checkpoint, cannot be read.
    """
    folders = sorted({path.parent for part in _PARTS for path in output.glob(f"*/{part}")})
    releases = [Release(ledger, run.run_key.is_test_only) for folder in folders for run, ledger in _runs_in(folder)]
    for run, ledger in _entries(output / EARLIER):
        of_others = about is not None and not any(scope in ledger.budgets for scope in about)
        if not (of_others and run == PERSONALIZE):
            releases.append(Release(ledger))
    return releases


def why_without_bound(releases: Sequence[Release]) -> str:
    """Why no epsilon holds for all of these together, if so; otherwise an empty text."""
    if any(release.is_test_only for release in releases):
        return "the noise of a run on record follows from training.test_only_seed"
    if len({(release.ledger.unit, release.ledger.adjacency) for release in releases}) > 1:
        return "runs on record protect different things"
    return ""


def _entries(path: Path) -> Iterator[tuple[str, Ledger]]:
    """The record of earlier releases: each run's name and ledger."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            run, ledger = entry["run"], Ledger.from_json(entry["ledger"])
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(
                f"{path}: line {number} cannot be read ({type(error).__name__}: {error}), so it is not known what was "
                "spent. Restore the file from a copy. A last line that a crash cut off may be removed: what it is "
                "about is in its run's folder still, or was not begun"
            ) from error
        yield run, ledger


def _runs_in(folder: Path) -> list[tuple[Checkpoint, Ledger]]:
    """The newest state of every run in a method's folder that has released anything, and its ledger."""
    found = {part: checkpoints.load_latest(folder / part) for part in _PARTS}
    started = {part: saved for part, saved in found.items() if saved is not None and saved.round_number > 0}
    if SEARCH in started:  # How far it came is a secret of the silos.
        started[SEARCH] = dataclasses.replace(started[SEARCH], round_number=0)
    # A search that was stopped while its result was saved is there twice, under one key.
    runs = {saved.run_key: saved for saved in started.values()}
    return [(run, run.ledger) for run in runs.values() if run.ledger is not None]


Trained = tuple[Method, Checkpoint]


def epsilon_fields(budget: SiloBudget | None, bounds: EpsilonBounds | None) -> dict[str, float]:
    """Budget and spending under the names that reports give them; infinite without a budget, or without bounds."""
    asked = {"epsilon_target": math.inf, "delta": 0.0}
    if budget is not None:
        asked = {"epsilon_target": budget.epsilon, "delta": budget.delta}
    if bounds is None:
        return {**asked, **dict.fromkeys(("epsilon_spent", "epsilon_rdp", "epsilon_pld"), math.inf)}
    return {
        **asked,
        "epsilon_spent": bounds.best,
        "epsilon_rdp": math.nan if bounds.rdp is None else bounds.rdp,
        "epsilon_pld": math.nan if bounds.pld is None else bounds.pld,
    }


def recorded_costs(
    config: ExperimentConfig, trained: Sequence[Trained], scopes: Sequence[str], *, only_budgets_hold: bool = False
) -> dict[str, Any]:
    """What a privacy statement is told of all recorded runs: the largest epsilon of a scope, delta, how many runs.

    Args:
      config: whose folder to look in.
      trained: the methods that are reported on; where one has no ledger, nothing is known of their union.
      scopes: of their ledgers.
      only_budgets_hold: whether what was spent says nothing of what could have been.
    """
    releases = all_releases(Path(config.output), about=scopes) if all(state.ledger for _, state in trained) else []
    if not releases:
        return {"composed_epsilon": None, "composed_delta": None, "recorded_runs": None}
    why_no_bound = why_without_bound(releases)
    ledgers = [release.ledger for release in releases]
    delta = max(budget.delta for ledger in ledgers for budget in ledger.budgets.values())
    if why_no_bound:
        epsilon = math.inf
    elif only_budgets_hold:
        # Budgets hold whatever number was released, and so does their sum.
        budgets = [ledger.budgets for ledger in ledgers]
        epsilon = max(sum(own[scope].epsilon for own in budgets if scope in own) for scope in scopes)
        delta *= len(ledgers)
    else:
        epsilon = max(compose_worst_case(ledgers, scope).best for scope in scopes)
    return {
        "composed_epsilon": epsilon,
        "composed_delta": delta,
        "recorded_runs": len(ledgers),
        "why_no_bound": why_no_bound,
    }


def epsilon_if_charged(config: ExperimentConfig, trained: Sequence[Trained], scope: str) -> float | None:
    """What a scope would have spent, had every configuration tried been a release; None where that says nothing."""
    tried = config.tuning.configurations_tried
    ledgers = [state.ledger for _, state in trained if state.ledger]
    if tried < 2 or not ledgers:
        return None
    costliest = max(ledgers, key=lambda ledger: ledger.epsilon(scope).best)
    return compose_worst_case([costliest] * tried, scope).best
