import itertools

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.projection.mixtures import Mixture, exact_clusters, fit_mixture, lowest_group

F64 = np.float64


def best_cost(values, components):
    """The smallest sum of squares around means, over all cuts of the sorted values, by trying each."""
    ordered = np.sort(values)
    costs = []
    for cuts in itertools.combinations(range(1, len(ordered)), components - 1):
        parts = np.split(ordered, cuts)
        costs.append(sum(np.square(part - part.mean()).sum() for part in parts))
    return min(costs)


@pytest.mark.parametrize("components", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_the_best_of_all(components, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=9) * rng.choice([0.1, 3.0], size=9) + 100
    found = exact_clusters(tf.constant(values), tf.ones(9, tf.float64), components).numpy()
    np.testing.assert_array_equal(found.sum(axis=1), np.ones(9))
    means = found.T @ values / found.sum(axis=0)
    assert (np.diff(means) > 0).all()
    assert np.square(values - found @ means).sum() == pytest.approx(best_cost(values, components), rel=1e-9)


def test_absent_clients_are_in_no_cluster_that_counts():
    values = np.array([0.0, 5.0, 0.1, 5.1, 1000.0, -1000.0])
    present = np.array([1.0, 1, 1, 1, 0, 0])
    found = exact_clusters(tf.constant(values), tf.constant(present), 2).numpy()
    np.testing.assert_array_equal(found[:4], [[1, 0], [0, 1], [1, 0], [0, 1]])
    mixture = fit_mixture(tf.constant(values), tf.constant(present), 2, one_variance=True, smallest_variance=1e-2)
    np.testing.assert_allclose(mixture.means, [0.05, 5.05], rtol=1e-9)
    np.testing.assert_array_equal(mixture.responsibilities[4:], np.zeros([2, 2]))


def test_four_clusters_are_refused():
    with pytest.raises(ValueError, match="components must be 1, 2 or 3, not 4"):
        exact_clusters(tf.zeros(5, tf.float64), tf.ones(5, tf.float64), 4)


def test_one_gaussian_has_the_values_mean_and_variance_and_a_criterion_by_hand():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    mixture = fit_mixture(tf.constant(values), tf.ones(4, tf.float64), 1, one_variance=False, smallest_variance=1e-6)
    np.testing.assert_allclose(mixture.means, [4.0])
    likelihood = -2 * (np.log(2 * np.pi * values.var()) + 1)
    np.testing.assert_allclose(mixture.bic, 2 * np.log(4) - 2 * likelihood)


@pytest.mark.parametrize("one_variance", [True, False])
def test_expectation_maximisation_ends_where_a_plain_implementation_ends(one_variance):
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(0, 1, 12), rng.normal(4, 1, 8)])
    mixture = fit_mixture(
        tf.constant(values), tf.ones(20, tf.float64), 2, one_variance=one_variance, smallest_variance=1e-2
    )
    soft = (values[:, None] > np.sort(values)[[0, 12]] - 1e-9) * [1.0, 0.0]
    soft[:, 1], soft[:, 0] = values > 2, values <= 2
    for _ in range(2000):
        sizes = soft.sum(axis=0)
        means = soft.T @ values / sizes
        squares = soft * np.square(values[:, None] - means)
        variances = squares.sum() / 20 if one_variance else squares.sum(axis=0) / sizes
        joint = sizes / 20 * np.exp(-np.square(values[:, None] - means) / 2 / variances) / np.sqrt(variances)
        soft = joint / joint.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mixture.means, means, atol=1e-5)
    np.testing.assert_allclose(mixture.responsibilities, soft, atol=1e-5)
    likelihood = np.log(joint.sum(axis=1) / np.sqrt(2 * np.pi)).sum()
    parameters = 4 if one_variance else 5
    np.testing.assert_allclose(mixture.bic, parameters * np.log(20) - 2 * likelihood, rtol=1e-6)


def test_more_components_than_clients_are_never_chosen():
    mixture = fit_mixture(
        tf.constant([1.0, 2.0, 3.0], tf.float64),
        tf.constant([1.0, 1.0, 0.0], tf.float64),
        3,
        one_variance=True,
        smallest_variance=1e-2,
    )
    assert np.isinf(mixture.bic)


def test_the_lowest_group_is_that_of_the_mixture_with_the_smallest_criterion():
    def mixture(means, responsibilities, bic):
        return Mixture(tf.constant(means, tf.float64), tf.constant(responsibilities, tf.float64), tf.constant(bic, F64))

    alone = mixture([1.0], [[1.0], [1.0], [0.0]], 10.0)
    pair = mixture([2.0, 1.0], [[0.9, 0.1], [0.2, 0.8], [0.0, 0.0]], 5.0)
    np.testing.assert_array_equal(lowest_group([alone, pair]), [False, True, False])
    np.testing.assert_array_equal(lowest_group([alone, pair._replace(bic=tf.constant(11.0, F64))]), [True, True, False])
