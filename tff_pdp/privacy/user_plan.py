"""User-level DP as a plan: a server that is trusted with single updates releases noised sums of them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow_privacy
from dp_accounting import dp_event

from tff_pdp.privacy.accounting.accountants import poisson_gaussian_event
from tff_pdp.privacy.mechanisms.user_noise import FixedClip, TreeNoise, UserMechanism, UserNoise, rounds_per_epoch
from tff_pdp.privacy.plans.plan import PrivacyPlan

# The one scope of a user-level ledger.
USERS = "all users"
# The reason in the ledger.
UPDATES = "noised sums of users' updates"
# Noise this many times as long as the longest update there can be leaves little to learn from one round.
MOST_NOISE_TO_SIGNAL = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPlan(PrivacyPlan):
    """Protects one user: all examples, and all rounds that the user takes part in.

    Guarantee: with claim `formal` or `formal-conditional`, all that the server releases, the shared model of every
      round included, is (epsilon, delta)-DP for any one user, where the ledger built here bounds epsilon. What is
      computed from it and from one user's own data, such as that user's personal model, is so for all other users
      (joint DP); for the user whose data are in it, it is not.
    Assumes: the server is trusted with users' clipped updates and with who takes part; and what `claim_reason` says.

    Attributes:
      mechanism: public parameters of the noised sums.
      noise: kind of noise and clip.
      num_users: of the population, for which the sampling rate was set.
      num_released: how many values a user releases in a round.
      num_noised: how many of them the noise changes anything by.
      noise_on_own_support: whether users add shares of the noise by themselves, each only where the own update is not
        zero, as a paper does; that protects nobody.
    """

    mechanism: UserMechanism
    noise: UserNoise = dataclasses.field(default_factory=FixedClip)
    num_users: int
    num_released: int
    num_noised: int
    noise_on_own_support: bool = False

    def scope_of(self, client_id: str) -> str:
        """All users together: what is released is about any of them."""
        del client_id
        return USERS

    def cohort(
        self, round_number: int, client_ids: Sequence[str], generator: Callable[[int], np.random.Generator]
    ) -> np.ndarray:
        """Who takes part: every user independently with the sampling rate or, with trees, once in an epoch.

        It may be nobody. Drawing takes no longer with more users, except for trees.
        """
        if not self.num_released:
            # Nothing leaves anyone, so there is nothing to hide in a cohort.
            return np.arange(len(client_ids))
        if isinstance(self.noise, TreeNoise):
            epoch, number = divmod(round_number - 1, rounds_per_epoch(self.mechanism.sampling_rate))
            order = generator(epoch).permutation(len(client_ids))
            size = math.ceil(len(client_ids) / rounds_per_epoch(self.mechanism.sampling_rate))
            return np.sort(order[number * size : (number + 1) * size])
        draws = generator(round_number)
        # Independent choices with one probability are a binomial number of different users, each set as likely.
        size = draws.binomial(len(client_ids), self.mechanism.sampling_rate)
        return np.sort(draws.choice(len(client_ids), size, replace=False, shuffle=False))

    def training_counts(self, scope: str) -> Counter[dp_accounting.DpEvent]:
        """Every round's sum or, with trees, every epoch's."""
        counts: Counter[dp_accounting.DpEvent] = Counter()
        for round_number in range(1, self.rounds + 1) if isinstance(self.noise, TreeNoise) else ():
            counts.update({event: count for event, count, _ in self.charges(scope, round_number)})
        if self.num_released and not isinstance(self.noise, TreeNoise):
            counts[self._round_event()] = self.rounds
        return counts

    def charges(self, scope: str, round_number: int) -> list[tuple[dp_accounting.DpEvent, int, str]]:
        """One noised sum; with trees all of an epoch's, before its first round."""
        del scope
        if not self.num_released:
            return []
        if not isinstance(self.noise, TreeNoise):
            return [(self._round_event(), 1, UPDATES)]
        length = rounds_per_epoch(self.mechanism.sampling_rate)
        if (round_number - 1) % length:
            return []
        steps = min(length, self.rounds - round_number + 1)
        return [(tree_event(self.mechanism.noise_multiplier, steps), 1, UPDATES)]

    def build_query(self, seeds: Any) -> tensorflow_privacy.DPQuery:
        """The query of the server's sums, and with it the state they start from; `seeds` are int64 `[2, 2]`, secret."""
        mechanism = self.mechanism
        if self.noise_on_own_support:
            # Shares of the noise arrive in the records, which are clipped already.
            mechanism = dataclasses.replace(mechanism, clip_norm=math.inf, noise_multiplier=0.0)
        return self.noise.build_query(self.num_released, mechanism, seeds)

    @property
    def noise_share(self) -> float:
        """Standard deviation of a user's share of the noise, of which an expected cohort's add up to that of a sum."""
        mechanism = self.mechanism
        if mechanism.noise_multiplier == 0:
            return 0.0
        return mechanism.noise_multiplier * mechanism.clip_norm / math.sqrt(mechanism.expected_cohort)

    @property
    def noise_to_signal(self) -> float:
        """Expected norm of the noise on a round's mean over the clip norm: z sqrt(d) / qN; for trees, of one node's."""
        noise_multiplier = self.noise.sum_noise_multiplier(self.mechanism)
        return noise_multiplier * math.sqrt(self.num_noised) / self.mechanism.expected_cohort

    @property
    def warning(self) -> str:
        """What to say of the noise before training; empty where there is nothing to say."""
        ratio = self.noise_to_signal
        if ratio <= MOST_NOISE_TO_SIGNAL:
            return ""
        users = math.ceil(self.num_users * ratio / MOST_NOISE_TO_SIGNAL)
        noise_multiplier = self.noise.sum_noise_multiplier(self.mechanism)
        return (
            f"The noise on a round's mean is about {ratio:.3g} times as long as the longest mean there can be "
            f"(z sqrt(d) / qN, with z = {noise_multiplier:.3g}, d = {self.num_noised:,} values, "
            f"qN = {self.mechanism.expected_cohort:g} users): little will be learnt. With the same budget, sampling "
            f"rate and rounds it takes some {users:,} users to bring that down to {MOST_NOISE_TO_SIGNAL:g}; or share "
            "fewer values, plan fewer rounds, or raise epsilon."
        )

    def _round_event(self) -> dp_accounting.DpEvent:
        return poisson_gaussian_event(self.mechanism.sampling_rate, self.mechanism.noise_multiplier, 1)


def tree_event(noise_multiplier: float, steps: int) -> dp_accounting.DpEvent:
    """The event of one tree's noised running sums, over so many rounds that no user takes part in twice."""
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    return dp_event.SingleEpochTreeAggregationDpEvent(float(noise_multiplier), int(steps))
