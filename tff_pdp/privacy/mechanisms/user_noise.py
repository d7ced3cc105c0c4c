"""Reads what noise a server adds to the sum of users' updates: the `user_noise` part of a configuration."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow_privacy

from tff_pdp.errors import BudgetError, ConfigError
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms.user_queries import SeededAdaptiveClipSumQuery, SeededGaussianSumQuery, TreeSumQuery
from tff_pdp.settings import number, require_keys

# Halves, which a count is a sum of, are whole steps of the grid for noise up to 2**17.
_MOST_COUNT_NOISE = 1e5


@dataclasses.dataclass(frozen=True)
class UserMechanism:
    """The public parameters of the noised sums, as the computation and the accountant both use them.

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


@dataclasses.dataclass(frozen=True)
class FixedClip:
    """Gaussian noise on the sum of updates that are clipped to a given norm: DP-FedAvg (McMahan et al., ICLR 2018)."""

    def build_query(
        self, num_values: int, mechanism: UserMechanism, seeds: Any, generator: Generator = "philox"
    ) -> tensorflow_privacy.DPQuery:
        """The query of a mechanism; `seeds` are int64 `[2, 2]`, secret."""
        del num_values
        return SeededGaussianSumQuery(mechanism.clip_norm, _stddev(mechanism), seeds[0], generator)

    def sum_noise_multiplier(self, mechanism: UserMechanism) -> float:
        """That of the sum: the mechanism's own."""
        return mechanism.noise_multiplier


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """As `FixedClip`, with a clip norm that follows a quantile of the updates' norms (Andrew et al., NeurIPS 2021).

    Attributes:
      quantile: share of the updates that should not be clipped.
      learning_rate: of the logarithm of the clip norm.
      count_stddev: standard deviation of the noise on the number of updates below the clip norm, over the expected
        cohort. That count is released too, so the sum gets more noise than a fixed clip asks for.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float = 0.05

    def __post_init__(self):
        rules = (
            ("quantile", 0 < self.quantile < 1, "between 0 and 1"),
            ("learning_rate", self.learning_rate > 0, "positive"),
            ("count_stddev", self.count_stddev > 0, "positive"),
        )
        for name, holds, wanted in rules:
            if not holds:
                raise ConfigError(f"privacy.user_noise.{name} must be {wanted}, not {getattr(self, name)!r}")

    def build_query(
        self, num_values: int, mechanism: UserMechanism, seeds: Any, generator: Generator = "philox"
    ) -> tensorflow_privacy.DPQuery:
        """The query of a mechanism; `seeds` are int64 `[2, 2]`, secret.

        Raises:
          BudgetError: the noise on the count is too little for the mechanism's noise multiplier.
        """
        del num_values
        count_stddev = self.count_stddev * mechanism.expected_cohort
        return SeededAdaptiveClipSumQuery(
            mechanism.clip_norm,
            self.sum_noise_multiplier(mechanism),
            self.quantile,
            self.learning_rate,
            count_stddev if mechanism.noise_multiplier else 0.0,
            mechanism.expected_cohort,
            (seeds[0], seeds[1]),
            generator,
        )

    def sum_noise_multiplier(self, mechanism: UserMechanism) -> float:
        """That of the sum alone, more than that of sum and count together: `(z^-2 - (2 s)^-2)^(-1/2)`.

        Raises:
          BudgetError: the noise on the count is too little for the mechanism's noise multiplier, or above 1e5.
        """
        total, count_stddev = mechanism.noise_multiplier, self.count_stddev * mechanism.expected_cohort
        if total == 0:
            return 0.0
        if count_stddev > _MOST_COUNT_NOISE:
            raise BudgetError(
                f"privacy.user_noise.count_stddev {self.count_stddev:g} of {mechanism.expected_cohort:g} users is too "
                f"much noise on the count: give at most {_MOST_COUNT_NOISE / mechanism.expected_cohort:.2g}"
            )
        if total >= 2 * count_stddev:
            raise BudgetError(
                f"privacy.user_noise.count_stddev {self.count_stddev:g} of {mechanism.expected_cohort:g} users is too "
                f"little noise on the count for a noise multiplier of {total:.4g}: give at least "
                f"{0.6 * total / mechanism.expected_cohort:.2g}"
            )
        return (total**-2 - (2 * count_stddev) ** -2) ** -0.5


@dataclasses.dataclass(frozen=True)
class TreeNoise:
    """DP-FTRL: noise of a binary tree on the running sum, which needs no random cohorts (Kairouz et al., ICML 2021).

    Every user takes part once in an epoch of rounds, in any order; each epoch has a tree of its own.
    """

    def build_query(
        self, num_values: int, mechanism: UserMechanism, seeds: Any, generator: Generator = "philox"
    ) -> tensorflow_privacy.DPQuery:
        """The query of a mechanism; `seeds` are int64 `[2, 2]`, secret."""
        return TreeSumQuery(
            num_values,
            mechanism.clip_norm,
            _stddev(mechanism),
            seeds[0],
            rounds_per_epoch(mechanism.sampling_rate),
            generator,
        )

    def sum_noise_multiplier(self, mechanism: UserMechanism) -> float:
        """That of the sum: of every node of the tree."""
        return mechanism.noise_multiplier


_KEY = "privacy.user_noise"
UserNoise = FixedClip | AdaptiveClip | TreeNoise
_KINDS: Mapping[str, type[UserNoise]] = {"fixed_clip": FixedClip, "adaptive_clip": AdaptiveClip, "tree": TreeNoise}


def parse_user_noise(config: Mapping[str, Any]) -> UserNoise:
    """Reads `privacy.user_noise`: a `kind` of `fixed_clip`, `adaptive_clip` or `tree`, and that kind's attributes.

    Raises:
      ConfigError: a key or the kind is unknown, or a value out of range.

    >>> parse_user_noise({"kind": "adaptive_clip", "quantile": 0.8})
    AdaptiveClip(quantile=0.8, learning_rate=0.2, count_stddev=0.05)
    """
    kind = str(config.get("kind")) if isinstance(config, Mapping) else ""
    if kind not in _KINDS:
        raise ConfigError(f"{_KEY} is {config!r}; it must be a mapping whose `kind` is one of: {', '.join(_KINDS)}.")
    names = [field.name for field in dataclasses.fields(_KINDS[kind])]
    require_keys(_KEY, config, ["kind"], names)
    return _KINDS[kind](**{name: number(f"{_KEY}.{name}", config[name]) for name in names if name in config})


def rounds_per_epoch(share: float) -> int:
    """Rounds in which every user takes part once, where each takes that share of them.

    >>> rounds_per_epoch(0.25), rounds_per_epoch(0.3)
    (4, 4)
    """
    # A hair less: a share of 1/49 need not be below its inverse's inverse.
    return -int(-(1 - 1e-9) / share // 1)


def _stddev(mechanism: UserMechanism) -> float:
    # Not infinity times zero.
    return mechanism.noise_multiplier * mechanism.clip_norm if mechanism.noise_multiplier else 0.0
