"""Writes the cost of rounds to a run's record before the rounds are run, several rounds at a time."""

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tff_pdp.engines.devices import gpu_arithmetic
from tff_pdp.engines.running import Engine
from tff_pdp.errors import DataError
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.plans.plan import PrivacyPlan
from tff_pdp.registry.entries import Registry
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.counted import rest_of_plan
from tff_pdp.training.record.arithmetic import arithmetic_of, of_first_version
from tff_pdp.training.record.charges import ChargesWriter, RunIdentity, counts_of, read_charges
from tff_pdp.training.record.releases import KNOWN_SEED, earlier_head
from tff_pdp.training.rounds import redrawn

# 1 / _SHARE of a plan's rounds is reserved at a time. A run that is killed and then replaced is charged for at most
# this share beyond what it used; a resumed run takes its reservation over. A run's record has about a hundred lines at
# most, each flushed to disk.
_SHARE = 100


class Choices(dict[str, str]):
    """Maps each computation's fingerprint to the mode in which the engine computes clients, such as one by one.

    If `training.device` is `auto` and there is a GPU, `device` maps to the kind of device that the engine took. Results
    of different modes and devices are rounded differently. So each choice is on the run's record before a result is
    used. A resumed run repeats the recorded choices; if two copies of a run choose differently, only one copy can
    continue.
    """

    def __init__(self, folder: Path | None = None):
        """Reads the recorded choices of the run in `folder`; None for a new run.

        Raises:
          DataError: the run's record is damaged.
        """
        charges = None if folder is None else read_charges(folder)
        super().__init__({} if charges is None else charges.choices)
        self._keep: Callable[[Mapping[str, str]], None] | None = None

    def keep_by(self, keep: Callable[[Mapping[str, str]], None]) -> None:
        """Sets the function that writes each further choice to the record."""
        self._keep = keep

    def __setitem__(self, computation: str, mode: str) -> None:
        if self._keep is not None:
            self._keep({computation: mode})
        super().__setitem__(computation, mode)


