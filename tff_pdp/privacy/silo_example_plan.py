"""Silo-specific example-level DP as a plan: every silo protects its own examples, inside the silo."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import dp_accounting
import numpy as np

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import EpsilonBounds, poisson_gaussian_event
from tff_pdp.privacy.accounting.events import ExponentialMechanismDpEvent, hashable
from tff_pdp.privacy.accounting.ledger import Ledger
from tff_pdp.privacy.plans.plan import PrivacyPlan
from tff_pdp.privacy.plans.search import Search

Sampler = Literal["poisson", "paper_shuffled"]
# Reasons in the ledger.
GRADIENTS, SELECTION, SEARCH = "DP-SGD training", "private cluster selection", "private hyper-parameter search"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiloExamplePlan(PrivacyPlan):
    """Protects one example of one silo, all other silos held fixed.

    Guarantee: with claim `formal` or `formal-conditional`, everything that leaves silo k, and its personal model, is
      (epsilon_k, delta_k)-DP for its own training examples, where the ledger built here bounds epsilon_k.
    Assumes: what `claim_reason` says.

    Attributes:
      mechanisms: by client id.
      num_examples: by client id, the number of training examples that mechanisms were planned for; see
        `num_examples_are_noised`.
      gradients_per_round: by client id, gradient computations on local data in one round: local steps times data
        passes.
      last_rounds: by client id, the last round it takes part in; a function of parameters only.
      selection_rounds: how many rounds, from the first, a client selects a cluster in.
      selection_epsilons: by client id, of each of these selections, and on the grid of float32; empty without privacy,
        where selections are exact up to ties.
      sampler: how batches are drawn.
      num_examples_are_noised: whether numbers of examples were released with noise; otherwise they are public.
      search: what every silo repeats to choose hyper-parameters, where it does.
    """

    mechanisms: Mapping[str, SiloMechanism]
    num_examples: Mapping[str, int]
    gradients_per_round: Mapping[str, int]
    last_rounds: Mapping[str, int]
    selection_rounds: int = 0
    selection_epsilons: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sampler: Sampler = "poisson"
    num_examples_are_noised: bool = False
    search: Search | None = None

    def scope_of(self, client_id: str) -> str:
        """A silo is a scope of its own."""
        return client_id

    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], np.random.Generator]
    ) -> np.ndarray:
        """Every silo whose budget is not spent yet."""
        del generator
        return np.flatnonzero([self.takes_part(client_id, round_number) for client_id in client_ids])

    def client_mechanism(self, client_ids: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Every silo's `SiloMechanism`, field by field."""
        return {
            field.name: np.array([getattr(self.mechanisms[client_id], field.name) for client_id in client_ids])
            for field in dataclasses.fields(SiloMechanism)
        }

    def guaranteed_epsilon(self, ledger: Ledger, client_id: str) -> EpsilonBounds:
        """The epsilon that may be claimed of a silo: what is spent.

        Where numbers of examples are releases, what follows depends on what came out, and what is spent with the one
        number says nothing of the others: only the budget, kept for each of them, holds.
        """
        if self.num_examples_are_noised:
            return EpsilonBounds(rdp=None, pld=None, best=self.budgets[client_id].epsilon)
        return super().guaranteed_epsilon(ledger, client_id)

    def gradient_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        return poisson_gaussian_event(mechanism.sampling_rate, mechanism.noise_multiplier, 1)

    def selection_event(self, client_id: str) -> dp_accounting.DpEvent:
        """The event of one private selection in a silo."""
        return ExponentialMechanismDpEvent(self.selection_epsilons[client_id])

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

    def training_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        """All gradients and selections up to a silo's last round."""
        rounds = self.last_rounds[client_id]
        counts = Counter({self.gradient_event(client_id): rounds * self.gradients_per_round[client_id]})
        if self.selection_rounds:
            counts[self.selection_event(client_id)] = min(rounds, self.selection_rounds)
        return counts

    def planned_counts(self, client_id: str) -> Counter[dp_accounting.DpEvent]:
        """The search, where there is one, and the training, unless the search goes without."""
        if self.search is None:
            return self.training_counts(client_id)
        planned = Counter({self.search_event(client_id): 1})
        if self.search.has_pivot:
            planned.update(self.training_counts(client_id))
        return planned

    def charges(self, client_id: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        """Gradients and, in the first rounds, a selection; nothing once a silo has left."""
        if not self.takes_part(client_id, round_number):
            return []
        charges = [(self.gradient_event(client_id), self.gradients_per_round[client_id], GRADIENTS)]
        if round_number <= self.selection_rounds:
            charges.append((self.selection_event(client_id), 1, SELECTION))
        return charges
