"""Defines the distributions of epsilon in `privacy.budgets` of kind `drawn`, as in papers on personalised budgets.

Source: Liu et al., "Projected federated averaging with heterogeneous differential privacy", VLDB 2021, table 1. The
authors' released code has other mixtures under the same names; the numbers here are those of the paper.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, ClassVar

from msgspec import Meta

from tff_pdp.settings import Finite, Positive, Settings


class Distribution(Settings):
    """A distribution of epsilon, from which silos draw independently."""

    def quantile(self, first: float, second: float) -> float:
        """Maps two independent uniform numbers in (0, 1) to an epsilon of this distribution."""
        raise NotImplementedError

    def draw(self, uniforms: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns every silo's epsilon by name, from two independent uniform numbers in (0, 1) for each silo."""
        return {name: self.quantile(*numbers) for name, numbers in uniforms.items()}


class LogUniform(Distribution, tag_field="kind", tag="log_uniform"):
    """Draws epsilons whose logarithm is uniform.

    Attributes:
      low: the smallest epsilon.
      high: the largest epsilon.
    """

    low: Positive
    high: Positive

    def __post_init__(self):
        _check_order(self.low, self.high)

    def quantile(self, first: float, second: float) -> float:
        """Maps two independent uniform numbers in (0, 1) to an epsilon of this distribution."""
        return self.low * math.exp(first * math.log(self.high / self.low))


class Uniform(Distribution, tag_field="kind", tag="uniform"):
    """Draws epsilons that are uniform between two numbers; by default, `Uniform` of the paper.

    Attributes:
      low: the smallest epsilon.
      high: the largest epsilon.
    """

    low: Positive = 1.0
    high: Positive = 10.0

    def __post_init__(self):
        _check_order(self.low, self.high)

    def quantile(self, first: float, second: float) -> float:
        """Maps two independent uniform numbers in (0, 1) to an epsilon of this distribution."""
        return self.low + first * (self.high - self.low)


class Gauss(Distribution, tag_field="kind", tag="gauss"):
    """Draws epsilons from one Gaussian; by default, `Gauss` of the paper.

    Attributes:
      mean: mean of the Gaussian.
      stddev: standard deviation of the Gaussian.
      minimum: smallest epsilon; lower draws are set to `minimum`.
    """

    mean: Finite = 3.0
    stddev: Positive = 1.0
    minimum: Positive = 0.01

    def quantile(self, first: float, second: float) -> float:
        """Maps two independent uniform numbers in (0, 1) to an epsilon of this distribution."""
        return max(self.minimum, NormalDist(self.mean, self.stddev).inv_cdf(first))


class Pareto(Distribution, tag_field="kind", tag="pareto"):
    """Draws epsilons from a Pareto distribution, under which few silos have large epsilons; by default, the paper's.

    The probability of an epsilon above x is `(minimum / x) ** shape`. The paper does not state minimum and shape; the
    defaults are the numbers in the paper's released code.

    Attributes:
      minimum: the smallest epsilon.
      shape: exponent of the tail; the smaller the exponent, the more silos have very large epsilons.
    """

    minimum: Positive = 0.5
    shape: Positive = 1.0

    def quantile(self, first: float, second: float) -> float:
        """Maps two independent uniform numbers in (0, 1) to an epsilon of this distribution."""
        return self.minimum * (1 - first) ** (-1 / self.shape)


class Component(Settings):
    """One Gaussian of a mixture.

    Attributes:
      share: fraction of the silos that draw from this Gaussian, in (0, 1].
      mean: mean of the Gaussian.
      stddev: standard deviation of the Gaussian.
    """

    share: Annotated[float, Meta(gt=0, le=1)]
    mean: Finite
    stddev: Positive


