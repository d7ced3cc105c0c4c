"""The privacy plan: the one value that couples unit, adjacency, sampler, clip, noise and the accounting event.

Builders such as those of `tff_pdp.privacy.silo_example_plan` make it from a `PlannedTraining`. The runtime takes its
sampler and its noise from the plan, and the ledger takes its events from the same plan, so what runs and what is
accounted cannot drift apart.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import dp_accounting

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accountants import Adjacency, EpsilonBounds, poisson_gaussian_event
from tff_pdp.privacy.budgets import SiloBudget
from tff_pdp.privacy.dp_events import ExponentialMechanismDpEvent, hashable
from tff_pdp.privacy.ledger import Ledger
from tff_pdp.privacy.search_plan import Search

Claim = Literal["formal", "formal-conditional", "empirical", "none"]
Sampler = Literal["poisson", "paper_shuffled"]
# Reasons in the ledger.
GRADIENTS, SELECTION, SEARCH = "DP-SGD training", "private cluster selection", "private hyper-parameter search"
# What a silo releases once, before training, and what for.
FixedEvents = tuple[tuple[dp_accounting.DpEvent, str], ...]


@dataclasses.dataclass(frozen=True)
class SiloMechanism:
    """The public parameters of one silo's DP-SGD, as the computation and the accountant both use them.

    The rate is a multiple of 2**-23 and the noise multiplier a float32, the grids on which they are computed with.

    Attributes:
      clip_norm: L2 bound C on each example's gradient.
      noise_multiplier: z, standard deviation of the noise on the sum over C.
      sampling_rate: q, the probability that an example is in a batch.
      expected_batch_size: the constant the noised sum is divided by.
    """

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    expected_batch_size: float


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """What a plan is made for, all of it known before training.

    Attributes:
      num_examples: number n_k of training examples by client id, public or released with noise.
      gradients_per_round: by client id, gradient computations on local data in one round.
      rounds: planned rounds.
      selection_rounds: how many of them, from the first, select a cluster.
      fixed_events: by client id, what was released before training and has to fit into the budget as well.
      num_examples_are_noised: whether the n_k are a release that `fixed_events` covers.
      unsound: why nothing is claimed whatever the ledger says, if so.
      search: what every silo repeats besides, with the same noise, to choose hyper-parameters.
    """

    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    rounds: int
    selection_rounds: int = 0
    fixed_events: Mapping[str, FixedEvents] = dataclasses.field(default_factory=dict)
    num_examples_are_noised: bool = False
    unsound: str = ""
    search: Search | None = None


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """Who is protected from whom, by which mechanism, at what cost.

    Guarantee: with claim `formal` or `formal-conditional`, everything that leaves silo k, and its personal model, is
      (epsilon_k, delta_k)-DP for its own training examples, where the ledger built here bounds epsilon_k.
    Assumes: what `claim_reason` says.

    Attributes:
      unit: what the guarantee protects; `silo_example` is one record of one silo, all other silos held fixed.
      adjacency: how neighbouring data sets differ.
      claim: strength of the guarantee.
      claim_reason: one line that says why it is no weaker and no stronger.
      mechanisms: by client id.
      budgets: by client id; empty without privacy.
      num_examples: by client id, the number of training examples that mechanisms were planned for; see
        `num_examples_are_noised`.
      gradients_per_round: by client id, gradient computations on local data in one round: local steps times data
        passes.
      rounds: planned number of rounds, for which the noise was calibrated.
      last_rounds: by client id, the last round it takes part in; a function of parameters only.
      selection_rounds: how many rounds, from the first, a client selects a cluster in.
      selection_epsilons: by client id, of each of these selections, and on the grid of float32; empty without privacy,
        where selections are exact up to ties.
      fixed_events: by client id, what it releases before training.
      sampler: how batches are drawn.
      num_examples_are_noised: whether numbers of examples were released with noise; otherwise they are public.
      search: what every silo repeats to choose hyper-parameters, where it does.
    """

    unit: str
    adjacency: Adjacency
    claim: Claim
    claim_reason: str
    mechanisms: Mapping[str, SiloMechanism]
    budgets: Mapping[str, SiloBudget]
    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    rounds: int
    last_rounds: Mapping[str, int]
    selection_rounds: int = 0
    selection_epsilons: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fixed_events: Mapping[str, FixedEvents] = dataclasses.field(default_factory=dict)
    sampler: Sampler = "poisson"
    num_examples_are_noised: bool = False
    search: Search | None = None

    def build_ledger(self) -> Ledger | None:
        """Returns a ledger with these budgets and what is released before training; None without budgets.

        Raises:
          BudgetError: the planned rounds would overspend a silo's budget.
        """
        if not self.budgets:
            return None
        ledger = Ledger(self.unit, self.adjacency, self.budgets)
        self.precheck_rest(ledger)
        for client_id in self.budgets:
            for event, reason in self.fixed_events.get(client_id, ()):
                ledger.append(client_id, event, 1, reason)
        return ledger

    def precheck_rest(self, ledger: Ledger) -> None:
        """Checks that what is left of the plan fits into the budgets; entering it then takes no more accounting.

        Raises:
          BudgetError: it does not.
        """
        recorded: Counter[tuple[str, dp_accounting.DpEvent]] = Counter()
        for entry in ledger.entries:
            recorded[entry.scope, entry.event] += entry.count
        for client_id in self.budgets:
            planned: Counter[dp_accounting.DpEvent] = Counter()
            for event, _ in self.fixed_events.get(client_id, ()):
                planned[hashable(event)] += 1
            if self.search is not None:
                planned[self.search_event(client_id)] += 1
            if self.search is None or self.search.has_pivot:
                planned.update(self._training_counts(client_id))
            # All together: each alone would fit where their sum does not.
            ledger.precheck_all(
                client_id, {event: max(0, count - recorded[client_id, event]) for event, count in planned.items()}
            )

    def guaranteed_epsilon(self, ledger: Ledger, client_id: str) -> EpsilonBounds:
        """The epsilon that may be claimed of a silo: what is spent.

        Where numbers of examples are releases, what follows depends on what came out, and what is spent with the one
        number says nothing of the others: only the budget, kept for each of them, holds.
        """
        if self.num_examples_are_noised:
            return EpsilonBounds(rdp=None, pld=None, best=self.budgets[client_id].epsilon)
        return ledger.epsilon(client_id)

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        return poisson_gaussian_event(mechanism.sampling_rate, mechanism.noise_multiplier, 1)

    def selection_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one private selection in a silo."""
        return ExponentialMechanismDpEvent(self.selection_epsilons[client_id])

    def training_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of a silo's part in one whole training."""
        counts = self._training_counts(client_id)
        return dp_accounting.ComposedDpEvent(
            [dp_accounting.SelfComposedDpEvent(event, count) for event, count in counts.items()]
        )

    def search_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of all that a silo repeats in a search.

        Raises:
          ConfigError: the plan has no search.
        """
        if self.search is None:
            raise ConfigError("This plan has no search for hyper-parameters.")
        return hashable(self.search.event(self.training_event(client_id)))

    def selection_epsilon(self, client_id: str, round_number: int) -> float:
        """What a silo's selection in a round is run with: 0 for none, infinite for an exact one."""
        if round_number > self.selection_rounds:
            return 0.0
        return self.selection_epsilons.get(client_id, math.inf)

    def takes_part(self, client_id: str, round_number: int) -> bool:
        """Whether a silo takes part in a round, counted from 1; known before training."""
        return round_number <= self.last_rounds[client_id]

    def charge_round(self, ledger: Ledger, round_number: int) -> None:
        """Enters one round for every silo that takes part, before it runs.

        Raises:
          BudgetError: a silo would overspend, or the plan has no such round; nothing has been entered for any silo.
        """
        if not 1 <= round_number <= self.rounds:
            raise BudgetError(
                f"Round {round_number} would overspend: the plan, and its noise, are for {self.rounds} rounds. "
                "The step was not run."
            )
        charges = {
            client_id: self._charges(client_id, round_number)
            for client_id in self.budgets
            if self.takes_part(client_id, round_number)
        }
        for client_id, events in charges.items():
            ledger.precheck_all(client_id, {event: count for event, count, _ in events})
        for client_id, events in charges.items():
            for event, count, reason in events:
                ledger.append(client_id, event, count, reason)

    def charge_search(self, ledger: Ledger) -> None:
        """Enters a search for every silo, the pivot run's rounds included, before any of it runs.

        Raises:
          BudgetError: a silo would overspend.
          ConfigError: the plan has no search.
        """
        for client_id in self.budgets:
            ledger.append(client_id, self.search_event(client_id), 1, SEARCH)
        for round_number in range(1, self.rounds + 1):
            if self.search and self.search.has_pivot:
                self.charge_round(ledger, round_number)

    def _training_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        rounds = self.last_rounds[client_id]
        counts = Counter({self.gradient_event(client_id): rounds * self.gradients_per_round[client_id]})
        if self.selection_rounds:
            counts[self.selection_event(client_id)] = min(rounds, self.selection_rounds)
        return counts

    def _charges(self, client_id: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        charges = [(self.gradient_event(client_id), self.gradients_per_round[client_id], GRADIENTS)]
        if round_number <= self.selection_rounds:
            charges.append((self.selection_event(client_id), 1, SELECTION))
        return charges
