"""Makes synthetic examples by one Gaussian for each class, with a pooled covariance, from one noised sum.

A record is mapped to a vector phi of norm at most 1: its class, its features by class, and the products of its
features. The Gaussian mechanism releases the sum of phi over all records, once. The noised sum gives noised counts,
means and second moments, from which labels and features are drawn. The number of released values grows with the square
of the number of features.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

import dp_accounting
import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError, DataError
from tff_pdp.privacy.accounting.accountants import LARGEST_NOISE_MULTIPLIER
from tff_pdp.privacy.accounting.events import require
from tff_pdp.privacy.mechanisms.exact_draws import GRID_BITS, ExactDraws, add_noise
from tff_pdp.privacy.synthetic.base import Generator, SyntheticExamples, check_labels, draw_labels, draw_normals
from tff_pdp.settings import Share

# A release of this many values takes some 25 seconds to draw. Rounding errors of norms (`unit_rows`) allow for up to
# 4,096 features, which are eight times as many values.
MOST_VALUES = 10**6
# Classes whose noised count is below this many standard deviations of the noise get no synthetic examples.
_DEVIATIONS = 4
# A share by which norms are shortened, above what float64 rounds in a norm of up to 4,096 squares.
_SHORTER = 2.0**-40
# Features become whole multiples of 2**-_BITS. Then the products of as many examples as are summed at once are whole
# numbers below 2**53, which float64 adds up without rounding, in whatever order.
_BITS, _ROWS = 20, 2**12
# Rounded down.
_ROOT_OF_TWO = Fraction(math.isqrt(2 * 4**60), 2**60)
# Counts need this share of phi's squared norm 1 to be left for products of features.
_LEAST_REST = 1e-3


class DpGaussian(Generator, tag="dp_gaussian"):
    """Draws each class from a Gaussian with a mean of its own and a covariance that all classes share.

    Attributes:
      radius: R, public L2 bound to which an example's features (after pooling) are clipped. Without a value, R is the
        largest norm that features between `low` and `high` can have, so that nothing is clipped. Noise on products
        grows with the square of R; an R a little below usual norms is best.
      pool: side, in pixels, of the squares of an image over which features are averaged before the release. A synthetic
        image has each average in all places of the square, so that its shape is that of the records.
      count_share: a, share of the sensitivity that class counts have.
      mean_share: b, share that class means have; products of features have the rest, c, so that a^2 + b^2 + c^2 = 1.
    """

    radius: Annotated[float, Meta(ge=1e-30, le=1e30)] | None = None
    pool: Annotated[int, Meta(ge=1, le=64)] = 1
    count_share: Share = 0.3
    mean_share: Share = 0.6

    def __post_init__(self):
        super().__post_init__()
        if not self.count_share**2 + self.mean_share**2 <= 1 - _LEAST_REST:
            raise ValueError(
                f"count_share is {self.count_share:g} and mean_share {self.mean_share:g}; the sum of their squares "
                f"must be at most {1 - _LEAST_REST:g}"
            )

    @property
    def product_share(self) -> float:
        """c, share of the sensitivity that products of features have; rounded so that a^2 + b^2 + c^2 <= 1 exactly."""
        rest = 1 - Fraction(self.count_share) ** 2 - Fraction(self.mean_share) ** 2
        share = math.sqrt(rest)
        return share if Fraction(share) ** 2 <= rest else math.nextafter(share, 0)

    def norm_bound(self, num_features: int) -> float:
        """Returns R, the L2 bound of an example's features."""
        largest = math.sqrt(num_features) * max(abs(self.low), abs(self.high))
        return largest if self.radius is None else min(self.radius, largest)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one release: a Gaussian sum, whose noise is drawn exactly and costs nothing more."""
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def check(self, x: np.ndarray, y: np.ndarray) -> None:
        """Checks shapes, labels, and the size of the release."""
        _check(x, y, self)

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        noise_multiplier: float,
        draws: ExactDraws,
        *,
        ids: Sequence[str] | None = None,
    ) -> SyntheticExamples:
        """Makes synthetic examples by `dp_gaussian`, whose sum treats all records alike, whatever their `ids`."""
        return dp_gaussian(x, y, self, noise_multiplier, draws)


def dp_gaussian(
    x: np.ndarray, y: np.ndarray, settings: DpGaussian, noise_multiplier: float, draws: ExactDraws
) -> SyntheticExamples:
    """Releases counts, means and second moments with noise, and draws synthetic examples from them.

    Guarantee: under ADD_OR_REMOVE_ONE adjacency, `settings.event(noise_multiplier)` covers the result: a record moves
      the sum by at most 1 in L2 norm (`moment_steps`), and the result is a function of the noised sum and of random
      bits. Under REPLACE_ONE adjacency a record moves the sum by at most 2.
    Assumes: as in `Generator.fit`.

    Source: Gaussian mechanism on sufficient statistics; symmetric matrices as in Dwork, Talwar, Thakurta and Zhang,
      "Analyze Gauss", STOC 2014. Eigenvalues below the edge of the noise's own spectrum (Wigner's semicircle) are
      dropped.

    Args, Raises: as in `Generator.fit`.

    >>> x, y = np.tile([[0.0, 1.0], [1.0, 0.5]], (500, 1)), np.tile([0, 1], 500)
    >>> settings = DpGaussian(examples=4, num_classes=2)
    >>> made = dp_gaussian(x, y, settings, 1e-3, ExactDraws(b"no secret, an example"))
    >>> sorted(made.y.tolist()), made.x[made.y == 1].round(1).tolist()
    ([0, 0, 1, 1], [[1.0, 0.5], [1.0, 0.5]])
    """
    require(
        0 < noise_multiplier <= LARGEST_NOISE_MULTIPLIER,
        "noise_multiplier",
        noise_multiplier,
        f"in (0, {LARGEST_NOISE_MULTIPLIER:g}]",
    )
    _check(x, y, settings)
    shape = pooled_shape(x.shape[1:], settings)
    num_features, bound = math.prod(shape), settings.norm_bound(math.prod(shape))
    noised = add_noise(moment_steps(x, y, settings, noise_multiplier), noise_multiplier, draws)
    # From here on, nothing depends on the records.
    sizes = (settings.num_classes, settings.num_classes * num_features)
    counts, sums, products = np.split(noised, np.cumsum(sizes))
    counts = counts / settings.count_share
    least = _DEVIATIONS * noise_multiplier / settings.count_share
    kept = np.flatnonzero(counts > least)
    if not len(kept):
        raise DataError(
            f"too few records for this budget: each class needs a noised count above {least:.4g}, which is "
            f"{_DEVIATIONS} standard deviations of the noise, and no class has one. The release has been made: its "
            "cost counts"
        )
    counts = counts[kept]
    sums = sums.reshape(settings.num_classes, num_features)[kept] * (bound / settings.mean_share)
    means = np.clip(sums / counts[:, None], settings.low, settings.high)
    spread = _spread(products, counts, means, bound, settings, noise_multiplier)
    labels = draw_labels(counts, settings.examples, draws)
    drawn = means[labels] + draw_normals((settings.examples, spread.shape[1]), draws) @ spread.T
    drawn = np.clip(drawn, settings.low, settings.high).reshape(settings.examples, *shape)
    return SyntheticExamples(_enlarged(drawn, settings.pool), kept[labels])


def moment_steps(x: np.ndarray, y: np.ndarray, settings: DpGaussian, noise_multiplier: float) -> np.ndarray:
    """Sums phi over records, in whole steps of `exact_draws`: Python's integers `[values]`.

    Let u be the clipped features, divided by R and rounded toward zero, and e_y the one-hot vector of the class. Then
    phi = (a e_y, b e_y (x) u, c svec(u u^T)), where (x) is the Kronecker product. svec lists the squares, and then each
    product of two different features once, times sqrt(2), row by row of the upper triangle.

    Guarantee: adding or removing one record changes the sum by at most 1 in L2 norm. The squared norm of phi is at most
      a^2 + b^2 |u|^2 + c^2 |u|^4, with |u| at most 1. Sums are exact. Before a sum of D values is rounded to steps, it
      is scaled down so that a difference of norm 1 shrinks by at least sqrt(D) steps; rounding can add no more than
      that to a difference. Values that are out of range or missing do not change this bound.
    Assumes: labels are in range.

    Args:
      x: `[n, *input_shape]`.
      y: `[n]`, classes.
      settings: public settings.
      noise_multiplier: standard deviation of the noise that will be added.
    """
    num_features = math.prod(pooled_shape(x.shape[1:], settings))
    counts = np.zeros(settings.num_classes, object)
    sums = np.zeros((settings.num_classes, num_features), object)
    products = np.zeros((num_features, num_features), object)
    for start in range(0, len(x), _ROWS):
        whole = np.trunc(unit_rows(x[start : start + _ROWS], settings) * 2.0**_BITS)
        products += (whole.T @ whole).astype(np.int64)
        labels = np.asarray(y[start : start + _ROWS])
        for label in np.unique(labels).tolist():
            own = whole[labels == label]
            counts[label] += len(own)
            sums[label] += own.sum(axis=0).astype(np.int64)
    different = products[np.triu_indices(num_features, 1)]
    unit, unit_of_products = Fraction(1, 2**_BITS), Fraction(1, 2 ** (2 * _BITS))
    blocks = [
        (counts, Fraction(settings.count_share)),
        (sums.ravel(), Fraction(settings.mean_share) * unit),
        (products.diagonal(), Fraction(settings.product_share) * unit_of_products),
        (different, Fraction(settings.product_share) * _ROOT_OF_TWO * unit_of_products),
    ]
    step = Fraction(noise_multiplier) / 2**GRID_BITS
    rounding = Fraction(math.isqrt(sum(len(block) for block, _ in blocks)) + 1) * step
    in_steps = [(1 - rounding) * scale / step for _, scale in blocks]
    pairs = zip(blocks, in_steps, strict=True)
    return np.concatenate([block * scale.numerator // scale.denominator for (block, _), scale in pairs])


def unit_rows(x: np.ndarray, settings: DpGaussian) -> np.ndarray:
    """Clips, pools and scales examples to vectors of L2 norm at most 1: float64 `[n, features]`.

    Guarantee: each row is a function of its own example alone, to the last bit, because every operation works on single
      elements, and IEEE 754 rounds such operations in only one way. For up to 4,096 features, the norm of a row is at
      most 1 - 2**-41, rounding included. Missing values count as the middle of the range.
    """
    rows = np.nan_to_num(x.astype(np.float64), nan=(settings.low + settings.high) / 2, posinf=np.inf, neginf=-np.inf)
    rows = np.clip(rows, settings.low, settings.high)
    if settings.pool > 1:
        places = list(itertools.product(range(settings.pool), repeat=2))
        # Library sums over axes may add in an order that depends on the number of rows.
        squares = sum(rows[:, down :: settings.pool, right :: settings.pool] for down, right in places)
        rows = np.asarray(squares) / len(places)
    rows = rows.reshape(len(x), math.prod(rows.shape[1:]))
    # Scaled first: squares of large values must not overflow.
    rows = rows / settings.norm_bound(rows.shape[1])
    squared = np.zeros(len(rows))
    for feature in rows.T:
        squared += feature * feature
    return rows * ((1 - _SHORTER) / np.maximum(np.sqrt(squared), 1))[:, None]


def pooled_shape(shape: tuple[int, ...], settings: DpGaussian) -> tuple[int, ...]:
    """Returns the shape of an example after pooling.

    Raises:
      ConfigError: the example is no image whose sides are multiples of `pool`.
    """
    if settings.pool == 1:
        return shape
    if len(shape) < 2 or shape[0] % settings.pool or shape[1] % settings.pool:
        raise ConfigError(
            f"pool is {settings.pool}, but examples have the shape {list(shape)}: pooling needs images whose height "
            "and width are multiples of it"
        )
    return (shape[0] // settings.pool, shape[1] // settings.pool, *shape[2:])


def _check(x: np.ndarray, y: np.ndarray, settings: DpGaussian) -> None:
    num_features = math.prod(pooled_shape(x.shape[1:], settings))
    num_values = settings.num_classes * (1 + num_features) + num_features * (num_features + 1) // 2
    if not num_features:
        raise ConfigError("the examples have no features")
    if num_values > MOST_VALUES:
        raise ConfigError(
            f"{num_features} features and {settings.num_classes} classes make a release of {num_values:,} values; at "
            f"most {MOST_VALUES:,} are possible. Pool images, or leave out features"
        )
    check_labels(x, y, settings.num_classes)


def _spread(
    products: np.ndarray,
    counts: np.ndarray,
    means: np.ndarray,
    bound: float,
    settings: DpGaussian,
    noise_multiplier: float,
) -> np.ndarray:
    """Returns a root of the covariance within classes, `[features, kept]`: V sqrt(lambda) of what is above the noise.

    Noise on a symmetric matrix of d features has the standard deviation z / sqrt(2) beside the diagonal, in phi's unit,
    so that its own largest eigenvalue is about 2 z sqrt(d / 2).
    """
    num_features, total = means.shape[1], counts.sum()
    scale = bound**2 / (settings.product_share * total)
    moments = np.zeros((num_features, num_features))
    moments[np.triu_indices(num_features, 1)] = products[num_features:] * (scale * math.sqrt(0.5))
    moments = moments + moments.T + np.diag(products[:num_features] * scale)
    values, vectors = np.linalg.eigh(moments - (means.T * (counts / total)) @ means)
    kept = values > 2 * noise_multiplier * math.sqrt(num_features / 2) * scale
    return vectors[:, kept] * np.sqrt(values[kept])


def _enlarged(x: np.ndarray, pool: int) -> np.ndarray:
    """Puts each average into all places of its square."""
    return x if pool == 1 else x.repeat(pool, axis=1).repeat(pool, axis=2)
