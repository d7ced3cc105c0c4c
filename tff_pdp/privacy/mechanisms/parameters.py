"""Holds the public parameters of mechanisms, as computations and accountants both use them."""

import dataclasses
from typing import Literal

Sampler = Literal["poisson", "paper_shuffled"]
# Clip norms of users' updates lie in between, on whose grid nothing overflows or vanishes.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-20, 1e20


@dataclasses.dataclass(frozen=True)
class SiloMechanism:
    """Holds the parameters of one silo's DP-SGD.

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
class UserMechanism:
    """Holds the parameters of the noised sums of users' updates.

    Attributes:
      clip_norm: L2 bound C on all that one user releases in a round; the first of them where the clip adapts.
      noise_multiplier: z of one round's release as a whole, or of a tree's nodes.
      sampling_rate: q, the probability that a user is in a round's cohort; the share of users in it for trees.
      expected_cohort: the constant that means are divided by.
    """

    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    expected_cohort: float
