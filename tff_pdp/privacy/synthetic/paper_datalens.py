"""Does what the released code of DataLens does otherwise: an even partition, and an account that looks at the votes.

Neither protects anyone. The two are here to compare with published figures; a generator that uses one of them claims
nothing (`Generator.why_not_private`).

Source: Wang et al., "DataLens", CCS 2021, released code: `evenly_partition_dataset` and `signsgd_aggregate`. The bound
  for the largest vote is that of Papernot et al., "Scalable Private Learning with PATE", ICLR 2018, theorem 6 and
  propositions 7, 8 and 10.
"""

import math

import numpy as np
from scipy import special

# Orders of the released code.
_ORDERS = np.concatenate([[1.1], np.arange(2.0, 200.0)])


def even_parts(y: np.ndarray, num_classes: int, num_teachers: int) -> list[list[int]]:
    """Divides records evenly: teachers take the next record of each class in turn, and begin a class again at its end.

    Records of small classes are given to several teachers. A class without records is left out, where the released
    code fails.

    Args:
      y: classes `[n]`, with n at least the number of teachers.
      num_classes: number of classes.
      num_teachers: number of teachers M; each gets n // M records.
    """
    places = [np.flatnonzero(y == label).tolist() for label in range(num_classes)]
    places = [own for own in places if own]
    size = len(y) // num_teachers

    def record(turn: int) -> int:
        own = places[turn % len(places)]
        return own[turn // len(places) % len(own)]

    return [[record(turn) for turn in range(start, start + size)] for start in range(0, num_teachers * size, size)]


class PaperAccount:
    """Adds up Renyi divergences that follow from the noised votes, until they exceed a budget: no guarantee."""

    def __init__(self, epsilon: float, delta: float):
        """Begins an account with a budget."""
        self._epsilon, self._delta, self._divergences = epsilon, delta, np.zeros(len(_ORDERS))

    def is_spent(self, noised: np.ndarray, sigma: float, votes: int) -> bool:
        """Adds releases of votes to the account, and returns whether the budget is exceeded.

        Args:
          noised: noised sums of votes, `[examples, features]`.
          sigma: standard deviation of the noise.
          votes: k, number of features that each teacher votes on.
        """
        for sums in noised:
            # The released code bounds the chance of another largest value with the noise on votes, and the divergence
            # with noise that is divided by the root of 2 k.
            rest = np.delete(sums.max() - sums, sums.argmax())
            log_chance = -math.inf
            if len(rest):
                logs = np.asarray(special.log_ndtr(-rest / (math.sqrt(2) * sigma)))
                log_chance = min(float(np.logaddexp.reduce(logs)), math.log1p(-1 / len(sums)))
            self._divergences += largest_vote_divergences(log_chance, sigma / math.sqrt(2 * votes))
        epsilons = self._divergences - math.log(self._delta) / (_ORDERS - 1)
        return bool(epsilons.min() > self._epsilon)


def largest_vote_divergences(log_chance: float, sigma: float) -> np.ndarray:
    """Bounds the Renyi divergence of releasing which sum of votes is the largest, at the orders of the released code.

    Args:
      log_chance: logarithm of a bound on the probability that noise changes which sum is the largest.
      sigma: standard deviation of the noise on sums that a record moves by at most the root of 2.

    Returns:
      The smaller of the data-independent bound, order / sigma^2, and of theorem 6, where that applies.
    """
    independent = _ORDERS / sigma**2
    if log_chance == -np.inf:
        return np.zeros(len(_ORDERS))
    second = sigma * math.sqrt(-log_chance)
    first = second + 1
    if second <= 1:
        return independent
    of_first, of_second = first / sigma**2, second / sigma**2
    log_limit = (second - 1) * of_second - second * (math.log1p(1 / (first - 1)) + math.log1p(1 / (second - 1)))
    if log_chance > log_limit or -log_chance <= of_second:
        return independent
    log_rest = np.log1p(-math.exp(log_chance))
    log_a = (_ORDERS - 1) * (log_rest - np.log1p(-math.exp((log_chance + of_second) * (1 - 1 / second))))
    log_b = (_ORDERS - 1) * (of_first - log_chance / (first - 1))
    dependent = np.logaddexp(log_rest + log_a, log_chance + log_b) / (_ORDERS - 1)
    return np.where(first > _ORDERS, np.minimum(independent, dependent), independent)
