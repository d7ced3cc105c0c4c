"""Sums up what was ever spent on an experiment's records: the ledgers of its runs, those of replaced runs included.

It says what a run cost, what all runs on record cost together, and what tuning would have cost.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tff_pdp.experiment.config import ExperimentConfig
from tff_pdp.experiment.method import Method
from tff_pdp.privacy.accounting.accountants import EpsilonBounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.ledger import compose_worst_case
from tff_pdp.training.checkpoint import Checkpoint
from tff_pdp.training.record.releases import all_releases, why_without_bound

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
    ledgers = [release.ledger for release in releases if release.ledger is not None]
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
        "recorded_runs": len(releases),
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