class Mixture(Distribution):
    """A mixture of Gaussians.

    With exact shares, `divide_by_shares` decides how many silos each component gets: with shares 0.9 and 0.1, the first
    component gets nine of ten silos, and the second gets one. The silos are ordered by a hash of seed and name; the
    first component gets the first silos, the second component the next silos, and so on. Each silo then draws its
    epsilon from its component. A component whose share is less than one silo may get no silo. With exact shares, a
    silo's epsilon depends on the names of all silos, and may change when other silos join or leave.

    Attributes:
      minimum: smallest epsilon; lower draws are set to `minimum`.
      exact_shares: whether each component gets exactly its share of the silos, by a hash of the silos' names; if false,
        every silo draws its component at random, so that the number of silos with a component varies.
    """

    minimum: Positive
    exact_shares: bool

    @property
    def parts(self) -> tuple[Component, ...]:
        """The Gaussians, whose shares sum to 1."""
        raise NotImplementedError

    def quantile(self, first: float, second: float) -> float:
        """Maps two independent uniform numbers in (0, 1) to an epsilon of this distribution, without exact shares."""
        below = itertools.accumulate(one.share for one in self.parts)
        chosen = next((one for one, end in zip(self.parts, below, strict=True) if first < end), self.parts[-1])
        return self._within(chosen, second)

    def draw(self, uniforms: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns every silo's epsilon by name, from two independent uniform numbers in (0, 1) for each silo."""
        if not self.exact_shares:
            return super().draw(uniforms)
        by_hash = iter(sorted(uniforms, key=lambda name: (uniforms[name], name)))
        numbers = divide_by_shares(len(uniforms), [one.share for one in self.parts])
        dealt = {
            name: component
            for component, number in zip(self.parts, numbers, strict=True)
            for name in itertools.islice(by_hash, number)
        }
        return {name: self._within(dealt[name], second) for name, (_, second) in uniforms.items()}

    def _within(self, component: Component, second: float) -> float:
        return max(self.minimum, NormalDist(component.mean, component.stddev).inv_cdf(second))


class NormalMixture(Mixture, tag_field="kind", tag="normal_mixture"):
    """Draws epsilons from a mixture of Gaussians, for example nine silos in ten around 0.5 and one around 10.

    Attributes:
      components: the Gaussians, whose shares sum to 1.
    """

    components: Annotated[tuple[Component, ...], Meta(min_length=1)]
    exact_shares: bool = False

    def __post_init__(self):
        total = math.fsum(one.share for one in self.components)
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"the shares of the components must sum to 1, not {total:g}")

    @property
    def parts(self) -> tuple[Component, ...]:
        """The Gaussians, whose shares sum to 1."""
        return self.components


class NamedMixture(Mixture):
    """A mixture of the paper, with exact shares by default."""

    gaussians: ClassVar[tuple[Component, ...]]

    minimum: Positive = 0.01
    exact_shares: bool = True

    @property
    def parts(self) -> tuple[Component, ...]:
        """The Gaussians, whose shares sum to 1."""
        return self.gaussians


class MixGauss1(NamedMixture, tag_field="kind", tag="mix_gauss_1"):
    """Draws nine in ten epsilons from N(0.1, 0.01), and one in ten from N(10, 0.1), as N(mean, stddev)."""

    gaussians = (Component(share=0.9, mean=0.1, stddev=0.01), Component(share=0.1, mean=10.0, stddev=0.1))


class MixGauss2(NamedMixture, tag_field="kind", tag="mix_gauss_2"):
    """Draws nine in ten epsilons from N(0.5, 0.01), and one in ten from N(10, 0.1), as N(mean, stddev)."""

    gaussians = (Component(share=0.9, mean=0.5, stddev=0.01), Component(share=0.1, mean=10.0, stddev=0.1))


class MixGauss3(NamedMixture, tag_field="kind", tag="mix_gauss_3"):
    """Draws nine in ten epsilons from N(1, 0.1), and one in ten from N(10, 0.1), as N(mean, stddev)."""

    gaussians = (Component(share=0.9, mean=1.0, stddev=0.1), Component(share=0.1, mean=10.0, stddev=0.1))


class MixGauss4(NamedMixture, tag_field="kind", tag="mix_gauss_4"):
    """Draws five in ten epsilons from N(0.1, 0.01), four from N(1, 0.1), one from N(10, 1), as N(mean, stddev)."""

    gaussians = (
        Component(share=0.5, mean=0.1, stddev=0.01),
        Component(share=0.4, mean=1.0, stddev=0.1),
        Component(share=0.1, mean=10.0, stddev=1.0),
    )


Distributions = LogUniform | NormalMixture | MixGauss1 | MixGauss2 | MixGauss3 | MixGauss4 | Uniform | Gauss | Pareto


def divide_by_shares(number: int, shares: Sequence[float]) -> list[int]:
    """Divides `number` things by shares that sum to 1, rounding to whole numbers by the method of largest remainders.

    If remainders are equal, the share that is listed first is rounded up. A small share may get nothing.

    >>> divide_by_shares(10, [0.9, 0.1]), divide_by_shares(7, [0.5, 0.4, 0.1]), divide_by_shares(3, [0.9, 0.1])
    ([9, 1], [3, 3, 1], [3, 0])
    """
    # Rounded, so that rounding errors of products decide nothing.
    quotas = [round(number * share, 9) for share in shares]
    seats = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda place: (seats[place] - quotas[place], place))
    for place in by_remainder[: number - sum(seats)]:
        seats[place] += 1
    return seats


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low {low:g} must be below high {high:g}")
