"""Accounts for a private choice of hyper-parameters: the best of a secret, random number of runs is released.

To release the best of a fixed number of runs can cost as much as to release them all. If the number is random and kept
secret, the search costs a few times what one run costs, and its cost grows slowly with the expected number.

Source: Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy", 2022, theorems 2 and 6. Liu's
thesis on MR-MTL applies these theorems in section 1.7 and appendix E.
"""

import dataclasses
import decimal
import math
from collections.abc import Callable, Iterable, Iterator

import dp_accounting
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.accountants import guess_of_poisson, poisson_gaussian_event, solve_noise_multiplier
from tff_pdp.privacy.accounting.events import require

# Shapes that have names.
LOGARITHMIC = 0.0
GEOMETRIC = 1.0
POISSON = math.inf

# To draw a number of runs: bits of a uniform number, and decimal digits of probabilities.
_UNIFORM_BITS = 256
_DIGITS = 200
_HALF = decimal.Decimal("0.5")
# Below this shape, exp(shape * x) - 1 would lose half of its digits, and shape * x agrees with it in the other half.
_SMALLEST_SHAPE = decimal.Decimal(10) ** -(_DIGITS // 2)


@dataclasses.dataclass(frozen=True)
class NumberOfRuns:
    """The distribution of the number of runs: truncated negative binomial, or Poisson.

    At an equal mean, a smaller shape costs less privacy, and leads to very few runs more often.

    Attributes:
      mean: expected number of runs E[h], greater than 1.
      shape: eta of the truncated negative binomial, at least 0; `LOGARITHMIC`, `GEOMETRIC` and `POISSON` are special
        cases. Under `POISSON` there is no run at all with probability exp(-mean).

    Raises:
      ConfigError: a value is out of range.

    >>> round(NumberOfRuns(mean=10, shape=LOGARITHMIC).gamma, 4)
    0.0269
    """

    mean: float
    shape: float

    def __post_init__(self):
        require(1 < self.mean < math.inf, "mean", self.mean, "greater than 1 and finite")
        require(self.shape >= 0, "shape", self.shape, "zero or positive; infinite stands for Poisson")

    @property
    def gamma(self) -> float:
        """The parameter gamma of the truncated negative binomial, in (0, 1).

        Raises:
          ConfigError: the number of runs is Poisson.
        """
        if self.shape == POISSON:
            raise ConfigError("A Poisson number of runs has no gamma, only its mean.")
        # The accountant's own solution, so that runs are drawn from exactly the distribution that is accounted for.
        return rdp_privacy_accountant._gamma_truncated_negative_binomial(self.shape, self.mean)

    def draw(self, below: Callable[[int], int]) -> int:
        """Draws the number of runs: at least 1, or at least 0 under the Poisson distribution.

        Guarantee: the number does not depend on any data. The probability of each number is off by at most 2**-250. A
          probability of at least 2**-200 is also off by at most a factor of exp(2**-44).
        Assumes: `below` draws from a secret key that serves nothing else. Neither the number nor the duration of the
          search is revealed: once the number is known, the search costs as much as a fixed number of runs.

        Args:
          below: function that maps a bound n to a uniform draw from the whole numbers 0 to n - 1.
        """
        with decimal.localcontext(decimal.Context(prec=_DIGITS)):
            # By inversion: the first number whose distribution function is above a uniform number.
            uniform = (below(2**_UNIFORM_BITS) + _HALF) / 2**_UNIFORM_BITS
            for number, probability in self._probabilities():
                uniform -= probability
                if uniform < 0:
                    return number
        raise AssertionError("the probabilities go on")

    def _probabilities(self) -> Iterator[tuple[int, decimal.Decimal]]:
        """Yields numbers of runs and their probabilities, in order and without end, in the precision of the context."""
        if self.shape == POISSON:
            number, ratio, shape = 0, decimal.Decimal(float(self.mean)), None
            probability = (-ratio).exp()
        else:
            number, gamma, shape = 1, decimal.Decimal(self.gamma), decimal.Decimal(float(self.shape))
            ratio = 1 - gamma
            # (gamma**-shape - 1) / shape, and its limit at shape 0.
            exponent = -shape * gamma.ln()
            probability = ratio / ((exponent.exp() - 1) / shape if shape > _SMALLEST_SHAPE else -gamma.ln())
        while True:
            yield number, probability
            number += 1
            probability *= ratio * (1 if shape is None else number - 1 + shape) / number


def search_event(run_event: dp_accounting.DpEvent, runs: NumberOfRuns | int) -> dp_accounting.DpEvent:
    """Builds the event of a search that makes a random or a fixed number of runs and releases the best of them.

    `epsilon_bounds` has only an RDP bound for a random number of runs.

    Guarantee: with a random number of runs, the event covers the best run's releases (all that `run_event` covers), but
    no release of another run. With a fixed number, it covers the releases of every run, and any comparison of runs.
    Assumes: `run_event` covers every run, with any hyper-parameters, including the run's score on private data. If the
    number of runs is random, hyper-parameters are drawn anew for each run, from a public distribution. Runs are
    compared only by results that `run_event` covers, such as a score on private data. The number of runs was drawn from
    `runs` and stays secret; if there is no run at all, a result chosen in advance is released. Anything that a run
    sends out before it is selected, such as updates to a server, needs another event.

    Args:
      run_event: event of one run, its score included.
      runs: distribution of the number of runs, or a fixed number.

    Raises:
      ConfigError: `runs` is neither a distribution nor a whole number of at least 1.
    """
    if isinstance(runs, NumberOfRuns):
        return dp_event.RepeatAndSelectDpEvent(run_event, float(runs.mean), float(runs.shape))
    require(1 <= runs < math.inf and runs == int(runs), "runs", runs, "a whole number, one or more")
    return dp_accounting.SelfComposedDpEvent(run_event, int(runs))


def most_runs(runs: NumberOfRuns | int) -> int:
    """Returns an upper bound on the number of runs, which is exceeded with a probability below exp(-60).

    >>> most_runs(NumberOfRuns(mean=5, shape=GEOMETRIC))
    640
    """
    if not isinstance(runs, NumberOfRuns):
        return runs
    if runs.shape == POISSON:
        # Bernstein's inequality: exp(-x^2 / (2 mean + 2 x / 3)) beyond mean + x.
        return math.ceil(runs.mean + 40 + 11 * math.sqrt(runs.mean))
    # Tails of a negative binomial fall by the factor 1 - gamma, in the end.
    return math.ceil(128 * max(1.0, runs.shape) / runs.gamma)


def calibrate_repeated_runs(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    runs: NumberOfRuns | int,
    *,
    run_events: Iterable[dp_accounting.DpEvent] = (),
    pivot_events: Iterable[dp_accounting.DpEvent] | None = None,
    fixed_events: Iterable[dp_accounting.DpEvent] = (),
) -> float:
    """Finds the smallest noise multiplier of DP-SGD for which a whole search stays within the budget.

    Guarantee: with the returned noise multiplier, the best bound of the search, the pivot run and `fixed_events`
    together is at most `epsilon`, as the function checks.
    Assumes: as in `search_event` and `poisson_gaussian_event`; every run takes `steps` steps or fewer.

    Args:
      epsilon: the budget; for an infinite budget, which needs no noise, 0 is returned.
      delta: delta of (epsilon, delta)-DP, in (0, 1).
      sampling_rate: probability that one record takes part in one step.
      steps: planned number of noisy sums of one run.
      runs: distribution of the number of runs.
      run_events: other releases of each run, such as its score on private data.
      pivot_events: other releases of the pivot run; None without a pivot run. A pivot run is one more run with equal
        steps and noise, released as a whole (for instance to a server, whose messages the search then uses).
      fixed_events: releases outside of the search, once each.

    Raises:
      BudgetError: no noise multiplier up to 1e4 meets the budget.
      ConfigError: a value is out of range.

    >>> runs = NumberOfRuns(mean=10, shape=LOGARITHMIC)
    >>> round(calibrate_repeated_runs(epsilon=0.25, delta=1e-5, sampling_rate=1.0, steps=1, runs=runs), 1)
    27.0
    """
    require(0 < delta < 1, "delta", delta, "strictly between 0 and 1")
    # Checks what an infinite epsilon would not.
    search_event(poisson_gaussian_event(sampling_rate, 1.0, steps), runs)
    in_each_run, once = list(run_events), list(fixed_events)
    in_pivot = None if pivot_events is None else list(pivot_events)

    def everything(noise_multiplier: float) -> dp_accounting.DpEvent:
        training = poisson_gaussian_event(sampling_rate, noise_multiplier, steps)
        run = dp_accounting.ComposedDpEvent([training, *in_each_run])
        pivot = [] if in_pivot is None else [training, *in_pivot]
        return dp_accounting.ComposedDpEvent([search_event(run, runs), *pivot, *once])

    return solve_noise_multiplier(
        everything, epsilon, delta, guess=guess_of_poisson(epsilon, delta, sampling_rate, steps)
    )
