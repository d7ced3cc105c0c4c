"""Scales features, `x' = (x + shift) * scale`, by constants that are public or released with noise.

Only `PaperPrivateStandardisation`, which is for comparisons, uses unprotected constants.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.mechanisms.silo_statistics import MomentSettings, SiloStatistics
from tff_pdp.settings import Finite, Positive, Settings

_KEY = "privacy.feature_scaling"
# Least width of bounds: with the least `smallest_stddev`, no scale overflows float32.
_SMALLEST_WIDTH = 1e-30

# Numbers, or lists whose shape broadcasts to that of an example.
Constants = Finite | tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureScaling:
    """One silo's scaling.

    Attributes:
      shift: addend of the features, float32 `[*input_shape]`.
      scale: factor of the shifted features, float32 `[*input_shape]`.
    """

    shift: np.ndarray
    scale: np.ndarray

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Scales features `[n, *input_shape]`, float32 or convertible to it; returns float32 of the same shape."""
        return (np.asarray(x, np.float32) + self.shift) * self.scale


class Scaler(Settings):
    """Scales every silo's features, by one rule for all silos."""

    why_not_private: ClassVar[str] = ""
    changes_nothing: ClassVar[bool] = False

    def public(self, input_shape: Sequence[int]) -> FeatureScaling | None:
        """Returns the scaling of all silos if it is known without looking at data, otherwise None.

        Raises:
          ConfigError: a constant does not broadcast to the shape, or is out of range.
        """
        return None

    def moments(self, input_shape: Sequence[int]) -> MomentSettings | None:
        """Returns settings for the release of moments, None for no release; arguments and errors as in `public`."""
        return None

    def scaling(self, statistics: SiloStatistics, x_train: np.ndarray) -> FeatureScaling:
        """Returns one silo's scaling.

        Guarantee: unless `why_not_private` states a reason, the result depends on public constants and `statistics`
        alone.

        Args:
          statistics: statistics that the silo has released.
          x_train: `[n, *input_shape]`, the silo's training examples; only the paper's variant uses the values.

        Raises:
          DataError: the statistics lack moments of this shape; or, in the paper's variant, the silo has no examples.
        """
        public = self.public(x_train.shape[1:])
        assert public is not None, "known without data, or made of what the silo has released"
        return public


class Unscaled(Scaler, tag_field="kind", tag="none"):
    """Uses features as they are."""

    changes_nothing: ClassVar[bool] = True

    def public(self, input_shape: Sequence[int]) -> FeatureScaling:
        """Returns the scaling that changes nothing."""
        return public_scaling(0.0, 1.0, input_shape)


class PublicConstants(Scaler, tag_field="kind", tag="public"):
    """Scales by constants that were chosen without looking at the data.

    Attributes:
      shift: addend of the features: a number, or lists whose shape broadcasts to an example's shape.
      scale: factor of the shifted features, in the same forms as `shift`.
    """

    shift: Constants
    scale: Constants

    def public(self, input_shape: Sequence[int]) -> FeatureScaling:
        """Returns the scaling by these constants."""
        return public_scaling(self.shift, self.scale, input_shape)


class PublicBounds(Scaler, tag_field="kind", tag="public_bounds"):
    """Scales features so that public bounds become -1 and 1; values outside stay outside.

    Attributes:
      lower: lower bound of the features: a number, or lists whose shape broadcasts to an example's shape.
      upper: upper bound, in the same forms.
    """

    lower: Constants
    upper: Constants

    def public(self, input_shape: Sequence[int]) -> FeatureScaling:
        """Returns the scaling by which the bounds become -1 and 1."""
        lower, upper = _bounds(self.lower, self.upper, input_shape)
        return public_scaling(-(lower + upper) / 2, 2 / (upper - lower), input_shape)


