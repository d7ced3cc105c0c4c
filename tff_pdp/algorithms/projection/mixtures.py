"""Fits mixtures of Gaussians to a few numbers, one for each client, and chooses the number of components.

All functions are graphs over `[clients]` for computations at the server; absent clients have weight zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

_MOST_STEPS = 200
# Responsibilities that change by less have converged.
_CONVERGED = 1e-8


class Mixture(NamedTuple):
    """A fitted mixture of G Gaussians.

    Attributes:
      means: float64 `[G]`.
      responsibilities: probability of each component given a client's value, float64 `[clients, G]`; zeros for absent
        clients.
      bic: Bayesian information criterion, float64; the smaller, the better.
    """

    means: tf.Tensor
    responsibilities: tf.Tensor
    bic: tf.Tensor


def fit_mixture(
    values: tf.Tensor, present: tf.Tensor, components: int, *, one_variance: bool, smallest_variance: float
) -> Mixture:
    """Fits a mixture by expectation maximisation, from the exact k-means clusters of the values.

    Args:
      values: float64 `[clients]`; values of absent clients are ignored but must be finite.
      present: float64 `[clients]`, 1 for clients that are present, else 0. At least one client is present.
      components: number G of Gaussians: 1, 2 or 3.
      one_variance: whether all Gaussians have the same variance (2 G parameters), or each its own (3 G - 1).
      smallest_variance: lower bound of variances, positive.

    Returns:
      The mixture. Its criterion is infinite where fewer than G clients are present.
    """
    number = tf.reduce_sum(present)

    def maximised(responsibilities: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        sizes = tf.reduce_sum(responsibilities, axis=0)
        safe = tf.maximum(sizes, 1e-12)
        means = tf.linalg.matvec(responsibilities, values, transpose_a=True) / safe
        squares = responsibilities * tf.square(values[:, tf.newaxis] - means)
        if one_variance:
            variances = tf.fill([components], tf.reduce_sum(squares) / number)
        else:
            variances = tf.reduce_sum(squares, axis=0) / safe
        return sizes / number, means, tf.maximum(variances, tf.constant(smallest_variance, tf.float64))

    def log_joint(shares: tf.Tensor, means: tf.Tensor, variances: tf.Tensor) -> tf.Tensor:
        squares = tf.square(values[:, tf.newaxis] - means) / variances
        constants = tf.math.log(tf.maximum(shares, 1e-300)) - 0.5 * tf.math.log(2 * 3.141592653589793 * variances)
        return constants - 0.5 * squares

    def step(count: tf.Tensor, responsibilities: tf.Tensor, change: tf.Tensor) -> tuple[tf.Tensor, ...]:
        joint = log_joint(*maximised(responsibilities))
        after = present[:, tf.newaxis] * tf.nn.softmax(joint, axis=1)
        return count + 1, after, tf.reduce_max(tf.abs(after - responsibilities))

    def goes_on(count: tf.Tensor, responsibilities: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
        del responsibilities
        return tf.logical_and(count < _MOST_STEPS, change > _CONVERGED)

    first = present[:, tf.newaxis] * exact_clusters(values, present, components)
    start = (tf.constant(0), first, tf.constant(1.0, tf.float64))
    _, responsibilities, _ = tf.while_loop(goes_on, step, start)
    fitted = maximised(responsibilities)
    likelihood = tf.reduce_sum(present * tf.reduce_logsumexp(log_joint(*fitted), axis=1))
    parameters = 2 * components if one_variance else 3 * components - 1
    bic = parameters * tf.math.log(number) - 2 * likelihood
    infinite = tf.constant(float("inf"), tf.float64)
    return Mixture(fitted[1], responsibilities, tf.where(number < components, infinite, bic))


def exact_clusters(values: tf.Tensor, present: tf.Tensor, components: int) -> tf.Tensor:
    """Finds the best k-means clusters in one dimension, by trying every cut of the sorted values.

    Args:
      values: float64 `[clients]`.
      present: float64 `[clients]`, 1 for clients that are present, else 0.
      components: number of clusters: 1, 2 or 3.

    Returns:
      The cluster of each client, one-hot, float64 `[clients, components]`, in ascending order of the clusters' means.

    Raises:
      ValueError: the number of clusters is not 1, 2 or 3.
    """
    if components not in (1, 2, 3):
        raise ValueError(f"components must be 1, 2 or 3, not {components}")
    clients = int(values.shape[0] or 0)
    order = tf.argsort(values, stable=True)
    weights = tf.gather(present, order)
    # Around their mean, so that differences of sums of squares keep their digits.
    centred = tf.gather(values - tf.reduce_sum(present * values) / tf.reduce_sum(present), order)
    sums, firsts, seconds = (
        tf.concat([tf.zeros([1], tf.float64), tf.cumsum(weights * power)], axis=0)
        for power in (tf.ones_like(centred), centred, tf.square(centred))
    )

    def spread(start: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        """Returns sums of squares around the means of `sorted[start:end]`; infinite without present clients."""
        size = tf.gather(sums, end) - tf.gather(sums, start)
        first = tf.gather(firsts, end) - tf.gather(firsts, start)
        second = tf.gather(seconds, end) - tf.gather(seconds, start)
        return tf.where(size > 0, second - tf.square(first) / tf.maximum(size, 1.0), float("inf"))

    ends = tf.range(clients + 1)
    if components == 1:
        cuts = [tf.constant(0)]
    elif components == 2:
        cuts = [tf.constant(0), tf.argmin(spread(tf.zeros_like(ends), ends) + spread(ends, 0 * ends + clients))]
    else:
        one, other = tf.meshgrid(ends, ends, indexing="ij")
        middle = tf.where(one < other, spread(one, other), float("inf"))
        costs = spread(0 * one, one) + middle + spread(other, 0 * other + clients)
        best = tf.argmin(tf.reshape(costs, [-1]))
        cuts = [tf.constant(0), tf.math.floordiv(best, clients + 1), tf.math.floormod(best, clients + 1)]
    starts = tf.stack([tf.cast(cut, tf.int32) for cut in cuts])
    ranks = tf.argsort(order)
    # The number of clusters that begin at or before a client's place.
    cluster = tf.reduce_sum(tf.cast(ranks[:, tf.newaxis] >= starts, tf.int32), axis=1) - 1
    return tf.one_hot(cluster, components, dtype=tf.float64)


def lowest_group(mixtures: Sequence[Mixture]) -> tf.Tensor:
    """Finds the clients of the component with the smallest mean, in the mixture with the smallest criterion.

    Args:
      mixtures: mixtures of the same values, with different numbers of components.

    Returns:
      bool `[clients]`: whether a client most probably belongs to this component. All present clients do where the best
      mixture has one component.
    """
    lowest = tf.stack([_is_lowest(mixture) for mixture in mixtures])
    return tf.gather(lowest, tf.argmin(tf.stack([mixture.bic for mixture in mixtures])))


def _is_lowest(mixture: Mixture) -> tf.Tensor:
    most = tf.argmax(mixture.responsibilities, axis=1)
    return tf.logical_and(
        tf.equal(most, tf.argmin(mixture.means)), tf.reduce_sum(mixture.responsibilities, axis=1) > 0.5
    )