class Spending:
    """Reserves the cost of a run's rounds on its record before the rounds are run.

    Guarantee: after `before_round(n)` the record has the cost of all rounds up to n, whatever happens next.
    """

    def __init__(
        self,
        writer: ChargesWriter,
        plan: PrivacyPlan,
        state: Checkpoint,
        arithmetic: Mapping[str, Any],
        registry: Registry,
    ):
        """Continues a run from a state; later rounds that the record has reserved already are not reserved again.

        Args:
          writer: writer of the run's charges.
          plan: privacy plan of the run.
          state: state that the run continues from, in the newest attempt on record; the state's ledger is not changed.
          arithmetic: conditions that decide how a round's sums are rounded, as `arithmetic_here` returns them.
          registry: registry that each reservation is entered into.

        Raises:
          DataError: the reservation on record differs from the state's ledger plus the reserved rounds.
          BudgetError: the rest of the planned rounds would overspend.
        """
        self._writer, self._plan, self._arithmetic, self._registry = writer, plan, arithmetic, registry
        self._through_round = state.round_number
        charges = writer.begun
        if state.ledger is not None and charges.attempt.number:
            check_rest(plan, state.ledger, state.round_number)
        elif state.ledger is not None and state.round_number:
            plan.precheck_rest(state.ledger)
        # The copy includes what has been checked, so that entering rounds needs no more accounting.
        self._ledger = copy.deepcopy(state.ledger)
        reserved = max(charges.attempt.arithmetic, default=0)
        if reserved > state.round_number:
            self._charge_through(reserved)
            if counts_of(self._ledger) != counts_of(charges.ledger):
                raise DataError(
                    f"{writer.path} and the checkpoint of round {state.round_number} disagree on what was spent: "
                    "restore both from a copy"
                )
        # The last round that may be run: rounds up to it are on record, and known to the registry.
        self._reserved_round = self._through_round

    def before_round(self, round_number: int) -> None:
        """Reserves a round and some later rounds, unless the round is reserved already.

        Raises:
          BudgetError: the round would overspend; nothing was reserved.
          OSError: the record cannot be written; nothing was reserved.
        """
        if round_number <= self._reserved_round:
            return
        size = max(1, self._plan.rounds // _SHARE)
        self._charge_through(max(round_number, min(self._plan.rounds, round_number + size - 1)))
        self._writer.reserve(self._through_round, self._ledger, self._arithmetic)
        self._tell_registry()
        self._reserved_round = self._through_round

    def choose(self, choices: Mapping[str, str]) -> None:
        """Records the modes in which clients are computed from now on."""
        self._writer.choose(choices)
        self._tell_registry()

    def end(self, state: Checkpoint) -> None:
        """Closes the record after a run's last round."""
        close_run(self._writer, state)

    def _tell_registry(self) -> None:
        # After the folder's own record, which is behind the registry only in an older copy of the folder.
        self._registry.reserve(self._writer.begun.run_id, self._writer.begun.chains)

    def _charge_through(self, round_number: int) -> None:
        for number in range(self._through_round + 1, round_number + 1):
            if self._ledger is not None:
                self._plan.charge_round(self._ledger, number)
        self._through_round = round_number


def check_rest(plan: PrivacyPlan, ledger: Ledger, round_number: int) -> None:
    """Checks that the rounds after `round_number` fit into the budgets, in addition to everything in the ledger.

    Raises:
      BudgetError: the rounds do not fit into the budgets.
    """
    for scope in plan.budgets:
        ledger.precheck(scope, rest_of_plan(plan, scope, round_number))


def close_run(writer: ChargesWriter, state: Checkpoint) -> None:
    """Records that a run has ended, unless that is on record already; does nothing for a run without a record."""
    if writer.charges is not None and not writer.charges.is_closed:
        writer.close_run(state.round_number, state.ledger)


def open_run(writer: ChargesWriter, method: Method, first: Checkpoint) -> None:
    """Begins the record of a run; if no privacy is claimed for the run, the record states the reason."""
    reasons = [KNOWN_SEED] if first.run_key.is_test_only else []
    reasons += [method.plan.claim_reason] if method.plan.claim == "none" else []
    identity = RunIdentity(
        method=method.algorithm.name,
        non_private="; ".join(reasons) or None,
        key_fingerprint=first.run_key.fingerprint(),
        config_hash=first.config_hash,
        earlier_head=earlier_head(writer.path.parent.parent),
    )
    writer.open_run(identity, first.ledger)


def arithmetic_here(config: ExperimentConfig, engine: Engine) -> Mapping[str, Any]:
    """Returns the conditions that decide how a round's sums are rounded on this machine, and on the engine's workers.

    Assumes: on the CPU, tests of this project; on a GPU, what `gpu_arithmetic` assumes.

    Raises:
      EngineError: a worker's machine or software may round differently.
    """
    compute = functools.partial(_arithmetic, config.training.engine, engine.device, config.privacy.generator)
    found = engine.facts(compute)
    engine.expect(compute, functools.partial(_difference, found, is_private=config.privacy.is_private))
    return found


def _arithmetic(engine: str, device: str, generator: Generator) -> Mapping[str, Any]:
    gpu = {} if device == "cpu" else gpu_arithmetic()
    return arithmetic_of(engine, device, is_deterministic=gpu is not None, generator=generator, gpu=gpu or {})


def _difference(here: Mapping[str, Any], there: Mapping[str, Any], *, is_private: bool) -> str:
    if is_private and "once" in there:
        return (
            "its GPU does not repeat sums to the bit, as noise needs if a worker dies: install requirements-gpu.txt, "
            "and leave training.deterministic_operations true"
        )
    # An operation has one thread (`tff_pdp`), so that the number of processors does not matter to it; `once` differs
    # by design.
    ignored = {"once"} | ({"processors"} if here["threads"] == there["threads"] == 1 else set())
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    found = [name for name in differing if name not in ignored]
    if not found:
        return ""
    return (
        f"its sums may round differently, because of another {' and another '.join(found)}: workers need the same "
        "processors, software and settings as this process"
    )


def take_over(
    writer: ChargesWriter, method: Method, saved: Checkpoint, arithmetic: Mapping[str, Any], checkpoint_every: int
) -> None:
    """Begins the record of a run of format version 1, which stated its spending in checkpoints alone.

    The run may have made rounds after its last checkpoint, at most until the next checkpoint, since checkpoints are
    `checkpoint_every` rounds apart. The record counts these rounds as well, with the arithmetic of version 1.
    """
    if writer.charges is None:
        open_run(writer, method, saved)
    rounds, done = method.plan.rounds, saved.round_number
    through_round = min(rounds, (done // checkpoint_every + 1) * checkpoint_every)
    if writer.charges is None or writer.charges.through_round >= max(done, through_round):
        return
    ledger = copy.deepcopy(saved.ledger)
    for number in range(done + 1, through_round + 1):
        if ledger is not None:
            method.plan.charge_round(ledger, number)
    writer.reserve(through_round, ledger, of_first_version(arithmetic))


def in_newest_attempt(
    method: Method, saved: Checkpoint, writer: ChargesWriter, arithmetic: Mapping[str, Any]
) -> Checkpoint:
    """Returns the state from which a run continues; begins a new attempt if rounds cannot be repeated to the bit.

    The state is in the newest attempt on record, which may be the attempt that this call begins.

    Raises:
      DataError: the run has no record.
      ConfigError: rounds that may have been run can be neither repeated nor drawn anew.
      BudgetError: rounds drawn anew would overspend.
    """
    charges = writer.begun
    attempt = charges.attempt
    is_repeated = attempt.can_be_repeated(saved.round_number, arithmetic)
    if is_repeated and saved.run_key.attempt == attempt.number:
        return saved
    if not (is_repeated and saved.round_number == attempt.first_round - 1):
        method.plan.check_redrawn(saved.round_number)
        if charges.ledger is not None:
            check_rest(method.plan, charges.ledger, saved.round_number)
        attempt = writer.redraw(
            saved.round_number + 1, method.plan.with_noise_drawn_anew(charges.ledger, attempt.number + 1)
        )
    return redrawn(method, saved, attempt)
