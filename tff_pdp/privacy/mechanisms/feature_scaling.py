"""Features brought to a common scale: `x' = (x + shift) * scale`, by constants that are public or paid for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.silo_statistics import MomentSettings, SiloStatistics
from tff_pdp.settings import number, positive_number, require_keys

_KEY = "privacy.feature_scaling"
_KINDS = {
    "none": (),
    "public": ("shift", "scale"),
    "public_bounds": ("lower", "upper"),
    "dp_moments": ("lower", "upper", "noise_multiplier"),
    "paper_private_standardisation": (),
}
_DEFAULT_SMALLEST_STDDEV = 0.05
# With both, no scale overflows float32.
_SMALLEST_STDDEV = 1e-3
_SMALLEST_WIDTH = 1e-30

WHY_PRIVATE_STANDARDISATION_IS_NOT_PRIVATE = (
    "features were standardised with the exact mean and standard deviation of each silo's training records: removing "
    "one record changes every other row of its silo, so no (epsilon, delta) holds"
)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureScaling:
    """One silo's scaling.

    Attributes:
      shift: float32 `[*input_shape]`, added.
      scale: float32 `[*input_shape]`, multiplies the sum.
    """

    shift: np.ndarray
    scale: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Scales float32 `[n, *input_shape]`, or anything that converts to it: float32 of the same shape."""
        return (np.asarray(x, np.float32) + self.shift) * self.scale


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureScalingSettings:
    """How silos scale their features, the same way in each.

    Attributes:
      kind: as in `parse_feature_scaling`.
      public: the scaling of every silo, where it is known without data.
      moments: how silos release their features' moments, where they do; belongs into `StatisticsSettings`.
    """

    kind: str
    public: FeatureScaling | None = None
    moments: MomentSettings | None = None

    @property
    def why_not_private(self) -> str | None:
        """Why a run with this scaling can claim `none` only; None where it can claim more."""
        is_paper = self.kind == "paper_private_standardisation"
        return WHY_PRIVATE_STANDARDISATION_IS_NOT_PRIVATE if is_paper else None


def parse_feature_scaling(config: Mapping[str, Any], input_shape: Sequence[int]) -> FeatureScalingSettings:
    """Reads `privacy.feature_scaling`.

    Args:
      config: one of
        `{kind: none}`;
        `{kind: public, shift: .., scale: ..}`, constants chosen without looking at the data;
        `{kind: public_bounds, lower: .., upper: ..}`, which takes the bounds to -1 and 1;
        `{kind: dp_moments, lower: .., upper: .., noise_multiplier: .., smallest_stddev: ..}`, each silo's own noised
        mean and standard deviation, of features clipped to public bounds, where the deviation is at least
        `smallest_stddev` (0.05 if not given) times `upper - lower`;
        `{kind: paper_private_standardisation}`, see `paper_private_standardisation`.
        Shifts, scales and bounds are numbers, or lists whose shape broadcasts to `input_shape`.
      input_shape: of one example.

    Raises:
      ConfigError: naming the key that is unknown, missing or out of range.
    """
    kind = config.get("kind") if isinstance(config, Mapping) else None
    if kind not in _KINDS:
        raise ConfigError(f"{_KEY} is {config!r}; it must be a mapping whose `kind` is one of: {', '.join(_KINDS)}.")
    require_keys(_KEY, config, ["kind", *_KINDS[kind]], ["smallest_stddev"] if kind == "dp_moments" else [])
    if kind == "none":
        return FeatureScalingSettings(kind, public=public_scaling(0.0, 1.0, input_shape))
    if kind == "public":
        return FeatureScalingSettings(kind, public=public_scaling(config["shift"], config["scale"], input_shape))
    if kind == "public_bounds":
        return FeatureScalingSettings(kind, public=bounds_scaling(config["lower"], config["upper"], input_shape))
    if kind == "dp_moments":
        return FeatureScalingSettings(kind, moments=_moment_settings(config, input_shape))
    return FeatureScalingSettings(kind)


def scaling_of(settings: FeatureScalingSettings, statistics: SiloStatistics, x_train: np.ndarray) -> FeatureScaling:
    """Returns one silo's scaling.

    Guarantee: unless `settings.why_not_private`, a function of public constants and of `statistics` alone.

    Args:
      settings: those of the experiment.
      statistics: what the silo has released.
      x_train: `[n, *input_shape]`, the silo's training examples; only their shape is used, but in the paper's variant.

    Raises:
      DataError: the statistics lack moments of this shape; or, in the paper's variant, the silo has no examples.
    """
    if settings.public is not None:
        return settings.public
    if settings.moments is not None:
        return moments_scaling(statistics, x_train.shape[1:])
    return paper_private_standardisation(x_train)


