"""Releases a silo's number of examples and features' moments, once before training, at a cost to the silo's budget.

A statistic is released with noise once, then stored and reused: a second release would cost epsilon again.
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.accounting.events import ParameterChoiceDpEvent, event_from_dict, event_to_dict
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws, add_noise, whole_steps
from tff_pdp.settings import Positive, Settings

# Records whose moments are in memory together.
_ROWS = 2**14

ReasonedEvent = tuple[dp_accounting.DpEvent, str]


@dataclasses.dataclass(frozen=True, eq=False)
class MomentSettings:
    """Settings of the release of each feature's mean and standard deviation. All settings are public.

    Attributes:
      lower: float64 `[*input_shape]`, lower bound to which a feature is clipped.
      upper: float64 `[*input_shape]`, upper bound; above `lower`.
      noise_multiplier: standard deviation of the noise divided by the sensitivity of the sum.
      smallest_stddev: smallest standard deviation that is released, as a fraction of `upper - lower`; 0.001 to 0.5.
    """

    lower: np.ndarray
    upper: np.ndarray
    noise_multiplier: float
    smallest_stddev: float

    @property
    def sensitivity(self) -> float:
        """L2 bound on one record's contribution to the sum; see `moment_steps`."""
        return math.sqrt(self.lower.size)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each value of the sum."""
        return self.noise_multiplier * self.sensitivity


@dataclasses.dataclass(frozen=True)
class StatisticsSettings:
    """The statistics that every silo releases; nothing by default.

    Attributes:
      count_epsilon: epsilon that the number of training examples costs, or None where that number is public.
      moments: settings for the release of features' means and standard deviations, or None for no release.
    """

    count_epsilon: float | None = None
    moments: MomentSettings | None = None


class PublicNumber(Settings, tag_field="kind", tag="public"):
    """Treats silos' numbers of training examples as public."""

    epsilon: ClassVar[float | None] = None


class NoisedNumber(Settings, tag_field="kind", tag="noised"):
    """Releases silos' numbers of training examples with noise.

    Attributes:
      epsilon: epsilon that the release of a silo's number costs.
    """

    epsilon: Positive  # pyright: ignore[reportIncompatibleVariableOverride]


NumExamples = PublicNumber | NoisedNumber


