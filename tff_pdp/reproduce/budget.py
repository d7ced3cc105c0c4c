"""Names a job's budget: one epsilon for all clients, or named budgets, which differ between silos."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tff_pdp.reports.words import plain

# Epsilon of every silo or of all users, infinite for no privacy; or a name in a setting's `budgets`.
Budget = float | str

_INFINITE = "inf"


def to_entry(budget: Budget) -> dict[str, float | str]:
    """Returns a budget as an entry of a result row: `budgets` for a name, otherwise `epsilon`.

    >>> [to_entry(budget) for budget in (6.0, math.inf, "mix_gauss_1")]
    [{'epsilon': 6.0}, {'epsilon': 'inf'}, {'budgets': 'mix_gauss_1'}]
    """
    if isinstance(budget, str):
        return {"budgets": budget}
    return {"epsilon": budget if math.isfinite(budget) else _INFINITE}


def from_entry(row: Mapping[str, Any]) -> Budget:
    """Returns the budget of a row that has an entry from `to_entry`."""
    return str(row["budgets"]) if "budgets" in row else float(row["epsilon"])


def epsilon_of(budget: Budget) -> float:
    """Returns a budget's epsilon; NaN for named budgets, which have one epsilon for each silo."""
    return math.nan if isinstance(budget, str) else budget


def budget_text(budget: Budget) -> str:
    """Writes a budget for a sentence or a title.

    >>> budget_text(0.5), budget_text("mix_gauss_1")
    ('ε = 0.5', 'budgets mix_gauss_1')
    """
    return f"budgets {budget}" if isinstance(budget, str) else f"ε = {plain(budget)}"


def in_order(budgets: Iterable[Budget]) -> list[Budget]:
    """Returns each budget once: epsilons by size, then names in the order in which they first occur.

    >>> in_order([6.0, "mixed", "listed", 1.0, "mixed"])
    [1.0, 6.0, 'mixed', 'listed']
    """
    found = list(dict.fromkeys(budgets))
    epsilons = sorted(budget for budget in found if not isinstance(budget, str))
    return [*epsilons, *(budget for budget in found if isinstance(budget, str))]
