"""Defines the public parameters of mechanisms, with the exact values that both computations and accountants use."""

import dataclasses
from typing import Literal

Sampler = Literal["poisson", "paper_shuffled"]
# Range of the clip norms of users' updates; on the grid of such a clip norm nothing overflows or vanishes.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-20, 1e20


@dataclasses.dataclass(frozen=True)
class SiloMechanism:
    """The public parameters of one silo's DP-SGD.

    The sampling rate is a multiple of 2**-23 and the noise multiplier is a float32, as in computations.

    Attributes:
      clip_norm: L2 bound C on each example's gradient.
      noise_multiplier: z, standard deviation of the noise on the sum, divided by C.
      sampling_rate: q, the probability that an example is in a batch.
      expected_batch_size: the constant that the noised sum is divided by.
    """

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    expected_batch_size: float


@dataclasses.dataclass(frozen=True)
class UserMechanism:
    """The public parameters of the noised sums of users' updates.

    Attributes:
      clip_norm: L2 bound C on all that one user releases in a round; with an adaptive clip norm, the bound of the first
        round.
      noise_multiplier: z, noise multiplier of one round's whole release or, for trees, of each node.
      sampling_rate: q, the probability that a user is in a round's cohort; for trees, the share of users in a cohort.
      expected_cohort: the constant that means are divided by.
    """

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    expected_cohort: float
