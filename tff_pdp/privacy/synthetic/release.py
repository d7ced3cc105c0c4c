"""Makes synthetic examples within a budget, and states the guarantee in plain data."""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np

from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds, solve_noise_multiplier
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import event_to_dict
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.facts import GUARANTEES
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples
from tff_pdp.privacy.synthetic.silo_data import SYNTHETIC
from tff_pdp.settings import to_plain

FORMAT_VERSION = 1


class PlannedRelease(NamedTuple):
    """A release that has not been made yet. Nothing in it depends on records.

    Attributes:
      generator: the generator and its public settings.
      budget: most that the release may cost.
      noise_multiplier: the least noise that keeps the cost within the budget.

    A generator that guarantees nothing (`Generator.why_not_private`) has a release without privacy: an infinite cost.
    """

    generator: Generator
    budget: SiloBudget
    noise_multiplier: float

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The event of the release, as ledgers record the release."""
        if self.generator.why_not_private:
            return dp_accounting.NonPrivateDpEvent()
        return self.generator.event(self.noise_multiplier)

    @property
    def epsilon(self) -> float:
        """The cost at the budget's delta."""
        return epsilon_bounds(self.event, self.budget.delta).best

    def ledger(self, silo: str) -> Ledger:
        """Returns a ledger of the silo that holds the release; without a guarantee, the silo has an infinite budget."""
        budget = SiloBudget(math.inf, self.budget.delta) if self.generator.why_not_private else self.budget
        ledger = Ledger("silo_example", Adjacency.ADD_OR_REMOVE_ONE, {silo: budget})
        ledger.append(silo, self.event, 1, SYNTHETIC)
        return ledger

    def make(self, x: np.ndarray, y: np.ndarray, *, ids: Sequence[str] | None = None) -> SyntheticExamples:
        """Makes the synthetic examples, with noise from the operating system's entropy; call this once.

        Guarantee: the result is (`epsilon`, `budget.delta`)-DP under adding or removing one record; nothing is
          guaranteed if `epsilon` is infinite.
        Assumes: as in `Generator.fit`; the operating system's entropy is secret.

        Args, Raises: as in `Generator.fit`.
        """
        return self.generator.fit(x, y, self.noise_multiplier, ExactDraws(os.urandom(32)), ids=ids)


def plan_release(generator: Generator, epsilon: float, delta: float) -> PlannedRelease:
    """Finds the least noise with which a generator's release stays within (epsilon, delta).

    Raises:
      ConfigError: the budget is out of range, or its noise leaves nothing to learn (`Generator.check_noise`).
      BudgetError: no noise meets the budget.
    """
    noise = solve_noise_multiplier(generator.event, epsilon, delta)
    generator.check_noise(noise)
    return PlannedRelease(generator, SiloBudget(epsilon, delta), noise)


def statement(planned: PlannedRelease, public: Sequence[str], unit: str) -> dict[str, Any]:
    """States the guarantee of a release, as plain data for JSON. Nothing in it depends on records.

    If the generator has a reason why nothing can be claimed, the claim is `none`, without epsilon and delta.

    Args:
      planned: the release.
      public: what is treated as public, one clause each.
      unit: what one record is.
    """
    claim, reason = planned.generator.claim
    is_covered = claim in GUARANTEES
    return {
        "format_version": FORMAT_VERSION,
        "claim": claim,
        "claim_reason": reason,
        "unit": unit,
        "adjacency": Adjacency.ADD_OR_REMOVE_ONE.value,
        "adjacency_words": f"{unit} is present or absent; replacing it is a removal and an addition, and costs more",
        "protected_from": "everyone who sees the synthetic data, this statement, or anything made from them"
        if is_covered
        else "nobody, as nothing is claimed",
        "epsilon": planned.epsilon if is_covered else None,
        "delta": planned.budget.delta if is_covered else None,
        "epsilon_target": planned.budget.epsilon,
        "noise_multiplier": planned.noise_multiplier,
        "event": event_to_dict(planned.event),
        "generator": to_plain(planned.generator),
        "public": list(public),
        "not_protected": [
            f"several records of one person: the guarantee is for {unit}",
            "what holds for the whole population, and so for a person whether recorded or not",
            "records of which something else is released: costs add up",
        ],
    }
