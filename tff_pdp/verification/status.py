"""Says how far runs have come and what they have spent, from the files on disk; writes nothing, needs no TensorFlow."""

import datetime
import enum
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tff_pdp.errors import DataError
from tff_pdp.lock import Writer, writer_of
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.reports.content import json_safe
from tff_pdp.reports.words import between, plain, upper
from tff_pdp.trackers.base import NONPRIVATE
from tff_pdp.training.record import checkpoint_files
from tff_pdp.training.record.charges import Charges, read_charges
from tff_pdp.training.record.releases import CHECKPOINTS, SEARCH
from tff_pdp.training.run_folder import METRICS_FILE, read_metrics
from tff_pdp.verification.run_folder import planned_rounds

T = TypeVar("T")

# Rounds from whose seconds the time of a round is estimated.
_NEWEST_ROWS = 20
# A reader may meet a checkpoint that the running command is just replacing.
_ATTEMPTS = 3
# In text; `--json` has all.
_MOST_SCOPES = 50


class State(enum.StrEnum):
    """The state of a run.

    NOT_STARTED: nothing is on record. RUNNING: a process writes to the run's folder. STOPPED: the last command gave the
    run up, after an error or at the user's wish. KILLED: the last command ended without giving the run up. FINISHED:
    the last round is done. SEALED: the run's key and states are destroyed.
    """

    NOT_STARTED = "not started"
    RUNNING = "running"
    STOPPED = "stopped"
    KILLED = "killed"
    FINISHED = "finished"
    SEALED = "sealed"


class Spent(NamedTuple):
    """The spending of one scope: a silo, or all users.

    Attributes:
      scope: name of the silo; one name for all users.
      epsilon_spent: epsilon of everything on the run's record, with the rounds that are reserved but not yet run.
      epsilon_left: budget minus `epsilon_spent`.
      budget: epsilon of the scope's budget for this run; infinite where no protection is asked for.
      delta: delta of these epsilons.
    """

    scope: str
    epsilon_spent: float
    epsilon_left: float
    budget: float
    delta: float


