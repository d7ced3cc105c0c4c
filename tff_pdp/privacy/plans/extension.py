"""Describes the rounds of a run that ended, for a plan of further rounds with the rest of each budget."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import dp_accounting

from tff_pdp.errors import BudgetError
from tff_pdp.privacy.accounting.accountants import Adjacency, epsilon_bounds
from tff_pdp.privacy.accounting.budgets import SiloBudget
from tff_pdp.privacy.accounting.events import hashable
from tff_pdp.privacy.accounting.ledger import Ledger

# Further rounds with more noise than that, in multiples of the noise so far, learn nothing: a budget counts as spent.
MOST_NOISE = 10.0
CONDITION = "the number of rounds that were added, and their budget, are taken not to depend on results"


@dataclasses.dataclass(frozen=True)
class EarlierRounds:
    """The rounds of a run that ended before further rounds were planned.

    Attributes:
      rounds: number of rounds that the run had made.
      ledger_text: text of the ledger of the rounds, as `Ledger.to_json` returns it; None without privacy.
      salt: number that distinguishes the further rounds from all others, as text.
    """

    rounds: int
    ledger_text: str | None
    salt: str = ""

    def __reduce__(self):
        # Without the ledger that was read from the text: equal objects have equal pickles.
        return EarlierRounds, (self.rounds, self.ledger_text, self.salt)

    @functools.cached_property
    def ledger(self) -> Ledger | None:
        """The ledger of the rounds; None without privacy."""
        return None if self.ledger_text is None else Ledger.from_json(self.ledger_text)

    def counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Counts all releases about a scope so far, by event."""
        found: Counter[dp_accounting.DpEvent] = Counter()
        for entry in self.ledger.entries if self.ledger else ():
            if entry.scope == scope:
                found[hashable(entry.event)] += entry.count
        return found

    def events(self, scope: str) -> list[dp_accounting.DpEvent]:
        """Lists all releases about a scope so far, releases with the same event as one event."""
        return [dp_accounting.SelfComposedDpEvent(event, count) for event, count in self.counts(scope).items()]

    def gradients(self, scope: str, reason: str) -> list[tuple[float, int]]:
        """Lists noise multipliers of a scope's gradients so far, each with the number of gradients; the newest last.

        `reason` is the purpose of gradients in the ledger.
        """
        entries = self.ledger.entries if self.ledger else ()
        own = [entry for entry in entries if entry.scope == scope and entry.reason == reason]
        return [(noise_multiplier_of(entry.event), entry.count) for entry in own]


def noise_multiplier_of(event: dp_accounting.DpEvent) -> float:
    """Returns the noise multiplier of one gradient's event: a Gaussian, of a sample or not; 0 without noise."""
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return noise_multiplier_of(event.event)
    return float(event.noise_multiplier) if isinstance(event, dp_accounting.GaussianDpEvent) else 0.0


@dataclasses.dataclass(frozen=True)
class FurtherRounds:
    """The further rounds of one silo.

    Attributes:
      client_id: id of the silo.
      budget: the silo's budget.
      noise_multiplier: noise multiplier that the rest of the budget allows; infinite if it allows none.
      noise_so_far: noise multiplier of the silo's newest gradients.
      same: events of the further rounds if they had the noise of the newest rounds.
    """

    client_id: str
    budget: SiloBudget
    noise_multiplier: float
    noise_so_far: float
    same: Sequence[dp_accounting.DpEvent]


def check_rest(earlier: EarlierRounds, silos: Sequence[FurtherRounds], rounds: int, adjacency: Adjacency) -> None:
    """Checks that the rest of every silo's budget allows further rounds from which something can be learnt.

    `rounds` is the number of further rounds.

    Raises:
      BudgetError: for a silo nothing is left. The message states what was spent, and what further rounds would cost
        with the noise of the newest rounds.
    """
    empty = [
        silo
        for silo in silos
        if math.isinf(silo.noise_multiplier) or silo.noise_multiplier > MOST_NOISE * silo.noise_so_far
    ]
    if not empty or earlier.ledger is None:
        return
    silo = empty[0]
    spent = earlier.ledger.epsilon(silo.client_id).best
    needed = [_epsilon_with(earlier, one, adjacency) for one in silos if math.isfinite(one.budget.epsilon)]
    would_be = (
        "cannot be paid at all"
        if math.isinf(silo.noise_multiplier)
        else f"would need noise multiplier {silo.noise_multiplier:.4g} in place of {silo.noise_so_far:.4g}"
    )
    raise BudgetError(
        f"Nothing is left of the budget: in {earlier.rounds} rounds, silo {silo.client_id!r} has spent {spent:.6g} of "
        f"epsilon {silo.budget.epsilon:g} at delta {silo.budget.delta:g}, so that {rounds} more rounds {would_be} "
        f"(silos concerned: {len(empty)} of {len(silos)}). With the noise so far, {rounds} more rounds need epsilon "
        f"{min(needed):.4g} to {max(needed):.4g}: to allow that, raise privacy.budgets. Or keep the run as it is"
    )


def _epsilon_with(earlier: EarlierRounds, silo: FurtherRounds, adjacency: Adjacency) -> float:
    everything = dp_accounting.ComposedDpEvent([*earlier.events(silo.client_id), *silo.same])
    return epsilon_bounds(everything, silo.budget.delta, adjacency).best


def with_budgets(ledger: Ledger, budgets: Mapping[str, SiloBudget]) -> Ledger:
    """Copies a ledger under other budgets; releases that were made are not judged again."""
    copy = Ledger.from_json(ledger.to_json())
    copy.budgets.update(budgets)
    return copy
