"""Replaces epsilons that a published formula states for its noise by the true epsilons of that noise.

The formula's epsilons are called labels: they are no guarantee. Ledgers and budgets have the true epsilons.
"""

import decimal
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import dp_accounting

from tff_pdp.errors import BudgetError
from tff_pdp.privacy.accounting.accountants import epsilon_bounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.kept import side_by_side

if TYPE_CHECKING:
    from tff_pdp.privacy.plans.silo_example import SiloExamplePlan

# Digits to which true epsilons are rounded up: the last bits of an accountant's result differ between machines.
_DIGITS = 4
_MARGIN = 1e-4
# The most pairs of label and true epsilon that a warning lists.
_MOST_LISTED = 6


def with_true_budgets(plan: "SiloExamplePlan", own: "SiloExamplePlan") -> "SiloExamplePlan":
    """Returns a plan with each silo's budgets as labels, and with the true epsilon of the planned training as budget.

    Guarantee: all planned releases of silo k are (epsilon_k, delta_k)-DP, where epsilon_k is the silo's new budget.
    Assumes: as in `accountants.epsilon_bounds`; the noise is a function of public parameters.

    Args:
      plan: the plan that is run.
      own: the plan whose true epsilons become budgets, with at most as much noise in each silo.

    Raises:
      BudgetError: no finite epsilon holds for a silo's noise.
    """
    calls = [
        functools.partial(epsilon_bounds, _event(own.all_counts(client_id)), budget.delta, own.adjacency)
        for client_id, budget in own.budgets.items()
    ]
    budgets = {}
    for (client_id, label), bounds in zip(own.budgets.items(), side_by_side(calls), strict=True):
        if math.isinf(bounds.best) and not math.isinf(label.epsilon):
            ideal = epsilon_bounds(_event(own.training_counts(client_id)), label.delta, own.adjacency).best
            raise BudgetError(
                f"silo {client_id!r}: the noise that privacy.noise_calibration paper_asymptotic chooses for epsilon "
                f"{label.epsilon:g} has a true epsilon of {ideal:.3g}, too large for any claim: lower the epsilon, or "
                "train with larger batches or fewer steps"
            )
        budgets[client_id] = SiloBudget(_round_up(bounds.best), label.delta)
    return replace(plan, budgets=budgets, labels={client_id: one.epsilon for client_id, one in own.budgets.items()})


def label_warning(labels: Mapping[str, float], budgets: Mapping[str, SiloBudget]) -> str:
    """Returns a warning that labels are no epsilons, with the true epsilons; empty without finite labels."""
    pairs = Counter((label, budgets[client_id].epsilon) for client_id, label in labels.items() if math.isfinite(label))
    if not pairs:
        return ""
    listed = [
        f"{label:g} is truly {true:g} ({number} {'silo' if number == 1 else 'silos'})"
        for (label, true), number in sorted(pairs.items())[:_MOST_LISTED]
    ]
    more = f", and {len(pairs) - _MOST_LISTED} more" if len(pairs) > _MOST_LISTED else ""
    return (
        "the epsilons of privacy.budgets are labels of an asymptotic formula (paper_asymptotic), not guarantees; the "
        f"ledger has the true epsilons: {', '.join(listed)}{more}"
    )


def _event(counts: Counter[dp_accounting.DpEvent]) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event, count) for event, count in counts.items()]
    )


def _round_up(epsilon: float) -> float:
    """Rounds up to a few digits, with a margin, so that the ledger never finds a planned release over the budget."""
    if math.isinf(epsilon):
        return epsilon
    context = decimal.Context(prec=_DIGITS, rounding=decimal.ROUND_CEILING)
    return float(context.create_decimal_from_float(epsilon * (1 + _MARGIN)))
