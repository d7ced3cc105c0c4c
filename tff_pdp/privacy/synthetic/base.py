"""Defines synthetic examples, and the settings class from which every generator of synthetic examples is derived."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import dp_accounting
import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.kinds import Kinds
from tff_pdp.privacy.accounting.accountants import LARGEST_NOISE_MULTIPLIER
from tff_pdp.privacy.accounting.events import require
from tff_pdp.privacy.facts import Claim
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws
from tff_pdp.settings import Count, Settings

# Squares of features must neither overflow nor vanish.
Bound = Annotated[float, Meta(ge=-1e30, le=1e30)]
# Words of 64 bits, of which float64 holds the first 53.
_DROPPED_BITS, _UNIT = np.uint64(11), 2.0**-53


@dataclasses.dataclass(frozen=True, eq=False)
class SyntheticExamples:
    """Examples that a generator has made.

    Attributes:
      x: features, float64 `[examples, *input_shape]`, within the public range.
      y: class of each example, int64 `[examples]`.
    """

    x: np.ndarray
    y: np.ndarray


class Generator(Settings, tag_field="kind"):
    """Settings of a generator, all of them public. A generator is a subclass with `event` and `fit`.

    Attributes:
      examples: number of synthetic examples, which must not be derived from the number of records.
      num_classes: number of classes that labels may have; 1 where there are no labels.
      low: lower bound of every feature.
      high: upper bound of every feature.
    """

    examples: Annotated[int, Meta(ge=1, le=10**8)]
    num_classes: Count = 1
    low: Bound = 0.0
    high: Bound = 1.0

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; low must be below high")

    @classmethod
    def table_settings(cls, radius: float) -> dict[str, Any]:
        """Returns settings that suit the features of a table; `radius` is the largest norm that a row can have."""
        return {}

    @property
    def why_not_private(self) -> str:
        """The reason why `fit` guarantees nothing with these settings; empty for a generator with a guarantee."""
        return ""

    @property
    def claim(self) -> tuple[Claim, str]:
        """The claim for the examples, and its reason in one line; `none` with `why_not_private`."""
        if self.why_not_private:
            return "none", self.why_not_private
        return (
            "formal",
            "noise is exact on a grid, and sums are exact; random bits are SHAKE-256's, with a key from the operating "
            "system",
        )

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one call of `fit`, under ADD_OR_REMOVE_ONE adjacency of one record.

        With `why_not_private`, the event only sets the noise, and describes no guarantee.
        """
        raise NotImplementedError

    def plan(self, input_shape: tuple[int, ...], noise_multiplier: float) -> dict[str, float]:
        """Returns numbers by which a reader can judge a release before it is made; names have the unit, in words.

        Every number is a function of the arguments and of the settings. No number: this kind of generator has none.

        Args:
          input_shape: shape of an example.
          noise_multiplier: as in `fit`.

        Raises:
          ConfigError: the shape does not fit the settings.
        """
        return {}

    def check_noise(self, noise_multiplier: float) -> None:
        """Checks that noise is positive, suits its grid and, in some generators, leaves something to learn.

        Raises:
          ConfigError: the noise multiplier is out of range, or noise exceeds whatever the records could add up to.
        """
        require(
            0 < noise_multiplier <= LARGEST_NOISE_MULTIPLIER,
            "noise_multiplier",
            noise_multiplier,
            f"in (0, {LARGEST_NOISE_MULTIPLIER:g}]",
        )

    def check(self, x: np.ndarray, y: np.ndarray) -> None:
        """Checks shapes and labels, as `fit` does before it releases anything; arguments and errors as in `fit`.

        A refusal is not private: it may depend on labels that are out of range, and on the number of records.
        """
        raise NotImplementedError

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        noise_multiplier: float,
        draws: ExactDraws,
        *,
        ids: Sequence[str] | None = None,
    ) -> SyntheticExamples:
        """Makes synthetic examples from records, by one private release.

        Guarantee: `event(noise_multiplier)` covers the result, for any features, labels in range, and any number of
          records, which is not public.
        Assumes: the result of every call is charged; the draws' key is secret and has no other use.

        Args:
          x: `[n, *input_shape]`, any numeric dtype; n may be 0.
          y: classes, whole numbers `[n]` in `[0, num_classes)`.
          noise_multiplier: standard deviation of the noise divided by the sensitivity of the release.
          draws: draws from a secret key.
          ids: a name for each record, which must not depend on other records; only generators that divide records into
            parts use the names. By default, a record's name is a digest of its content.

        Raises:
          ConfigError: a shape or a setting does not fit; nothing was released.
          DataError: a label is out of range; nothing was released. Or the release has too much noise to be used; this
            error is a function of the release alone.
        """
        raise NotImplementedError


GENERATORS: Kinds[type[Generator]] = Kinds(
    "generator",
    {
        "dp_gaussian": "tff_pdp.privacy.synthetic.gaussian:DpGaussian",
        "dp_merf": "tff_pdp.privacy.synthetic.merf:DpMerf",
        "dp_cgan": "tff_pdp.privacy.synthetic.cgan:DpCgan",
        "datalens": "tff_pdp.privacy.synthetic.datalens:DataLens",
    },
    "tff_pdp.generators",
)


def check_labels(x: np.ndarray, y: np.ndarray, num_classes: int) -> None:
    """Checks that there is a label for each example, and that labels are in range.

    Raises:
      ConfigError: the number of labels differs from the number of examples.
      DataError: a label is not in `[0, num_classes)`.
    """
    if np.shape(y) != (len(x),):
        raise ConfigError(f"there are {len(x)} examples, but labels of shape {list(np.shape(y))}")
    if not np.isin(y, np.arange(num_classes)).all():
        raise DataError(f"a label is not one of the classes 0 to {num_classes - 1}")


def draw_labels(counts: np.ndarray, examples: int, draws: ExactDraws) -> np.ndarray:
    """Draws labels, int64 `[examples]`, in the proportions of `counts`, in random order.

    The number of draws of each label differs from its exact share of `examples` by less than one, because the draws are
    evenly spaced, from a random start.

    Args:
      counts: not negative, with a positive sum, float64 `[classes]`.
      examples: number of labels.
      draws: random draws, which need not be secret, because the counts were released before.
    """
    ends = np.cumsum(counts / counts.sum())
    places = (np.arange(examples) + draw_uniform(1, draws)) / examples
    # The last end may have been rounded below a place.
    labels = np.minimum(np.searchsorted(ends, places, "right"), np.flatnonzero(counts)[-1])
    return labels[draws.permutation(examples)].astype(np.int64)


def draw_normals(shape: tuple[int, int], draws: ExactDraws) -> np.ndarray:
    """Draws standard normal numbers, float64, by Box and Muller's transform: for samples, never for noise.

    Rounding makes these numbers unfit as noise. Samples from released statistics need no noise.
    """
    size = shape[0] * shape[1]
    radius, angle = np.sqrt(-2 * np.log(draw_uniform(-(-size // 2), draws))), draw_uniform(-(-size // 2), draws)
    both = np.concatenate([radius * np.cos(2 * np.pi * angle), radius * np.sin(2 * np.pi * angle)])
    return both[:size].reshape(shape)


def draw_uniform(size: int, draws: ExactDraws) -> np.ndarray:
    """Draws uniform numbers inside of (0, 1), float64 `[size]`: for samples, never for noise."""
    return ((draws.words(size) >> _DROPPED_BITS).astype(np.float64) + 0.5) * _UNIT
