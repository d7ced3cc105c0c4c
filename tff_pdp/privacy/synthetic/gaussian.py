"""Makes synthetic examples by one Gaussian for each class, with a pooled covariance, from one noised sum.

A record is mapped to a vector phi of norm at most 1: its class, its features by class, and the products of its
features. The Gaussian mechanism releases the sum of phi over all records, once. The noised sum gives noised counts,
means and second moments, from which labels and features are drawn. The number of released values grows with the square
of the number of features.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any

import dp_accounting
import numpy as np
from msgspec import Meta

from tff_pdp.errors import ConfigError
from tff_pdp.privacy.mechanisms.exact_draws import ExactDraws, add_noise
from tff_pdp.privacy.synthetic.base import SyntheticExamples, draw_labels, draw_normals
from tff_pdp.privacy.synthetic.records import MOST_VALUES, PooledGenerator, check_records
from tff_pdp.privacy.synthetic.sums import (
    FRACTION_BITS,
    ClassSums,
    classes_above_noise,
    in_parts,
    least_count,
    remaining_share,
    root,
    to_steps,
)
from tff_pdp.settings import Share

# A feature whose variance is below this many standard deviations of the noise has no variance of its own.
_VARIANCE_DEVIATIONS = 2
# A share by which norms are shortened, above what float64 rounds in a norm of up to 4,096 squares. A release of so many
# features would have eight times MOST_VALUES.
_SHORTER = 2.0**-40
# Products of features of as many examples as are summed at once are whole numbers below 2**53, which float64 adds up
# without rounding, in whatever order.
_ROWS = 2**12
# Counts need this share of phi's squared norm 1 to be left for products of features.
_LEAST_REST = 1e-3


class DpGaussian(PooledGenerator, tag="dp_gaussian"):
    """Draws each class from a Gaussian with a mean of its own and a covariance that all classes share.

    Attributes:
      radius: R, public L2 bound to which an example's features (after pooling) are clipped. Without a value, R is the
        largest norm that features between `low` and `high` can have, so that nothing is clipped. Noise on products
        grows with the square of R; an R a little below usual norms is best.
      count_share: a, share of the sensitivity that class counts have.
      mean_share: b, share that class means have; products of features have the rest, c, so that a^2 + b^2 + c^2 = 1.
      own_variances: whether each feature also varies by itself, if its released variance is above the noise and
        directions with variances above the noise do not explain it. Otherwise, a feature of small variance may be
        constant. Variances of their own suit tables; in images, they are grain.
    """

    radius: Annotated[float, Meta(ge=1e-30, le=1e30)] | None = None
    count_share: Share = 0.3
    mean_share: Share = 0.6
    own_variances: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.count_share**2 + self.mean_share**2 <= 1 - _LEAST_REST:
            raise ValueError(
                f"count_share is {self.count_share:g} and mean_share {self.mean_share:g}; the sum of their squares "
                f"must be at most {1 - _LEAST_REST:g}"
            )

    @classmethod
    def table_settings(cls, radius: float) -> dict[str, Any]:
        """Returns the radius, and own variances."""
        return {"radius": radius, "own_variances": True}

    @property
    def product_share(self) -> float:
        """c, share of the sensitivity that products of features have; rounded so that a^2 + b^2 + c^2 <= 1 exactly."""
        return remaining_share(self.count_share, self.mean_share)

    def norm_bound(self, num_features: int) -> float:
        """Returns R, the L2 bound of an example's features."""
        largest = math.sqrt(num_features) * max(abs(self.low), abs(self.high))
        return largest if self.radius is None else min(self.radius, largest)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one release: a Gaussian sum, whose noise is drawn exactly and costs nothing more."""
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def plan(self, input_shape: tuple[int, ...], noise_multiplier: float) -> dict[str, float]:
        """Returns the size of the release, the noise on a count, and the least noised count that makes a class."""
        num_features = math.prod(self.pooled_shape(input_shape))
        return {
            "released_values": _num_values(num_features, self),
            "noise_deviation_of_a_class_count": noise_multiplier / self.count_share,
            "class_appears_from_noised_count": least_count(noise_multiplier / self.count_share),
        }

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
    settings.check_noise(noise_multiplier)
    num_features = _check(x, y, settings)
    bound = settings.norm_bound(num_features)
    noised = add_noise(moment_steps(x, y, settings, noise_multiplier), noise_multiplier, draws)
    # From here on, nothing depends on the records.
    sizes = (settings.num_classes, settings.num_classes * num_features)
    counts, sums, products = np.split(noised, np.cumsum(sizes))
    counts = counts / settings.count_share
    kept = classes_above_noise(counts, noise_multiplier / settings.count_share)
    counts = counts[kept]
    sums = sums.reshape(settings.num_classes, num_features)[kept] * (bound / settings.mean_share)
    means = np.clip(sums / counts[:, None], settings.low, settings.high)
    spread, own = _spread(products, counts, means, bound, settings, noise_multiplier)
    labels = draw_labels(counts, settings.examples, draws)
    drawn = means[labels] + draw_normals((settings.examples, spread.shape[1]), draws) @ spread.T
    if settings.own_variances:
        drawn += draw_normals((settings.examples, num_features), draws) * own
    return SyntheticExamples(settings.examples_of(drawn, x.shape[1:]), kept[labels])


def moment_steps(x: np.ndarray, y: np.ndarray, settings: DpGaussian, noise_multiplier: float) -> np.ndarray:
    """Sums phi over records, in whole steps of `exact_draws`: Python's integers `[values]`.

    Let u be the clipped features, divided by R and rounded toward zero, and e_y the one-hot vector of the class. Then
    phi = (a e_y, b e_y (x) u, c svec(u u^T)), where (x) is the Kronecker product. svec lists the squares, and then each
    product of two different features once, times sqrt(2), row by row of the upper triangle.

    Guarantee: adding or removing one record changes the sum by at most 1 in L2 norm. The squared norm of phi is at most
      a^2 + b^2 |u|^2 + c^2 |u|^4, with |u| at most 1. Sums are exact, and `to_steps` keeps the bound. Values that are
      out of range or missing do not change this bound.
    Assumes: labels are in range.

    Args:
      x: `[n, *input_shape]`.
      y: `[n]`, classes.
      settings: public settings.
      noise_multiplier: standard deviation of the noise that will be added.
    """
    num_features = math.prod(settings.pooled_shape(x.shape[1:]))
    by_class = ClassSums(settings.num_classes, num_features)
    products = np.zeros((num_features, num_features), object)

    def whole_rows(examples: np.ndarray) -> np.ndarray:
        return np.trunc(unit_rows(examples, settings) * 2.0**FRACTION_BITS)

    for whole, labels in in_parts(x, y, _ROWS, whole_rows):
        products += (whole.T @ whole).astype(np.int64)
        by_class.add(whole, labels)
    different = products[np.triu_indices(num_features, 1)]
    unit, unit_of_products = Fraction(1, 2**FRACTION_BITS), Fraction(1, 2 ** (2 * FRACTION_BITS))
    share_of_products = Fraction(settings.product_share) * unit_of_products
    blocks = [
        (by_class.counts, Fraction(settings.count_share)),
        (by_class.sums.ravel(), Fraction(settings.mean_share) * unit),
        (products.diagonal(), share_of_products),
        (different, share_of_products * root(Fraction(2))),
    ]
    return to_steps(blocks, noise_multiplier)


def unit_rows(x: np.ndarray, settings: DpGaussian) -> np.ndarray:
    """Clips, pools and scales examples to vectors of L2 norm at most 1: float64 `[n, features]`.

    Guarantee: each row is a function of its own example alone, to the last bit, as in `PooledGenerator.rows`. For up to
      4,096 features, the norm of a row is at most 1 - 2**-41, rounding included.
    """
    rows = settings.rows(x)
    # Scaled first: squares of large values must not overflow.
    rows = rows / settings.norm_bound(rows.shape[1])
    squared = np.zeros(len(rows))
    for feature in rows.T:
        squared += feature * feature
    return rows * ((1 - _SHORTER) / np.maximum(np.sqrt(squared), 1))[:, None]


def _num_values(num_features: int, settings: DpGaussian) -> int:
    return settings.num_classes * (1 + num_features) + num_features * (num_features + 1) // 2


def _check(x: np.ndarray, y: np.ndarray, settings: DpGaussian) -> int:
    num_features = check_records(x, y, settings)
    num_values = _num_values(num_features, settings)
    if num_values > MOST_VALUES:
        raise ConfigError(
            f"{num_features} features and {settings.num_classes} classes make a release of {num_values:,} values; at "
            f"most {MOST_VALUES:,} are possible. Pool images, or leave out features"
        )
    return num_features


def _spread(
    products: np.ndarray,
    counts: np.ndarray,
    means: np.ndarray,
    bound: float,
    settings: DpGaussian,
    noise_multiplier: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a root of the covariance within classes, and the rest of each feature's standard deviation.

    The root, `[features, kept]`, is V sqrt(lambda) of the eigenvalues that are above the noise. The rest, `[features]`,
    is the root of the variance that the kept eigenvalues lack, or 0 if that variance is not above the noise.

    Noise on a symmetric matrix of d features has the standard deviation z / sqrt(2) beside the diagonal, in phi's unit,
    so that its own largest eigenvalue is about 2 z sqrt(d / 2).
    """
    num_features, total = means.shape[1], counts.sum()
    scale = bound**2 / (settings.product_share * total)
    moments = np.zeros((num_features, num_features))
    moments[np.triu_indices(num_features, 1)] = products[num_features:] * (scale * math.sqrt(0.5))
    moments = moments + moments.T + np.diag(products[:num_features] * scale)
    covariance = moments - (means.T * (counts / total)) @ means
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 2 * noise_multiplier * math.sqrt(num_features / 2) * scale
    spread = vectors[:, kept] * np.sqrt(values[kept])
    rest = covariance.diagonal() - np.square(spread).sum(axis=1)
    return spread, np.sqrt(np.where(rest > _VARIANCE_DEVIATIONS * noise_multiplier * scale, rest, 0))