class DpMoments(Scaler, tag_field="kind", tag="dp_moments"):
    """Scales by each silo's own noised mean and standard deviation, of features clipped to public bounds.

    Attributes:
      lower: lower bound of the features: a number, or lists whose shape broadcasts to an example's shape.
      upper: upper bound, in the same forms.
      noise_multiplier: standard deviation of the noise divided by the sensitivity of the moments.
      smallest_stddev: lower limit of the released standard deviation, as a fraction of `upper - lower`.
    """

    lower: Constants
    upper: Constants
    noise_multiplier: Positive
    smallest_stddev: Annotated[float, Meta(ge=1e-3, le=0.5)] = 0.05

    def moments(self, input_shape: Sequence[int]) -> MomentSettings:
        """Returns settings for silos' release of feature moments."""
        lower, upper = _bounds(self.lower, self.upper, input_shape)
        return MomentSettings(lower, upper, self.noise_multiplier, self.smallest_stddev)

    def scaling(self, statistics: SiloStatistics, x_train: np.ndarray) -> FeatureScaling:
        """Returns the scaling to mean 0 and standard deviation 1 by the moments that the silo has released."""
        shape, mean, stddev = x_train.shape[1:], statistics.mean, statistics.stddev
        if mean is None or stddev is None or len(mean) != np.prod(shape, dtype=int):
            raise DataError(
                f"The silo's stored statistics lack moments of {' x '.join(map(str, shape))} features: they come "
                "from another data set or configuration."
            )
        shift, scale = -np.reshape(mean, shape), 1 / np.reshape(stddev, shape)
        return FeatureScaling(shift.astype(np.float32), scale.astype(np.float32))


class PaperPrivateStandardisation(Scaler, tag_field="kind", tag="paper_private_standardisation"):
    """Scales by the exact mean and standard deviation of each silo, as a paper does: then no privacy can be claimed."""

    why_not_private: ClassVar[str] = (
        "features were standardised with the exact mean and standard deviation of each silo's training records: "
        "removing one record changes every other row of its silo, so no (epsilon, delta) holds"
    )

    def scaling(self, statistics: SiloStatistics, x_train: np.ndarray) -> FeatureScaling:
        """Returns the scaling to mean 0 and standard deviation 1 by the exact moments of a silo's training examples.

        There is no guarantee, and the claim is `none`. With one record more or less, the mean moves, and with the mean
        every scaled row of the silo. Neighbouring data sets then differ in all rows, but clipping and noise hide a
        difference in only one row. Served models also contain the constants, without noise. Use this scaling only to
        compare with published figures.

        A feature that does not vary keeps its scale.

        Source: the published code of Liu et al., "On privacy and personalization in cross-silo federated learning",
        NeurIPS 2022, which prepares each silo's data in this way.
        """
        if not len(x_train):
            raise DataError("A silo without training examples has no mean and deviation to scale by.")
        x = x_train.astype(np.float64)
        # Not the deviation itself: rounding leaves a constant feature with a tiny one.
        stddev = np.where(np.ptp(x, axis=0) == 0, 1.0, x.std(axis=0))
        return FeatureScaling((-x.mean(axis=0)).astype(np.float32), (1 / stddev).astype(np.float32))


ScalingsWithoutRelease = Unscaled | PublicConstants | PublicBounds | PaperPrivateStandardisation
Scalings = ScalingsWithoutRelease | DpMoments


def public_scaling(shift: Any, scale: Any, input_shape: Sequence[int]) -> FeatureScaling:
    """Builds a scaling by public constants: numbers, or lists whose shape broadcasts to `input_shape`.

    Raises:
      ConfigError: a constant is not finite, a scale is 0, or a shape does not fit.
    """
    shift, scale = _constants("shift", shift, input_shape), _constants("scale", scale, input_shape)
    if not scale.all():
        raise ConfigError(f"{_KEY}.scale is 0 for a feature; to drop a feature, leave it out of the data set.")
    return FeatureScaling(shift.astype(np.float32), scale.astype(np.float32))


def _bounds(lower: Any, upper: Any, input_shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = _constants("lower", lower, input_shape), _constants("upper", upper, input_shape)
    if not (upper - lower > _SMALLEST_WIDTH).all():
        raise ConfigError(f"{_KEY}.lower must be below {_KEY}.upper by more than {_SMALLEST_WIDTH:g} in every feature.")
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
