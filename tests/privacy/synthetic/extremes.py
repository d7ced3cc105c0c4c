"""Records on which sums are tried: values of any size, and two classes."""

import math
from fractions import Fraction

import numpy as np

from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS

INF, NAN = math.inf, math.nan
EXTREMES = np.array(
    [
        [0, 0, 0],
        [1, 1, 1],
        [-1, -1, -1],
        [1, -1, 1],
        [1e38, -1e38, 1e300],
        [INF, -INF, INF],
        [NAN, NAN, NAN],
        [NAN, 1, -INF],
        [1e-300, 0, 5e-324],
        [1, 0, 0],
    ]
)


def clustered(n, seed=0):
    """Two classes with means and a covariance of their own, inside of [-1, 1], 3 : 1."""
    generator = np.random.default_rng(seed)
    y = (np.arange(n) % 4 == 0).astype(np.int64)
    means, root = np.array([[0.2, -0.1, 0.0], [-0.3, 0.1, 0.25]]), np.array([[0.1, 0, 0], [0.05, 0.1, 0], [0, 0, 0.02]])
    return means[y] + generator.normal(size=(n, 3)) @ root.T, y


def squared_change(change, noise_multiplier):
    """Exactly, as whole steps are."""
    return (Fraction(noise_multiplier) / 2**GRID_BITS) ** 2 * sum(step**2 for step in change.tolist())