def public_scaling(shift: Any, scale: Any, input_shape: Sequence[int]) -> FeatureScaling:
    """Builds a scaling by public constants: numbers, or lists whose shape broadcasts to `input_shape`.

    Raises:
      ConfigError: a constant is not finite, a scale is 0, or a shape does not fit.
    """
    shift, scale = _constants("shift", shift, input_shape), _constants("scale", scale, input_shape)
    if not scale.all():
        raise ConfigError(f"{_KEY}.scale is 0 for a feature; leave features out of the data set instead.")
    return FeatureScaling(shift.astype(np.float32), scale.astype(np.float32))


def bounds_scaling(lower: Any, upper: Any, input_shape: Sequence[int]) -> FeatureScaling:
    """Builds the scaling that takes public bounds to -1 and 1; what lies outside them stays outside.

    Raises:
      ConfigError: a lower bound is not below its upper bound, one is not finite, or a shape does not fit.
    """
    lower, upper = _bounds(lower, upper, input_shape)
    return public_scaling(-(lower + upper) / 2, 2 / (upper - lower), input_shape)


def moments_scaling(statistics: SiloStatistics, input_shape: Sequence[int]) -> FeatureScaling:
    """Builds the scaling to mean 0 and standard deviation 1 by a silo's released statistics.

    Raises:
      DataError: the statistics have no moments, or those of another number of features.
    """
    if statistics.mean is None or statistics.stddev is None or len(statistics.mean) != np.prod(input_shape, dtype=int):
        raise DataError(
            f"The silo's stored statistics lack moments of {' x '.join(map(str, input_shape))} features: they come "
            "from another data set or configuration."
        )
    mean, stddev = (np.reshape(values, input_shape) for values in (statistics.mean, statistics.stddev))
    return FeatureScaling((-mean).astype(np.float32), (1 / stddev).astype(np.float32))


def paper_private_standardisation(x_train: np.ndarray) -> FeatureScaling:
    """Builds the scaling by the exact mean and standard deviation of a silo's training examples.

    No guarantee: claim `none`. With one record more or less the mean moves, and with it every row of the silo, so that
    neighbouring data sets differ in all rows, while clipping and noise hide a difference in one. The constants are also
    part of whatever is served, and were released without noise. For comparison with published figures only.

    Args:
      x_train: `[n, *input_shape]`.

    Returns:
      A scaling to mean 0 and standard deviation 1; a feature that does not vary keeps its scale.

    Raises:
      DataError: there are no examples.

    Source: the published code of Liu et al., "On privacy and personalization in cross-silo federated learning", NeurIPS
    2022, which prepares each silo's data so.
    """
    if not len(x_train):
        raise DataError("A silo without training examples cannot standardise its features by them.")
    x = x_train.astype(np.float64)
    # Not the deviation itself: rounding leaves a constant feature with a tiny one.
    stddev = np.where(np.ptp(x, axis=0) == 0, 1.0, x.std(axis=0))
    return FeatureScaling((-x.mean(axis=0)).astype(np.float32), (1 / stddev).astype(np.float32))


def _moment_settings(config: Mapping[str, Any], input_shape: Sequence[int]) -> MomentSettings:
    lower, upper = _bounds(config["lower"], config["upper"], input_shape)
    smallest = number(f"{_KEY}.smallest_stddev", config.get("smallest_stddev", _DEFAULT_SMALLEST_STDDEV))
    if not _SMALLEST_STDDEV <= smallest <= 0.5:
        raise ConfigError(f"{_KEY}.smallest_stddev is {smallest!r}; it must be from {_SMALLEST_STDDEV:g} to 0.5.")
    noise_multiplier = positive_number(f"{_KEY}.noise_multiplier", config["noise_multiplier"])
    return MomentSettings(lower, upper, noise_multiplier, smallest)


def _bounds(lower: Any, upper: Any, input_shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = _constants("lower", lower, input_shape), _constants("upper", upper, input_shape)
    if not (upper - lower > _SMALLEST_WIDTH).all():
        raise ConfigError(f"{_KEY}.lower is not below {_KEY}.upper, by {_SMALLEST_WIDTH:g} or more, for every feature.")
    return lower, upper


def _constants(name: str, value: Any, input_shape: Sequence[int]) -> np.ndarray:
    try:
        if np.asarray(value).dtype == bool:
            raise TypeError
        constants = np.broadcast_to(np.asarray(value, np.float64), tuple(input_shape))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{_KEY}.{name} must be a number, or a list of numbers whose shape broadcasts to {tuple(input_shape)}."
        ) from None
    with np.errstate(over="ignore"):
        if not np.isfinite(constants.astype(np.float32)).all():
            raise ConfigError(f"{_KEY}.{name} must be finite in float32.")
    return constants
