"""Describes the noise that a server adds to the sum of users' updates: fixed clip, adaptive clip, trees."""

import dataclasses

from tff_pdp.errors import BudgetError
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.settings import Positive, Settings, Share

# A count is a sum of halves, which are whole steps of the grid for noise up to 2**17.
_MOST_COUNT_NOISE = 1e5


@dataclasses.dataclass(frozen=True)
class UserSum:
    """The clipping, summation and noise of users' releases.

    Attributes:
      noise: kind of noise and clip.
      sampling_rate: probability that a user is in a round's cohort; for trees, the share of users in a cohort.
      generator: generator of the noise's random bits.
    """

    noise: "UserNoise"
    sampling_rate: float
    generator: Generator = "philox"


class _SumNoise(Settings):
    def sum_noise_multiplier(self, mechanism: UserMechanism) -> float:
        """Returns the noise multiplier of the sum, or of each node of a tree: here the mechanism's noise multiplier."""
        return mechanism.noise_multiplier


class FixedClip(_SumNoise, tag_field="kind", tag="fixed_clip"):
    """Gaussian noise on the sum of updates that are clipped to a given norm: DP-FedAvg (McMahan et al., ICLR 2018)."""


class AdaptiveClip(Settings, tag_field="kind", tag="adaptive_clip"):
    """Gaussian noise on clipped updates; a quantile of their norms sets the clip norm (Andrew et al., NeurIPS 2021).

    Attributes:
      quantile: fraction of the updates that should not be clipped.
      learning_rate: learning rate of the logarithm of the clip norm.
      count_stddev: standard deviation of the noise on the count of updates below the clip norm, divided by the expected
        cohort. The count is released too, so the sum needs more noise than with a fixed clip.
    """

    quantile: Share = 0.5
    learning_rate: Positive = 0.2
    count_stddev: Positive = 0.05

    def sum_noise_multiplier(self, mechanism: UserMechanism) -> float:
        """Returns the sum's noise multiplier `(z^-2 - (2 s)^-2)^(-1/2)`.

        Here z is the mechanism's noise multiplier, and s the standard deviation of the noise on the count.

        Raises:
          BudgetError: s is too small for z, or above 1e5.
        """
        total, count_stddev = mechanism.noise_multiplier, self.count_stddev * mechanism.expected_cohort
        if total == 0:
            return 0.0
        if count_stddev > _MOST_COUNT_NOISE:
            raise BudgetError(
                f"privacy.user_noise.count_stddev {self.count_stddev:g} times {mechanism.expected_cohort:g} users is "
                f"too much noise on the count: set it to at most {_MOST_COUNT_NOISE / mechanism.expected_cohort:.2g}"
            )
        if total >= 2 * count_stddev:
            raise BudgetError(
                f"privacy.user_noise.count_stddev {self.count_stddev:g} times {mechanism.expected_cohort:g} users is "
                f"too little noise on the count for a noise multiplier of {total:.4g}: set it to at least "
                f"{0.6 * total / mechanism.expected_cohort:.2g}"
            )
        return (total**-2 - (2 * count_stddev) ** -2) ** -0.5


class TreeNoise(_SumNoise, tag_field="kind", tag="tree"):
    """DP-FTRL: noise of a binary tree on the running sum, which needs no random cohorts (Kairouz et al., ICML 2021).

    Every user takes part once in an epoch of rounds, in any order; each epoch has a separate tree.
    """


UserNoise = FixedClip | AdaptiveClip | TreeNoise


def rounds_per_epoch(share: float) -> int:
    """Returns the number of rounds in which every user takes part once, if `share` of the users are in each round.

    >>> rounds_per_epoch(0.25), rounds_per_epoch(0.3)
    (4, 4)
    """
    # A hair less: a share of 1/49 need not be below its inverse's inverse.
    return -int(-(1 - 1e-9) / share // 1)
