"""Padded sizes against every way to choose them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_pdp.data.buckets import bucket_sizes

FEW_SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=9)
MANY_SIZES = st.lists(st.integers(0, 100_000), min_size=1, max_size=60)


def fewest_rows(sizes, max_buckets):
    """By trying every set of at most so many padded sizes; one that is no client's size only wastes rows."""
    own = sorted(set(sizes))
    choices = [
        chosen
        for number in range(max_buckets)
        for chosen in itertools.combinations(own[:-1], min(number, len(own) - 1))
    ]
    return min(sum(min(limit for limit in (*chosen, own[-1]) if limit >= size) for size in sizes) for chosen in choices)


def check(sizes, padded, max_buckets):
    assert padded.dtype == np.int64
    assert padded.shape == (len(sizes),)
    assert (padded >= sizes).all()
    assert len(set(padded)) <= max_buckets
    assert padded.sum() <= max(sizes) * len(sizes), "more rows than with one bucket"
    # No bucket is larger than its largest client, and equal clients are treated alike.
    assert set(padded) <= set(sizes)
    assert len(set(zip(sizes, padded, strict=True))) == len(set(sizes))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=MANY_SIZES, max_buckets=st.integers(1, 6), min_saving=st.floats(0.0, 0.9))
def test_every_client_fits_and_little_is_wasted(sizes, max_buckets, min_saving):
    check(sizes, bucket_sizes(sizes, max_buckets=max_buckets, min_saving=min_saving), max_buckets)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=FEW_SIZES, max_buckets=st.integers(1, 4))
def test_nothing_saves_more_rows(sizes, max_buckets):
    padded = bucket_sizes(sizes, max_buckets=max_buckets, min_saving=0.0)
    assert padded.sum() == fewest_rows(sizes, max_buckets)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=FEW_SIZES, min_saving=st.floats(0.0, 0.5))
def test_each_further_bucket_saves_its_share(sizes, min_saving):
    padded = bucket_sizes(sizes, max_buckets=4, min_saving=min_saving)
    used = len(set(padded))
    if used > 1:
        assert padded.sum() < fewest_rows(sizes, 1) * (1 - min_saving)
    else:
        assert fewest_rows(sizes, 2) >= fewest_rows(sizes, 1) * (1 - min_saving)


def test_by_hand():
    np.testing.assert_array_equal(bucket_sizes([1, 2, 100, 99], max_buckets=2), [2, 2, 100, 100])
    np.testing.assert_array_equal(bucket_sizes([1, 50, 100], max_buckets=1), [100, 100, 100])
    np.testing.assert_array_equal(bucket_sizes([1, 50, 100], max_buckets=3), [1, 50, 100])
    # Two buckets take 151 rows of 300 and three take 150: not a tenth less.
    np.testing.assert_array_equal(bucket_sizes([49, 50, 100], max_buckets=3), [50, 50, 100])
    np.testing.assert_array_equal(bucket_sizes([49, 50, 100], max_buckets=3, min_saving=0.0), [49, 50, 100])


def test_no_clients_and_clients_without_examples():
    assert bucket_sizes([]).shape == (0,)
    np.testing.assert_array_equal(bucket_sizes([0, 0]), [0, 0])
    np.testing.assert_array_equal(bucket_sizes([0, 10]), [0, 10])


@pytest.mark.parametrize("max_buckets", [1, 4, 8])
def test_more_different_sizes_than_are_tried(max_buckets):
    sizes = np.random.default_rng(0).lognormal(5, 1.2, 5000).astype(int) + 1
    assert len(set(sizes)) > 256
    padded = bucket_sizes(sizes, max_buckets=max_buckets)
    check(sizes.tolist(), padded, max_buckets)
    if max_buckets == 4:
        # Four quantiles would be the simple choice.
        limits = np.quantile(sizes, [0.25, 0.5, 0.75, 1.0], method="higher")
        assert padded.sum() < limits[np.searchsorted(limits, sizes)].sum()
