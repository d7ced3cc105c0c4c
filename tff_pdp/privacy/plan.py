"""The privacy plan: the one place that couples unit, adjacency, sampler, clip, noise and the accounting event.

The runtime takes its sampler and its noise from the plan, and the ledger takes its events from the same plan, so what
runs and what is accounted cannot drift apart.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from tff_pdp.config import PrivacyConfig
from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.accountants import Adjacency, calibrate_noise_multiplier, poisson_gaussian_event
from tff_pdp.privacy.budgets import SiloBudget, parse_budgets
from tff_pdp.privacy.ledger import Ledger

Claim = Literal["formal", "formal-conditional", "empirical", "none"]


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
class PrivacyPlan:
    """Who is protected from whom, by which mechanism, at what cost.

    Guarantee: with claim `formal` or `formal-conditional`, everything that leaves silo k, and its personal model, is
      (epsilon_k, delta_k)-DP for its own records, where the ledger built here bounds epsilon_k.
    Assumes: what `claim_reason` says.

    Attributes:
      unit: what the guarantee protects; `silo_example` is one record of one silo, all other silos held fixed.
      adjacency: how neighbouring data sets differ.
      claim: strength of the guarantee.
      claim_reason: one line that says why it is no weaker and no stronger.
      mechanisms: by client id.
      budgets: by client id; empty without privacy.
      gradients_per_round: gradient computations on local data in one round: local steps times data passes.
      rounds: planned number of rounds, for which the noise was calibrated.
    """

    unit: str
    adjacency: Adjacency
    claim: Claim
    claim_reason: str
    mechanisms: Mapping[str, SiloMechanism]
    budgets: Mapping[str, SiloBudget]
    gradients_per_round: int
    rounds: int

    def build_ledger(self) -> Ledger | None:
        """Returns an empty ledger with these budgets, after checking that the whole plan fits; None without privacy.

        Raises:
          BudgetError: the planned rounds would overspend a silo's budget.
        """
        if self.claim == "none":
            return None
        ledger = Ledger(self.unit, self.adjacency, self.budgets)
        for client_id in self.budgets:
            ledger.precheck(client_id, self.gradient_event(client_id), self.rounds * self.gradients_per_round)
        return ledger

    def gradient_event(self, client_id: str):
        """The event of one gradient computation in a silo."""
        mechanism = self.mechanisms[client_id]
        return poisson_gaussian_event(mechanism.sampling_rate, mechanism.noise_multiplier, 1)

    def charge_round(self, ledger: Ledger) -> None:
        """Enters one round for every silo, before it runs.

        Raises:
          BudgetError: a silo would overspend; nothing has been entered for any silo.
        """
        for client_id in self.budgets:
            ledger.precheck(client_id, self.gradient_event(client_id), self.gradients_per_round)
        for client_id in self.budgets:
            ledger.append(client_id, self.gradient_event(client_id), self.gradients_per_round, "DP-SGD training")


def build_silo_example_plan(
    config: PrivacyConfig, num_examples: Mapping[str, int], *, gradients_per_round: int, rounds: int
) -> PrivacyPlan:
    """Builds silo-specific example-level DP: Poisson DP-SGD in each silo, calibrated to that silo's own budget.

    Args:
      config: budgets, clip norm and expected batch size B; the sampling rate of silo k is `min(1, B / n_k)`.
      num_examples: public number n_k of training examples by client id.
      gradients_per_round: gradient computations on local data in one round.
      rounds: planned rounds.

    Raises:
      ConfigError: a budget is missing or malformed.
      BudgetError: a silo's budget cannot be met.
    """
    if not 0 < config.clip_norm < math.inf:
        raise ConfigError(f"privacy.clip_norm must be positive and finite, not {config.clip_norm}")
    budgets = parse_budgets(config.budgets, sorted(num_examples))
    mechanisms = {}
    for client_id, budget in budgets.items():
        size = num_examples[client_id]
        sampling_rate = _sampling_rate(config.batch_size, size)
        if budget.delta >= 1 / size:
            raise ConfigError(
                f"privacy.budgets: delta {budget.delta:g} of silo {client_id!r} is not below 1 / {size}, its number of "
                "training examples: publishing one record at random would pass"
            )
        mechanisms[client_id] = SiloMechanism(
            clip_norm=config.clip_norm,
            noise_multiplier=_calibrate(client_id, budget, sampling_rate, rounds * gradients_per_round),
            sampling_rate=sampling_rate,
            expected_batch_size=sampling_rate * size,
        )
    return PrivacyPlan(
        unit="silo_example",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="formal-conditional",
        claim_reason="the number of training examples of each silo is treated as public",
        mechanisms=mechanisms,
        budgets=budgets,
        gradients_per_round=gradients_per_round,
        rounds=rounds,
    )


def build_no_privacy_plan(
    config: PrivacyConfig, num_examples: Mapping[str, int], *, gradients_per_round: int, rounds: int
) -> PrivacyPlan:
    """Builds the same training without clipping and noise, for comparison; arguments as above."""
    mechanisms = {}
    for client_id, size in num_examples.items():
        sampling_rate = _sampling_rate(config.batch_size, size)
        mechanisms[client_id] = SiloMechanism(math.inf, 0.0, sampling_rate, sampling_rate * size)
    return PrivacyPlan(
        unit="silo_example",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="privacy is switched off: no clipping, no noise",
        mechanisms=mechanisms,
        budgets={},
        gradients_per_round=gradients_per_round,
        rounds=rounds,
    )


def _sampling_rate(batch_size: int, num_examples: int) -> float:
    if batch_size < 1:
        raise ConfigError(f"privacy.batch_size must be at least 1, not {batch_size}")
    # Onto the grid of the sampler, which compares 23 random bits with the rate, and upwards.
    return min(1.0, math.ceil(batch_size / num_examples * 2**23) / 2**23)


def _calibrate(client_id: str, budget: SiloBudget, sampling_rate: float, steps: int) -> float:
    try:
        calibrated = calibrate_noise_multiplier(budget.epsilon, budget.delta, sampling_rate, steps)
    except BudgetError as error:
        raise BudgetError(f"silo {client_id!r}: {error}") from None
    # Up to the next float32, which is what the noise is scaled by.
    rounded = np.float32(calibrated)
    return float(rounded if rounded >= calibrated else np.nextafter(rounded, np.float32(np.inf)))
