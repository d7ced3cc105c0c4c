import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.projection.subspaces import (
    coordinates,
    joined,
    lifted,
    mean_of_rows,
    no_subspaces,
    parted,
    subspaces_of,
)


def nest(**values):
    return collections.OrderedDict((name, tf.constant(value, tf.float32)) for name, value in values.items())


def test_rows_span_the_subspace_and_none_beyond_the_rank():
    rows = np.zeros([4, 2, 3])
    rows[0, 0], rows[1, 0] = [1, 0, 0], [0, 2, 0]
    found = subspaces_of(nest(w=rows), tf.constant([1.0, 1, 0, 0]), 3, centred=False)
    basis = found.basis["w"].numpy()
    assert basis.shape == (3, 6)
    np.testing.assert_allclose(basis.T @ basis, np.diag([1, 1, 0, 0, 0, 0]), atol=1e-6)
    np.testing.assert_allclose(np.abs(basis[0]), [0, 1, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(basis[2], np.zeros(6))


@pytest.mark.parametrize("centred", [True, False])
def test_one_row_is_a_direction_through_zero(centred):
    found = subspaces_of(nest(w=[[3.0, 4.0], [9.0, 9.0]]), tf.constant([1.0, 0.0]), 1, centred=centred)
    np.testing.assert_allclose(np.abs(found.basis["w"]), [[0.6, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(found.centre["w"], [0.0, 0.0])


def test_rows_that_nobody_is_a_member_of_have_no_effect():
    rows = [[1.0, 2.0], [3.0, 4.0], [np.float32(1e30), 7.0]]
    found = subspaces_of(nest(w=rows), tf.constant([1.0, 1.0, 0.0]), 1, centred=True)
    np.testing.assert_allclose(found.centre["w"], [2.0, 3.0])
    np.testing.assert_allclose(np.abs(found.basis["w"]), [[0.5**0.5, 0.5**0.5]], rtol=1e-6)


def test_what_is_no_members_row_has_no_effect_even_if_it_is_not_a_number():
    rows = nest(w=[[3.0, 4.0], [np.nan, np.inf]])
    members = tf.constant([1.0, 0.0])
    found = subspaces_of(rows, members, 1, centred=True)
    np.testing.assert_allclose(np.abs(found.basis["w"]), [[0.6, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(mean_of_rows(rows, members)["w"], [3.0, 4.0])


@pytest.mark.parametrize("members", [2, 3])
def test_centred_rows_span_one_dimension_less(members):
    rng = np.random.default_rng(0)
    rows = nest(w=1 + 0.01 * rng.normal(size=[4, 50]))
    mask = tf.constant([1.0] * members + [0.0] * (4 - members))
    basis = subspaces_of(rows, mask, 4, centred=True).basis["w"].numpy()
    np.testing.assert_allclose(basis @ basis.T, np.diag([1.0] * (members - 1) + [0.0] * (5 - members)), atol=1e-6)


def test_equal_rows_span_nothing_around_their_mean():
    row = np.random.default_rng(0).normal(size=50)
    found = subspaces_of(nest(w=[row] * 3), tf.ones(3), 3, centred=True)
    np.testing.assert_array_equal(found.basis["w"], np.zeros([3, 50]))


def test_zeros_span_nothing_and_are_finite():
    found = subspaces_of(nest(w=np.zeros([3, 5])), tf.ones(3), 2, centred=True)
    np.testing.assert_array_equal(found.basis["w"], np.zeros([2, 5]))
    np.testing.assert_array_equal(found.centre["w"], np.zeros(5))


def test_nearly_equal_rows_have_an_orthonormal_basis():
    rng = np.random.default_rng(0)
    rows = np.ones([5, 40]) + 1e-5 * rng.normal(size=[5, 40])
    basis = subspaces_of(nest(w=rows), tf.ones(5), 5, centred=False).basis["w"].numpy()
    kept = basis[np.abs(basis).max(axis=1) > 0]
    assert len(kept) == 5
    np.testing.assert_allclose(kept @ kept.T, np.eye(5), atol=1e-6)


def test_a_point_of_the_subspace_comes_back():
    rng = np.random.default_rng(0)
    rows = nest(a=rng.normal(size=[4, 2, 3]), b=rng.normal(size=[4, 2]))
    found = subspaces_of(rows, tf.ones(4), 3, centred=True)
    for silo in range(4):
        update = collections.OrderedDict((name, value[silo]) for name, value in rows.items())
        again = lifted(found, coordinates(found, update), update)
        for name, value in update.items():
            np.testing.assert_allclose(again[name], value, atol=1e-5)


def test_empty_subspaces_have_the_shapes_of_real_ones():
    rows = nest(a=np.ones([3, 4, 5]), b=np.ones([3, 2]))
    real = subspaces_of(rows, tf.ones(3), 9, centred=True)
    none = no_subspaces(nest(a=np.ones([4, 5]), b=np.ones([2])), 9, 3)
    for one, other in zip(tf.nest.flatten(list(real)), tf.nest.flatten(list(none)), strict=True):
        assert one.shape == other.shape
    assert [value.shape[0] for value in none.basis.values()] == [3, 2]


def test_joined_weights_can_be_parted():
    weights = nest(a=[[1.0, 2.0]], b=[3.0])
    np.testing.assert_array_equal(joined(weights)["joint"], [1.0, 2.0, 3.0])
    for name, value in parted(joined(weights), weights).items():
        np.testing.assert_array_equal(value, weights[name])
    rows = nest(a=np.ones([2, 1, 2]), b=[[3.0], [4.0]])
    np.testing.assert_array_equal(joined(rows, leading=1)["joint"], [[1.0, 1.0, 3.0], [1.0, 1.0, 4.0]])


def test_the_mean_of_nobody_is_zero():
    rows = nest(w=[[1.0, 2.0], [3.0, 6.0]])
    np.testing.assert_array_equal(mean_of_rows(rows, tf.ones(2))["w"], [2.0, 4.0])
    np.testing.assert_array_equal(mean_of_rows(rows, tf.zeros(2))["w"], [0.0, 0.0])