class RunStatus(NamedTuple):
    """How far a run has come, and what it has spent.

    Attributes:
      folder: folder of the run.
      state: state of the run.
      process: number of the running process; None if no process runs.
      is_search: whether a search for hyper-parameters is under way, whose progress is secret.
      round_number: the last round that is known to be done, from checkpoints and metrics.
      rounds: planned number of rounds; None if unknown.
      rounds_kept: round of the newest checkpoint, from which a resumed run continues.
      rounds_charged: last round whose cost is on record; the run may have come so far.
      seconds_per_round: estimated wall-clock seconds of a round; None before the first figures.
      seconds_left: estimated seconds to the last round; None if unknown, or if no process runs.
      no_epsilon: reason why no epsilon holds for the run; empty if one holds.
      spent: spending of every scope; empty if no epsilon holds.
      metrics: the newest row of `metrics.jsonl`; None without a row.
    """

    folder: Path
    state: State
    process: int | None
    is_search: bool
    round_number: int
    rounds: int | None
    rounds_kept: int
    rounds_charged: int
    seconds_per_round: float | None
    seconds_left: float | None
    no_epsilon: str
    spent: Sequence[Spent]
    metrics: Mapping[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """Returns the status as plain data for JSON; an infinite spending is null."""
        own = self._asdict() | {"folder": str(self.folder), "state": self.state.value}
        own["spent"] = [one._asdict() for one in self.spent]
        return json_safe(own)


def status_of(folder: Path) -> RunStatus:
    """Reads the status of the run in a folder, which a command may be writing to.

    Guarantee: the spending of each scope is the epsilon of the ledger on the run's record, which covers everything that
      the run may have released. If a noised number sets a scope's releases, it is the budget.
    Assumes: as for the ledger (`tff_pdp.privacy.accounting.ledger.Ledger`).

    Raises:
      DataError: the run's record, or a file beside it, is damaged.
    """
    writer = writer_of(folder)
    charges = read_charges(folder)
    rows = _again(lambda: read_metrics(folder)) if (folder / METRICS_FILE).exists() else []
    kept, rounds = checkpoint_files.newest_round(folder / CHECKPOINTS), planned_rounds(folder)
    reached = max([kept, *(row["round"] for row in rows[-1:])])
    seconds = _seconds_per_round(folder, rows, writer)
    ledger = charges.ledger if charges is not None else _old_ledger(folder)
    reason = _no_epsilon(charges, ledger)
    state = _state(writer, charges, is_begun=bool(kept or charges))
    is_running = state is State.RUNNING
    return RunStatus(
        folder=folder,
        state=state,
        process=writer.process if is_running else None,
        is_search=(folder / SEARCH).exists(),
        round_number=reached,
        rounds=rounds,
        rounds_kept=kept,
        rounds_charged=charges.through_round if charges is not None else kept,
        seconds_per_round=seconds,
        seconds_left=None
        if seconds is None or rounds is None or not is_running
        else seconds * max(0, rounds - reached),
        no_epsilon=reason,
        spent=[] if reason or ledger is None else _spending(ledger),
        metrics=rows[-1] if rows else None,
    )


def status_text(status: RunStatus) -> str:
    """Formats a status for readers: a line on progress, then lines on spending and on the newest validation."""
    own = [status.state.value + (f" (process {status.process})" if status.process else "")]
    if status.is_search:
        own.append("a search for hyper-parameters, whose progress is secret")
    elif status.state is not State.NOT_STARTED:
        own.append(f"round {status.round_number} of {status.rounds or 'an unknown number'}")
        if status.state in (State.STOPPED, State.KILLED):
            own.append(f"{status.rounds_kept} rounds are kept, which the command with --resume goes on from")
        if status.seconds_per_round is not None:
            own.append(f"{plain(status.seconds_per_round)} s a round")
        if status.seconds_left is not None:
            own.append(f"about {datetime.timedelta(seconds=round(status.seconds_left))} left")
    lines = [f"{status.folder}: {', '.join(own)}", *_spending_lines(status)]
    if status.metrics is not None and NONPRIVATE in status.metrics:
        figures, metric = status.metrics[NONPRIVATE], str(status.metrics["metric"]).replace("_", " ")
        parts = [f"mean {plain(float(figures['mean']))}", f"spread {plain(float(figures['spread']))}"]
        parts.append(f"worst {plain(float(figures['worst']))}" + _named(figures.get("worst_client")))
        parts.append(f"loss {plain(float(figures['loss']))}")
        lines.append(f"  validation {metric} in round {status.metrics['round']}, not private: {', '.join(parts)}")
    return "\n".join(lines)


def _spending_lines(status: RunStatus) -> list[str]:
    if status.state is State.NOT_STARTED:
        return []
    if status.no_epsilon:
        return [f"  no epsilon holds: {status.no_epsilon}"]
    spent = status.spent
    together = between([one.epsilon_spent for one in spent], upper)
    lines = [f"  epsilon spent through round {status.rounds_charged}: {together} (scopes: {len(spent)})"]
    width = max((len(one.scope) for one in spent[:_MOST_SCOPES]), default=0)
    for one in spent[:_MOST_SCOPES]:
        parts = f"spent {upper(one.epsilon_spent)} of {plain(one.budget)}, left {_lower(one.epsilon_left)}"
        lines.append(f"    {one.scope:<{width}}  {parts}, at delta {plain(one.delta)}")
    if len(spent) > _MOST_SCOPES:
        lines.append(f"    and {len(spent) - _MOST_SCOPES} more, which --json lists")
    return lines


def _named(client: str | None) -> str:
    return "" if client is None else f" ({client})"


def _lower(value: float) -> str:
    """Formats what is left, rounded down."""
    if not math.isfinite(value) or value <= 0:
        return plain(value)
    steps = 10.0 ** (math.floor(math.log10(value)) - 2)
    return plain(math.floor(value / steps * (1 + 1e-12)) * steps)


def _spending(ledger: Ledger) -> list[Spent]:
    budgets, found = ledger.budgets, {scope: bounds.best for scope, bounds in ledger.epsilons().items()}
    # The cost with the drawn number does not bound the cost with other numbers.
    found |= {scope: budgets[scope].epsilon for scope in budgets if ledger.follows_from_a_choice(scope)}
    return [
        Spent(scope, spent, _left(budgets[scope].epsilon, spent), budgets[scope].epsilon, budgets[scope].delta)
        for scope, spent in found.items()
    ]


def _left(budget: float, spent: float) -> float:
    return budget if math.isinf(budget) else budget - spent


def _no_epsilon(charges: Charges | None, ledger: Ledger | None) -> str:
    if charges is not None and charges.identity.non_private:
        return charges.identity.non_private
    return "" if ledger is not None else "the run has no ledger"


def _old_ledger(folder: Path) -> Ledger | None:
    """Returns the ledger of a run of the first version, which stated its spending in checkpoints alone."""
    saved = _again(lambda: checkpoint_files.newest(folder / CHECKPOINTS, with_arrays=False))
    return None if saved is None else saved.ledger


def _state(writer: Writer, charges: Charges | None, *, is_begun: bool) -> State:
    if writer.holds_lock:
        return State.RUNNING
    if charges is not None and charges.is_sealed:
        return State.SEALED
    if charges is not None and charges.is_closed:
        return State.FINISHED
    if not is_begun:
        return State.NOT_STARTED
    return State.STOPPED if writer.process is None else State.KILLED


def _seconds_per_round(folder: Path, rows: Sequence[Mapping[str, Any]], writer: Writer) -> float | None:
    """Estimates the seconds of a round, where possible with validation and checkpoints in between."""
    saved = checkpoint_files.complete(folder / CHECKPOINTS)[-2:]
    if writer.since is not None and len(saved) > 1:
        # Written by the same process, one after the other.
        times = [path.stat().st_mtime for path in saved if path.exists()]
        numbers = [int(path.name.removeprefix("round_")) for path in saved]
        if len(times) > 1 and writer.since < times[0] < times[1]:
            return (times[1] - times[0]) / (numbers[1] - numbers[0])
    seconds = [float(row["seconds"]) for row in rows[-_NEWEST_ROWS:] if "seconds" in row]
    return statistics.median(seconds) if seconds else None


def _seconds_left(seconds: float | None, reached: int, rounds: int | None) -> float | None:
    return None if seconds is None or rounds is None else seconds * max(0, rounds - reached)


def _again(read: Callable[[], T]) -> T:
    for _ in range(_ATTEMPTS - 1):
        try:
            return read()
        except (DataError, FileNotFoundError):
            continue
    return read()
