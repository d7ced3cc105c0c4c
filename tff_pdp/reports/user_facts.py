"""What reports say of user-level privacy in numbers: what a method cost every user, and how sums were noised."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class UserCosts:
    """What the training of one method cost every user, and how its noise compares with what there is to learn.

    Attributes:
      epsilon_target: the budget; infinite without privacy.
      epsilon_spent: the smallest bound below; infinite without privacy, zero where nothing is released.
      epsilon_rdp: upper bound from Rényi accounting.
      epsilon_pld: upper bound from privacy loss distributions; NaN where it was not computed.
      delta: the delta of all three epsilons.
      noise_multiplier: z, of one round's release as a whole, or of a tree's nodes; zero where nothing is released.
      num_noised: how many values of a user's release noise changes anything by; zero where nothing is released.
      noise_to_signal: expected norm of the noise on a round's mean over the clip norm; for trees, of one node's.
    """

    epsilon_target: float
    epsilon_spent: float
    epsilon_rdp: float
    epsilon_pld: float
    delta: float
    noise_multiplier: float
    num_noised: int
    noise_to_signal: float

    @property
    def is_bare(self) -> bool:
        """Whether something was released without noise, so that no epsilon holds."""
        return not math.isfinite(self.epsilon_spent) or bool(self.num_noised and not self.noise_multiplier)


@dataclasses.dataclass(frozen=True)
class UserSums:
    """How users' releases are drawn, clipped, summed and noised: the same for all methods of an experiment.

    Attributes:
      rounds: planned number of rounds.
      num_users: N, for which the sampling rate was set.
      is_constant: whether N is a public constant; otherwise it is the number of users in the data, taken for public.
      sampling_rate: q, the probability that a user is in a round's cohort; the share of users in it for trees.
      expected_cohort: the constant that means are divided by.
      clip_norm: C, L2 bound on all that one user releases in a round; the first of them where the clip adapts.
      noise_multiplier: z, as of `UserCosts`, of a method that releases something.
      quantile: of the norms, that the clip norm follows; None where it is fixed.
      count_stddev: standard deviation of the noise on the number of norms below the clip norm, where it adapts.
      sum_noise_multiplier: of the sum alone, where the clip norm adapts.
      rounds_per_tree: after which a tree starts anew; None where every round has noise of its own.
      weight_cap: the number of examples from which on a user counts as one; None where all users do.
      own_support: titles of methods whose users add shares of the noise, only where their own update is not zero.
    """

    rounds: int
    num_users: int
    is_constant: bool
    sampling_rate: float
    expected_cohort: float
    clip_norm: float
    noise_multiplier: float
    quantile: float | None = None
    count_stddev: float | None = None
    sum_noise_multiplier: float | None = None
    rounds_per_tree: int | None = None
    weight_cap: int | None = None
    own_support: tuple[str, ...] = ()
