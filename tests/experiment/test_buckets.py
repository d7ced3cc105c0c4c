"""Padded sizes against every way to choose them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_pdp.experiment.examples import bucket_sizes

FEW_SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=9)
MANY_SIZES = st.lists(st.integers(0, 100_000), min_size=1, max_size=60)


def lowest_cost(sizes, max_buckets, rows_of_a_call):
    """By trying every set of at most so many padded sizes; one that is no client's own only wastes rows."""
    own = np.maximum(sizes, 1)
    *smaller, largest = sorted(set(own.tolist()))
    return min(
        sum(min(limit for limit in (*chosen, largest) if limit >= size) for size in own)
        + (len(chosen) + 1) * rows_of_a_call
        for number in range(min(max_buckets, len(smaller) + 1))
        for chosen in itertools.combinations(smaller, number)
    )


def check(sizes, padded, max_buckets):
    assert padded.dtype == np.int64
    assert padded.shape == (len(sizes),)
    assert (padded >= sizes).all() and (padded >= 1).all()
    assert len(set(padded)) <= max_buckets
    own = np.maximum(sizes, 1)
    assert padded.sum() <= max(own) * len(sizes), "more rows than with one bucket"
    # No bucket is larger than its largest client, and equal clients are treated alike.
    assert set(padded) <= set(own)
    assert len(set(zip(own, padded, strict=True))) == len(set(own))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=MANY_SIZES, max_buckets=st.integers(1, 6), rows_of_a_call=st.floats(0.0, 1e6))
def test_every_client_fits_and_little_is_wasted(sizes, max_buckets, rows_of_a_call):
    check(sizes, bucket_sizes(sizes, max_buckets=max_buckets, rows_of_a_call=rows_of_a_call), max_buckets)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes=FEW_SIZES, max_buckets=st.integers(1, 4), rows_of_a_call=st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0, 1e6]))
def test_nothing_costs_less(sizes, max_buckets, rows_of_a_call):
    padded = bucket_sizes(sizes, max_buckets=max_buckets, rows_of_a_call=rows_of_a_call)
    assert padded.sum() + len(set(padded)) * rows_of_a_call == lowest_cost(sizes, max_buckets, rows_of_a_call)


def test_by_hand():
    np.testing.assert_array_equal(bucket_sizes([1, 2, 100, 99], max_buckets=2), [2, 2, 100, 100])
    np.testing.assert_array_equal(bucket_sizes([1, 50, 100], max_buckets=1), [100, 100, 100])
    np.testing.assert_array_equal(bucket_sizes([1, 50, 100], max_buckets=3), [1, 50, 100])
    # One bucket takes 300 rows, two take 200 and three 199.
    np.testing.assert_array_equal(bucket_sizes([49, 50, 100], rows_of_a_call=0.9), [49, 50, 100])
    np.testing.assert_array_equal(bucket_sizes([49, 50, 100], rows_of_a_call=1.1), [50, 50, 100])
    np.testing.assert_array_equal(bucket_sizes([49, 50, 100], rows_of_a_call=99), [50, 50, 100])
    np.testing.assert_array_equal(bucket_sizes([49, 50, 100], rows_of_a_call=101), [100, 100, 100])


def test_no_clients_and_clients_without_examples():
    assert bucket_sizes([]).shape == (0,)
    np.testing.assert_array_equal(bucket_sizes([0, 0]), [1, 1])
    np.testing.assert_array_equal(bucket_sizes([0, 10]), [1, 10])
    np.testing.assert_array_equal(bucket_sizes([0, 10], rows_of_a_call=100), [10, 10])


@pytest.mark.parametrize("max_buckets", [1, 4, 8])
def test_more_different_sizes_than_are_tried(max_buckets):
    sizes = np.random.default_rng(0).lognormal(5, 1.2, 5000).astype(int) + 1
    assert len(set(sizes)) > 256
    padded = bucket_sizes(sizes, max_buckets=max_buckets)
    check(sizes, padded, max_buckets)
    if max_buckets == 4:
        # Four quantiles would be the simple choice.
        limits = np.quantile(sizes, [0.25, 0.5, 0.75, 1.0], method="higher")
        assert padded.sum() < limits[np.searchsorted(limits, sizes)].sum()
