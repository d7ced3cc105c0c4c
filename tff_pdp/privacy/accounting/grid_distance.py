"""Charges for the difference between ideal Gaussian noise and the noise that floating-point functions compute.

Noise on a grid (`tff_pdp.privacy.mechanisms.grid_noise`) is a computed Gaussian, rounded to K whole steps of the grid.
Gaussians are computed in pairs. A computed pair x and the ideal pair come from the same uniform numbers, and are at
most `e = rounding * |x|` apart. So the rounded values differ only if a value is within e of the border between two
steps. Let g be the width of a step; all lengths here are in standard deviations. If the computed pair is in a cell of
the grid, the ideal pair is in the cell widened by e on all sides. If the ideal pair is in the cell narrowed by e on all
sides, the computed pair is in the cell. Up to the change of the density over a cell (below 5 % for steps of 2**-9 and
less), the logarithm of the ratio between the computed and the ideal probability of a cell is therefore at most

    4.2 e / g  =  k r,    with  k = 4.2 * rounding / g   and r the length of the ideal pair plus two steps,

for r up to 10.6. Longer pairs have probability exp(-56), computed or ideal. The uniform number from which their length
is computed has too few digits: half of its last digit, 2**-129, moves a pair of length r by another
2**-129 exp(r^2 / 2) / r, which is negligible for most of these pairs. Nothing is claimed about pairs longer than 12,
which have probability exp(-72).

*Composition.* Earlier draws do not change the distribution of the next pair, so the log-ratios l of all n pairs of a
run add up. For any s > 0 let V = E (k r)^2 exp(10.6 (s + 1) k), where E r^2 is below 2.1. Under the ideal distribution
E exp(l) is 1, and exp(x) - 1 - x is at most x^2 exp(|x|) / 2. So E l is between -V / 2 and 0, and E exp(t l) is at most
1 + (s + 1)^2 V / 2 for every t between -s and s + 1. By Markov's inequality, the sum of the log-ratios is above
a = (n (s + 1)^2 V / 2 + L) / s with a probability of at most exp(-L), computed or ideal, and below -a with at most the
same probability. This is a Chernoff bound for martingales. The sum of the largest log-ratios, n k r, would be a much
larger bound. For longer pairs, the code adds (s + 1) exp(-56) to each of the n terms (s + 1)^2 V / 2.

*Charge.* Let the ratio between computed and ideal probabilities be between exp(-a) and exp(a), except with probability
b. If releases with ideal noise are (epsilon, delta)-DP, releases with computed noise are (epsilon + 2 a, exp(a) delta +
(1 + exp(epsilon + a)) b)-DP.
"""

import math
from collections.abc import Callable

import attr
import numpy as np

from tff_pdp.privacy.accounting.events import CustomDpEvent

# The bound of `random_bits.gaussians`, and the most steps in a standard deviation that `grid_noise` takes.
ROUNDING = 9 * 2.0**-53
MOST_STEPS = 2.0**19
# Change of a logarithm per standard deviation by which a pair is moved; and per unit of the pair's length.
_PER_UNIT = 4.2 * MOST_STEPS
_PER_LENGTH = _PER_UNIT * ROUNDING
_LONGEST, _LONGER = 10.6, math.exp(-56.0)
# For large epsilons: number of pairs that may be longer, their largest length, and half of the radius's last digit.
_LONG_PAIRS, _LONGEST_STILL, _HALF_A_DIGIT = 2, 12.0, 2.0**-129
_MEAN_SQUARE = 2.1
# The share of delta that goes to the mass with larger ratios, twice, and of pairs that are too long, twice. A hundredth
# of each is for batches that are larger than `dp_sgd.most_examples`, each with a probability of exp(-80): there are
# fewer of them than values, and a distance is given only where this share is at least 2 exp(-72) a value.
_SHARE, _PARTS = 2.0**-10, 4.04
# Up to here exp(-epsilon) + exp(a) is below e, and exp(-a) takes less than half of delta.
_LARGEST_DISTANCE = 0.5


@attr.s(frozen=True, slots=True, auto_attribs=True)
class GridNoiseDpEvent(CustomDpEvent):
    """Noise drawn on a grid in place of other events' ideal noise; `values` bounds the number of drawn values.

    The event itself releases nothing. `tff_pdp.privacy.accounting.accountants` computes the other events' epsilon for a
    smaller delta, and adds the charge for the distance between computed and ideal noise.
    """

    values: int

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        """Returns zero at every order: `with_grid_noise` adds the charge instead."""
        return np.zeros(np.shape(orders))


def grid_distance(values: int, log_mass: float) -> float:
    """Bounds the log-ratio of computed to ideal probabilities, except for outcomes of total mass `exp(-log_mass)`.

    Args:
      values: number of values that are drawn.
      log_mass: minus the natural logarithm of the excepted outcomes' total probability; positive.

    >>> grid_distance(10**6, 30.0) < 2e-4
    True
    """
    pairs = values / 2 + 1

    def bound(s: float) -> float:
        spread = _PER_LENGTH**2 * _MEAN_SQUARE * math.exp((s + 1) * _LONGEST * _PER_LENGTH)
        return (pairs * ((s + 1) ** 2 * spread / 2 + (s + 1) * _LONGER) + log_mass) / s

    # The best s where the exponential is one; every s gives a bound.
    best = math.sqrt(2 * log_mass / (pairs * _MEAN_SQUARE)) / _PER_LENGTH
    return min(bound(min(best * factor, 1 / _PER_LENGTH)) for factor in (0.25, 0.5, 1.0))


def with_grid_noise(parts: tuple, delta: float, rough: Callable, bound: Callable) -> tuple:
    """Bounds the epsilon of events, some of which may be noise on a grid.

    Args:
      parts: pairs of an event and the number of times that it is released.
      delta: delta of all events together.
      rough: function `(parts, delta) -> epsilon` that quickly computes an upper bound, which may be loose.
      bound: function `(parts, delta) -> bounds` that bounds epsilon for ideal noise.

    Returns:
      The bounds for ideal noise at a smaller delta, and the number to add to each bound.
    """
    values = sum(event.values * count for event, count in parts if isinstance(event, GridNoiseDpEvent))
    ideal = tuple(part for part in parts if not isinstance(part[0], GridNoiseDpEvent))
    if not values or not ideal:
        return bound(ideal, delta), 0.0
    # 1 + exp(epsilon + a) is at most the exponential of this, which is known before epsilon is.
    exponent = rough(ideal, delta / 2) + 1.0
    log_mass = exponent + math.log(_PARTS / (_SHARE * delta))
    distance = grid_distance(values, log_mass)
    allowed = _SHARE * delta / _PARTS * math.exp(-min(exponent, 500.0))
    if values * _LONGER > allowed:
        # Half of the mass for longer pairs than this, half for more of them.
        length = math.sqrt(2 * math.log(2 * values / allowed))
        if length > _LONGEST_STILL or (values * _LONGER) ** (_LONG_PAIRS + 1) > allowed / 2:
            return bound(ideal, delta), math.inf
        moved = ROUNDING * length + _HALF_A_DIGIT * math.exp(length**2 / 2) / length
        distance += _LONG_PAIRS * _PER_UNIT * moved
    if distance > _LARGEST_DISTANCE:
        return bound(ideal, delta), math.inf
    # Both masses, in both directions, fit into the share of delta.
    return bound(ideal, delta * (1 - _SHARE) * math.exp(-distance)), 2 * distance
