"""Says in reports' terms what a run cost, what all runs on record cost together, and what tuning would have cost."""

import math
from collections.abc import Sequence
from typing import Any

from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.accounting.accountants import EpsilonBounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import compose_worst_case
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.counted import cost_of_all_runs, splits_of

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


def recorded_costs(config: ExperimentConfig, trained: Sequence[Trained]) -> dict[str, Any]:
    """What a privacy statement is told of all runs on record: the largest epsilon of a scope, delta, how many runs.

    Args:
      config: the experiment.
      trained: the methods that are reported on; where one has no ledger, nothing is known of their union.
    """
    if not all(state.ledger for _, state in trained):
        return {"composed_epsilon": None, "composed_delta": None, "recorded_runs": None}
    # All of an experiment's methods are about the same clients; a search reads more of their examples.
    methods = {splits_of(method): method for method, _ in trained}
    costs = [cost_of_all_runs(config, method) for method in methods.values()]
    cost = max(costs, key=lambda one: (one.worst.why_no_bound != "", one.worst.epsilon, one.runs))
    return {
        "composed_epsilon": cost.worst.epsilon,
        "composed_delta": cost.worst.delta,
        "recorded_runs": cost.runs,
        "why_no_bound": cost.worst.why_no_bound,
        "elsewhere": cost.elsewhere,
        "taken_for_granted": cost.notes,
    }


def epsilon_if_charged(config: ExperimentConfig, trained: Sequence[Trained], scope: str) -> float | None:
    """What a scope would have spent, had every configuration tried been a release; None where that says nothing."""
    tried = config.tuning.configurations_tried
    ledgers = [state.ledger for _, state in trained if state.ledger]
    if tried < 2 or not ledgers:
        return None
    costliest = max(ledgers, key=lambda ledger: ledger.epsilon(scope).best)
    return compose_worst_case([costliest] * tried, scope).best