@dataclasses.dataclass(frozen=True)
class SiloStatistics:
    """Statistics that one silo has released.

    Attributes:
      num_examples: number of training examples, at least 1: noised, or the true number where that is public.
      mean: mean of each feature, in C order; None where moments were not asked for.
      stddev: standard deviation of each feature, positive; None where `mean` is None.
      events: releases and their purposes, to be recorded in the silo's ledger once.
    """

    num_examples: int
    mean: tuple[float, ...] | None = None
    stddev: tuple[float, ...] | None = None
    events: tuple[ReasonedEvent, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as plain data for JSON; `from_dict` restores them exactly."""
        return {
            "num_examples": self.num_examples,
            "mean": None if self.mean is None else list(self.mean),
            "stddev": None if self.stddev is None else list(self.stddev),
            "events": [{"event": event_to_dict(event), "reason": reason} for event, reason in self.events],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "SiloStatistics":
        """Restores statistics from the data of `to_dict`.

        Raises:
          ConfigError: `stored` is not the data of a silo's statistics.
        """
        try:
            return cls(
                num_examples=int(stored["num_examples"]),
                mean=None if stored["mean"] is None else tuple(map(float, stored["mean"])),
                stddev=None if stored["stddev"] is None else tuple(map(float, stored["stddev"])),
                events=tuple((event_from_dict(entry["event"]), str(entry["reason"])) for entry in stored["events"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"Not the stored statistics of a silo ({type(error).__name__}: {error}).") from error


def planned_events(settings: StatisticsSettings) -> tuple[ReasonedEvent, ...]:
    """Returns the releases that `release_silo_statistics` will make, and their purposes.

    Guarantee: under ADD_OR_REMOVE_ONE adjacency, the events cover the statistics and all their later uses, such as
    training whose sampling rate and noise depend on the released number of examples.
    Assumes: the settings are public and fixed without looking at the data; see `release_silo_statistics`.
    """
    events: list[ReasonedEvent] = []
    if settings.count_epsilon is not None:
        events.append((ParameterChoiceDpEvent(settings.count_epsilon), "number of training examples"))
    if settings.moments is not None:
        event = dp_accounting.GaussianDpEvent(settings.moments.noise_multiplier)
        events.append((event, "mean and standard deviation of each feature"))
    return tuple(events)


def statistics_generator(silo: str, test_only_seed: int | None = None) -> ExactDraws:
    """Returns the source of one silo's noise.

    Args:
      silo: name of the silo.
      test_only_seed: None for the operating system's entropy. With a number, the noise is a function of that number and
        the silo's name: reproducible, and not private.
    """
    if test_only_seed is None:
        return ExactDraws(os.urandom(32))
    return ExactDraws(hashlib.sha256(f"test-only statistics {test_only_seed}:{silo}".encode()).digest())


def release_silo_statistics(x: np.ndarray, settings: StatisticsSettings, draws: ExactDraws) -> SiloStatistics:
    """Releases the statistics of one silo's training examples that `settings` asks for.

    Guarantee: `planned_events(settings)`, which are also the result's `events`, cover the result under
    ADD_OR_REMOVE_ONE adjacency for any records: values that are out of bounds or missing do not raise the sensitivity.
    If the number of examples is public, the guarantee is conditional on that number. The noise on the number of
    examples has exactly the discrete Laplace distribution; the noise on moments is Gaussian, rounded together with the
    sum (`exact_draws`).
    Assumes: the function is called once, and the result is stored; the draws' key is secret and has no other use.

    Args:
      x: `[n, *input_shape]`, any numeric dtype; n may be 0.
      settings: statistics to release, public.
      draws: draws from `statistics_generator`.
    """
    num_examples = max(1, len(x))
    if settings.count_epsilon is not None:
        # Any use of the noised number, to raise it to one included, costs nothing more.
        num_examples = max(1, len(x) + draws.discrete_laplace(1 / Fraction(settings.count_epsilon)))
    mean = stddev = None
    if settings.moments is not None:
        mean, stddev = _release_moments(x, settings.moments, num_examples, draws)
    return SiloStatistics(num_examples, mean, stddev, planned_events(settings))


def moment_steps(x: np.ndarray, settings: MomentSettings) -> np.ndarray:
    """Sums (u, u^2 - 1) over records, in whole steps of `exact_draws`: Python's integers, `[2, *input_shape]`.

    Here u is a feature mapped from its bounds to [-1, 1].

    Guarantee: adding or removing one record changes the sum by at most `settings.sensitivity` in L2 norm. For each
    feature, u^2 + (u^2 - 1)^2 is at most 1 (reached at u = 0 and |u| = 1). For a sum of (u, u^2) this bound would be 2.
    """
    steps = np.zeros((2, *settings.lower.shape), object)
    half_range = (settings.upper - settings.lower) / 2
    for start in range(0, len(x), _ROWS):
        with np.errstate(over="ignore"):
            u = (x[start : start + _ROWS].astype(np.float64) - (settings.lower + settings.upper) / 2) / half_range
        # A missing value counts as the middle of the bounds: the sum must not become NaN, which would reveal it.
        u = np.clip(np.nan_to_num(u, nan=0.0), -1, 1)
        steps = steps + whole_steps(np.stack([u, u**2 - 1], axis=1), settings.stddev)
    return steps


def _release_moments(
    x: np.ndarray, settings: MomentSettings, num_examples: int, draws: ExactDraws
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    first, second = add_noise(moment_steps(x, settings), settings.stddev, draws) / num_examples
    mean = np.clip(first, -1, 1)
    # In [-1, 1] a variance is at most 1; with noise it may come out larger, or close to zero or below.
    stddev = np.sqrt(np.clip(1 + second - mean**2, (2 * settings.smallest_stddev) ** 2, 1))
    half_range = (settings.upper - settings.lower) / 2
    mean, stddev = (settings.lower + settings.upper) / 2 + mean * half_range, stddev * half_range
    return tuple(mean.ravel().tolist()), tuple(stddev.ravel().tolist())
