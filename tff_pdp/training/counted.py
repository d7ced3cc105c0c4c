"""Enters runs into the registry before they draw noise, and composes the cost of all runs on a method's records."""

import copy
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import dp_accounting

from tff_pdp.errors import DataError
from tff_pdp.experiment.before_training import released_id
from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.accounting.events import hashable
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.plans.plan import PrivacyPlan
from tff_pdp.registry.entries import Registry
from tff_pdp.reports.words import upper
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.record.all_runs import AllRuns, Own, compose, releases_on_record
from tff_pdp.training.record.charges import Charges, read_charges
from tff_pdp.training.record.releases import release_of


def enter_run(config: ExperimentConfig, method: Method, folder: Path, charges: Charges, upper: Ledger | None) -> None:
    """Enters a run into the registry before its first noise; increases the entry's spending if rounds are drawn anew.

    `upper` is a ledger of the most that the run can have spent at its end; None without privacy.

    Guarantee: when this function returns, the entry on disk covers all that the run will ever spend, unless rounds
      are drawn anew later.

    Raises:
      DataError: the registry is damaged.
      OSError: the registry cannot be written; the run must not go on.
    """
    registry = Registry(config.privacy.registry)
    if registry.find(charges.run_id) is None:
        if charges.through_round:
            print(
                f"{charges.identity.method}: note: the registry {registry.folder} does not have this run, which was "
                "started under another registry: if a copy of the run was continued, its rounds are not counted here",
                file=sys.stderr,
            )
        registry.begin(
            charges.run_id,
            charges.identity.method,
            folder,
            records=registry.keep_dataset(method.clients, splits_of(method)),
            record_set=config.data.record_set,
            non_private=charges.identity.non_private,
            ledger=upper,
            rounds=method.plan.rounds,
            includes=released_id(config),
        )
    if not charges.is_closed and charges.attempt.number:
        # Rounds are drawn anew, and another copy may have been entered meanwhile, with less.
        registry.raise_to(charges.run_id, charges.chains, method.plan.rounds, upper)


def check_newest(config: ExperimentConfig, folder: Path, charges: Charges) -> None:
    """Checks that a run's folder is not an outdated copy, which would repeat rounds that another copy has run already.

    Raises:
      DataError: the registry lists rounds of the run that the folder lacks; or the registry is damaged.
    """
    registry = Registry(config.privacy.registry)
    known = registry.find(charges.run_id)
    if known is not None and not known.is_in(charges.chains, release_of(charges).size):
        raise DataError(
            f"{folder} lacks rounds of its run that the registry {registry.folder} lists: another copy of the run was "
            "continued. Restore the newest copy, or give --overwrite to start again"
        )


def tell_registry(config: ExperimentConfig, charges: Charges) -> None:
    """Enters the last line of an unfinished run's record into the registry, in case a kill prevented this entry.

    Raises:
      DataError: another copy of the run was continued, or the registry is damaged.
      OSError: the registry cannot be written.
    """
    if not charges.is_closed:
        Registry(config.privacy.registry).reserve(charges.run_id, charges.chains)


def enter_finished(config: ExperimentConfig, method: Method, folder: Path, charges: Charges | None) -> None:
    """Enters a finished run into the registry, for instance a run from another computer.

    If a copy of a run was continued under another registry, the copy gets a separate entry. Errors: as in `enter_run`.
    """
    if charges is None or not charges.through_round:
        return
    known = Registry(config.privacy.registry).find(charges.run_id)
    if known is None or known.closed is None:
        enter_run(config, method, folder, charges, charges.ledger)
        settle(config, folder)
    elif not known.is_in(charges.chains, release_of(charges).size):
        settle(config, folder)


def settle(config: ExperimentConfig, folder: Path) -> None:
    """Enters the spending of the run in a folder into the registry, when the run has ended or is to be removed.

    Raises:
      DataError: the run's record cannot be read, or the registry is damaged.
      OSError: the registry cannot be written.
    """
    charges = read_charges(folder)
    if charges is not None:
        registry = Registry(config.privacy.registry)
        registry.close(charges.run_id, charges.spending, charges.through_round, charges.ledger)


def planned_ledger(plan: PrivacyPlan, state: Checkpoint) -> Ledger | None:
    """Returns a ledger of all that a run may spend if no round is drawn anew after `state`; None without privacy."""
    if state.ledger is None:
        return None
    ledger = copy.deepcopy(state.ledger)
    for scope in plan.budgets:
        rest = rest_of_plan(plan, scope, state.round_number) if state.round_number else plan.planned_counts(scope)
        for event, count in rest.items():
            ledger.append(scope, event, count, "planned")
    return ledger


def rest_of_plan(plan: PrivacyPlan, scope: str, round_number: int) -> Counter[dp_accounting.DpEvent]:
    """Counts, by event, the releases planned for a scope (a silo, or all users) in the rounds after `round_number`."""
    rest: Counter[dp_accounting.DpEvent] = Counter()
    for number in range(round_number + 1, plan.rounds + 1):
        rest.update({hashable(event): count for event, count, _ in plan.charges(scope, number)})
    return rest


def cost_of_all_runs(config: ExperimentConfig, method: Method, *, runs: Collection[str] | None = None) -> AllRuns:
    """Composes the cost of all runs, in all folders, on the records of a method's clients.

    Args:
      config: the experiment.
      method: a method of the experiment.
      runs: ids of the only runs to count; by default, all runs count, as the statement of a report demands.

    Raises:
      DataError: the registry, or the record of a run in the experiment's folder, is damaged.
    """
    registry = Registry(config.privacy.registry)
    own = Own(
        records=registry.keep_dataset(method.clients, splits_of(method)),
        record_set=config.data.record_set,
        scopes=[method.plan.scope_of(client_id) for client_id in method.clients.client_ids],
        are_users=method.plan.samples_clients,
        is_unit_in_several=method.plan.samples_clients or method.clients.manifest.row_influence is not None,
    )
    found = releases_on_record(registry, Path(config.output))
    return compose(registry, [one for one in found if runs is None or one.release.run_id in runs], own)


def splits_of(method: Method) -> Sequence[str]:
    """Returns the splits that a method's training reads: a search also reads validation examples for its scores."""
    return ("train",) if method.plan.search is None else ("train", "validation")


def say_cost_so_far(config: ExperimentConfig, method: Method) -> None:
    """Prints on stderr the cost of all runs on these records so far, before another run begins."""
    cost = cost_of_all_runs(config, method)
    if not cost.runs:
        return
    worst = cost.worst
    together = (
        f"no epsilon holds for them together ({worst.why_no_bound})"
        if worst.why_no_bound
        else f"together they have spent epsilon {upper(worst.epsilon)} at delta {worst.delta:g}"
    )
    elsewhere = f", {cost.elsewhere} of them in other folders" if cost.elsewhere else ""
    print(
        f"{method.algorithm.name}: {cost.runs} releases on record are about these records{elsewhere}; {together}. "
        "Budgets are per run: this run spends its own in addition",
        file=sys.stderr,
    )
    for note in cost.notes:
        print(f"{method.algorithm.name}: note: {note}", file=sys.stderr)
