"""Defines a silo's private search for hyper-parameters: random draws, and the event that covers the search.

Federated training releases updates in every round, so a repeated training would release every repetition. Instead one
*pivot run* with public hyper-parameters is trained and released as usual. Then each silo alone, and in secret, repeats
its part of the training with the server's messages of the pivot run, each time with other hyper-parameters, and
releases the best repetition.

Source: Liu, "On Privacy and Personalization in Cross-Silo Federated Learning" (thesis), section 1.7 and appendix E.3;
Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy", 2022.
"""

import dataclasses
from collections.abc import Mapping

import dp_accounting
import numpy as np

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.repeated_runs import GEOMETRIC, LOGARITHMIC, POISSON, NumberOfRuns, search_event
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws, add_noise, whole_steps

# Tries every candidate once, and is charged for all of them.
FIXED = "fixed"
_SHAPES = {"geometric": GEOMETRIC, "logarithmic": LOGARITHMIC, "poisson": POISSON}


@dataclasses.dataclass(frozen=True)
class Search:
    """The settings of every silo's search, all of them public.

    Guarantee: `event` covers the selected model, its hyper-parameters and its noisy score, for adding or removing one
      training example, which changes runs, or one validation example, which changes scores.
    Assumes: every run, with any candidate, is covered by the run event; candidates and numbers of runs are drawn by
      this class's methods, from keys that are secret; nothing but the selected run leaves the silo, not even the
      duration of the search. A score changes by at most `sensitivity` with one validation example.

    Attributes:
      candidates: combinations of hyper-parameters that are tried; each has its values by name.
      runs: distribution of the number of runs, which is drawn in secret; or the number of candidates, if each candidate
        is tried once.
      score_noise_multiplier: standard deviation of the noise on a score, divided by the sensitivity.
      sensitivity: largest change of a score that one validation example can make.
      has_pivot: whether there is a pivot run; a method that releases nothing during training needs none.
    """

    candidates: tuple[Mapping[str, float], ...]
    runs: NumberOfRuns | int
    score_noise_multiplier: float
    sensitivity: float
    has_pivot: bool

    @property
    def is_fixed(self) -> bool:
        """True if every candidate is tried once, so that the number of runs is public."""
        return not isinstance(self.runs, NumberOfRuns)

    @property
    def score_event(self) -> dp_accounting.DpEvent:
        """The event of one noisy score."""
        return dp_accounting.GaussianDpEvent(self.score_noise_multiplier)

    def event(self, run_event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """Builds the event of one silo's whole search, from the event of the training in one run."""
        return search_event(dp_accounting.ComposedDpEvent([run_event, self.score_event]), self.runs)

    def draw_number_of_runs(self, draws: ExactDraws) -> int:
        """Draws the number of one silo's runs: at least 1, or at least 0 if Poisson. Returns a fixed number as is."""
        return self.runs.draw(draws.below) if isinstance(self.runs, NumberOfRuns) else self.runs

    def draw_candidate(self, run: int, draws: ExactDraws) -> Mapping[str, float]:
        """Returns the candidate for run 1, 2, ...: an independent uniform draw or, if `is_fixed`, the next in order."""
        return self.candidates[run - 1 if self.is_fixed else draws.below(len(self.candidates))]

    def noised(self, scores: np.ndarray, draws: ExactDraws) -> float:
        """Returns the noised sum of examples' scores, by which runs are compared; `score_event` covers the sum.

        Args:
          scores: float64 `[n]`, one for each validation example, each at most `sensitivity` from zero.
          draws: draws of a secret key that serves nothing else.
        """
        stddev = self.score_noise_multiplier * self.sensitivity
        return float(add_noise(whole_steps(scores, stddev), stddev, draws))


def parse_runs(runs: str | float, mean: float, num_candidates: int) -> NumberOfRuns | int:
    """Reads `tuning.search.runs` and `tuning.search.mean_runs`.

    Raises:
      ConfigError: the distribution is not known, or a number is out of range.

    >>> parse_runs("geometric", 5.0, num_candidates=3)
    NumberOfRuns(mean=5.0, shape=1.0)
    >>> parse_runs("fixed", 5.0, num_candidates=3)
    3
    """
    if runs == FIXED:
        return num_candidates
    if isinstance(runs, str) and runs not in _SHAPES:
        raise ConfigError(
            f"tuning.search.runs: {runs!r} is not known; use {', '.join(_SHAPES)}, {FIXED}, or a number, the shape of "
            "a truncated negative binomial"
        )
    try:
        return NumberOfRuns(mean, _SHAPES[runs] if isinstance(runs, str) else runs)
    except ConfigError as error:
        raise ConfigError(f"tuning.search.runs and mean_runs: {error}") from None
