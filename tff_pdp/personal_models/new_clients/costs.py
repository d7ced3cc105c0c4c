"""Charges new silos for fitting: the mechanism a budget asks for, on record before anything is computed with it.

The record is the one of `tff_pdp.training.costs`: whoever sums up what was released of a silo finds these fits there.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent
from tff_pdp.privacy.accounting.ledger import Ledger, compose_worst_case
from tff_pdp.privacy.mechanisms.silo_statistics import parse_num_examples
from tff_pdp.privacy.plans.plan import PlannedTraining
from tff_pdp.privacy.plans.settings import PrivacyConfig
from tff_pdp.privacy.plans.silo_example import SELECTION, SiloExamplePlan, build_silo_example_plan, check_delta
from tff_pdp.training.record.releases import Release, all_releases, enter, why_without_bound

# Why the claim of a fit is no stronger.
FIT_CONDITION = "the number of examples of each silo that is added is treated as public"


@dataclasses.dataclass(frozen=True)
class RecordedCost:
    """What is on record of a silo.

    Attributes:
      epsilon: of everything together, at `delta`; perhaps infinite.
      delta: the largest of the budgets.
      releases: how many runs and fits there are on record.
      why_infinite: if no epsilon holds for all of them, why; otherwise empty.
    """

    epsilon: float
    delta: float
    releases: int
    why_infinite: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`: a claim, and an epsilon that is None where the claim is `none`."""
        return {
            "claim": "none" if self.why_infinite else "formal-conditional",
            "claim_reason": self.why_infinite or FIT_CONDITION,
            "epsilon": None if self.why_infinite else self.epsilon,
            "delta": self.delta,
            "releases_on_record": self.releases,
        }


def plan_gradients(
    config: PrivacyConfig, budget: SiloBudget, steps: int, num_examples: Mapping[str, int]
) -> tuple[SiloExamplePlan, Ledger]:
    """Plans DP-SGD in each silo alone: its noise, by its own budget, and a ledger that is charged with all steps.

    Guarantee: `steps` gradients of `privacy.mechanisms.dp_sgd` with the plan's mechanism are (epsilon, delta)-DP for
      the silo's examples under add/remove of one, with Poisson batches whatever batches trained silos had.
    Assumes: numbers of examples are public, as the configuration says.

    Args:
      config: batch size and clip norm.
      budget: of every silo, for this fit.
      steps: gradient steps.
      num_examples: by client id.

    Raises:
      ConfigError: numbers of examples are not public, a value is out of range, or delta is not below 1 / examples.
      BudgetError: no noise meets the budget.
    """
    _check_public(config)
    plan = build_silo_example_plan(
        dataclasses.replace(
            config,
            budgets={"epsilon": budget.epsilon, "delta": budget.delta},
            noise_multiplier=None,
            sampler="poisson",
        ),
        PlannedTraining(num_examples=num_examples, gradients_per_round=dict.fromkeys(num_examples, steps), rounds=1),
    )
    ledger = Ledger(plan.unit, plan.adjacency, plan.budgets)
    plan.charge_round(ledger, 1)
    return plan, ledger


def plan_selection(config: PrivacyConfig, budget: SiloBudget, num_examples: Mapping[str, int]) -> tuple[float, Ledger]:
    """Plans one private selection in each silo: its epsilon, at most the budget's, and a ledger charged with it.

    Guarantee: as `privacy.mechanisms.selection` says of one selection with this epsilon.

    Raises:
      ConfigError: as `plan_gradients`.
    """
    _check_public(config)
    for client_id, size in num_examples.items():
        check_delta(client_id, budget, size)
    # Selections are run with a float32, which must not be above what is charged.
    epsilon = float(np.float32(budget.epsilon))
    if epsilon > budget.epsilon:
        epsilon = float(np.nextafter(np.float32(budget.epsilon), np.float32(0)))
    ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, dict.fromkeys(num_examples, budget))
    for client_id in num_examples:
        ledger.append(client_id, ExponentialMechanismDpEvent(epsilon), 1, SELECTION)
    return epsilon, ledger


def put_on_record(output: Path, ledger: Ledger) -> dict[str, RecordedCost]:
    """Enters a fit into the record of an experiment's folder; when this returns, it outlasts a power cut.

    Call it before the fit: one that is stopped then counts, although nothing of it may have been seen.

    Guarantee: everything on record of a silo is jointly (epsilon, delta)-DP for its examples, as what is returned says:
      its fits and, where it was in training, every method's training.
    Assumes: a client id means the same silo in all of the folder; as `compose_worst_case`. Runs that were replaced are
      on record unless their noise followed from a fixed seed: those reveal what no figure covers.

    Args:
      output: the experiment's folder.
      ledger: of the fit.

    Returns:
      By client id, what is on record of each of the ledger's silos, this fit included.

    Raises:
      DataError: what is on record cannot be read; nothing was entered.
    """
    fit = Release(ledger)
    releases = [*all_releases(output), fit]
    costs = {client_id: _recorded_cost(releases, client_id) for client_id in ledger.budgets}
    enter(output, fit)
    return costs


def _recorded_cost(releases: Sequence[Release], client_id: str) -> RecordedCost:
    # A run without privacy has no scopes: it may have been about any silo.
    own = [release for release in releases if release.ledger is None or client_id in release.ledger.budgets]
    ledgers = [release.ledger for release in own if release.ledger is not None]
    delta = max(ledger.budgets[client_id].delta for ledger in ledgers)
    why_infinite = why_without_bound(own)
    if why_infinite:
        return RecordedCost(math.inf, delta, len(own), why_infinite)
    return RecordedCost(compose_worst_case(ledgers, client_id).best, delta, len(own))


def _check_public(config: PrivacyConfig) -> None:
    if parse_num_examples(config.num_examples) is not None:
        raise ConfigError(
            "privacy.num_examples says that numbers of examples are not public, while a new silo's noise would follow "
            "from its exact number. Prepare and train again with the silo among the others"
        )
