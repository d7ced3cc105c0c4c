"""What fitting new silos costs them: the mechanism a budget asks for, on record before anything is computed with it.

The record is the one of `tff_pdp.runtime.releases`: whoever sums up what was released of a silo finds these fits there.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tff_pdp.config import PrivacyConfig
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accountants import Adjacency
from tff_pdp.privacy.budgets import SiloBudget
from tff_pdp.privacy.dp_events import ExponentialMechanismDpEvent
from tff_pdp.privacy.ledger import Ledger, compose_worst_case
from tff_pdp.privacy.plan import PlannedTraining
from tff_pdp.privacy.silo_example_builder import build_silo_example_plan, check_delta
from tff_pdp.privacy.silo_example_plan import SELECTION, SiloExamplePlan
from tff_pdp.privacy.silo_statistics import parse_num_examples
from tff_pdp.runtime.releases import EARLIER, PERSONALIZE, all_ledgers


@dataclasses.dataclass(frozen=True)
class RecordedCost:
    """What is on record of a silo.

    Attributes:
      epsilon: of everything together, at `delta`; infinite where earlier runs protected something else.
      delta: the largest of the budgets.
      releases: how many runs and fits there are on record.
    """

    epsilon: float
    delta: float
    releases: int


def plan_gradients(
    config: PrivacyConfig, budget: SiloBudget, steps: int, num_examples: Mapping[str, int]
) -> tuple[SiloExamplePlan, Ledger]:
    """Plans DP-SGD in each silo alone: its noise, by its own budget, and a ledger that is charged with all steps.

    Guarantee: `steps` gradients of `privacy.dp_sgd` with the plan's mechanism are (epsilon, delta)-DP for the silo's
      examples under add/remove of one, with Poisson batches whatever batches trained silos had.
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

    Guarantee: as `privacy.selection` says of one selection with this epsilon.

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


def put_on_record(output: Path, ledger: Ledger) -> None:
    """Enters a fit into the record of an experiment's folder; when this returns, it outlasts a power cut.

    Call it before the fit: one that is stopped then counts, although nothing of it may have been seen.
    """
    entry = {"run": PERSONALIZE, "rounds": 1, "ledger": ledger.to_json()}
    with open(output / EARLIER, "a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def recorded_cost_of(output: Path, client_ids: Sequence[str]) -> dict[str, RecordedCost]:
    """What is on record of each silo: its fits and, where it was in training, every method's training.

    Guarantee: everything recorded of the silo is jointly (epsilon, delta)-DP for its examples.
    Assumes: a client id means the same silo in all of the folder; as `compose_worst_case`.
    """
    ledgers = all_ledgers(output)
    found = {}
    for client_id in client_ids:
        own = [ledger for ledger in ledgers if client_id in ledger.budgets]
        delta = max(ledger.budgets[client_id].delta for ledger in own)
        is_one_kind = len({(ledger.unit, ledger.adjacency) for ledger in own}) == 1
        epsilon = compose_worst_case(own, client_id).best if is_one_kind else math.inf
        found[client_id] = RecordedCost(epsilon, delta, len(own))
    return found


def _check_public(config: PrivacyConfig) -> None:
    if parse_num_examples(config.num_examples) is not None:
        raise ConfigError(
            "privacy.num_examples says that numbers of examples are not public, while a new silo's noise would follow "
            "from its exact number. Prepare and train again with the silo among the others"
        )
