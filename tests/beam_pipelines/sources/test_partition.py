"""Partitions are partitions, in the shares asked for; the digits source writes the same bytes every time."""

import gzip
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from beam_pipelines.sources.partition import (
    dirichlet_partition,
    draw_class_mixes,
    draw_class_shares,
    draw_dirichlet_shares,
    partition_by_class_mixes,
    partition_by_shards,
    partition_by_shares,
    uniform_partition,
    write_digits_leaf,
)
from tests.rounding import standard_errors
from tff_pdp.errors import DataError


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 4), max_size=80),
    num_clients=st.integers(1, 8),
    concentration=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_is_a_partition(labels, num_clients, concentration, seed):
    labels = np.array(labels, np.int64)
    parts = dirichlet_partition(labels, num_clients, concentration, seed, min_examples=0)
    assert len(parts) == num_clients
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    again = dirichlet_partition(labels, num_clients, concentration, seed, min_examples=0)
    assert all(np.array_equal(*pair) for pair in zip(parts, again, strict=True))


def test_min_examples_and_concentration():
    labels = np.repeat(np.arange(10), 100)
    even = dirichlet_partition(labels, 5, 1e4, seed=0, min_examples=150)
    skewed = dirichlet_partition(labels, 5, 0.05, seed=0, min_examples=20)
    assert min(map(len, skewed)) >= 20
    assert np.ptp([len(part) for part in even]) < 40
    shares = [np.bincount(labels[part], minlength=10).max() / len(part) for part in skewed]
    assert np.mean(shares) > 0.25
    assert all(np.bincount(labels[part], minlength=10).max() / len(part) < 0.15 for part in even)


def test_more_than_there_is():
    with pytest.raises(DataError, match="40 examples could not be divided among 5 clients with at least 9 each"):
        dirichlet_partition(np.zeros(40, np.int64), 5, 1.0, 0, min_examples=9)


@pytest.mark.parametrize(("num_clients", "per_client"), [(30, 5), (10, 3), (20, 1), (1, 10), (7, 10)])
def test_class_shares(num_clients, per_client):
    shares = draw_class_shares(num_clients, 10, per_client, np.random.default_rng(0))
    assert ((shares > 0).sum(axis=1) == per_client).all()
    clients_per_class = num_clients * per_client // 10
    assert ((shares > 0).sum(axis=0) == clients_per_class).all()
    np.testing.assert_allclose(shares.sum(axis=0), 1)
    # Before they are divided by their sum, no share is more than 0.6 / 0.4 times another of its class.
    for column in shares.T:
        present = column[column > 0]
        assert present.max() <= 1.5 * present.min()
    assert clients_per_class == 1 or len(np.unique(shares[shares > 0])) == num_clients * per_client


def test_shares_by_hand():
    labels = np.array([1] * 10 + [0] * 4)
    shares = np.array([[0.5, 0.25], [0.0, 0.75], [0.5, 0.0]])
    parts = partition_by_shares(labels, shares, np.random.default_rng(0))
    assert [np.bincount(labels[part], minlength=2).tolist() for part in parts] == [[2, 2], [0, 8], [2, 0]]
    assert sorted(np.concatenate(parts)) == list(range(14))


def test_rounding_leaves_nothing_to_a_client_without_the_class():
    # 0.1 ten times adds up to 0.9999999999999999, of which 10 examples are 9 and a little.
    shares = np.array([[0.1]] * 10 + [[0.0]])
    parts = partition_by_shares(np.zeros(10, np.int64), shares, np.random.default_rng(0))
    assert sum(map(len, parts)) == 10 and not len(parts[-1])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 4), max_size=80),
    num_clients=st.integers(1, 8),
    concentration=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_class_mixes_and_uniform_partitions_are_partitions_of_even_sizes(labels, num_clients, concentration, seed):
    labels = np.array(labels, np.int64)
    mixes = draw_class_mixes(num_clients, 5, concentration, np.random.default_rng(seed))
    np.testing.assert_allclose(mixes.sum(axis=1), 1)
    for divide in (
        lambda: partition_by_class_mixes(labels, mixes, np.random.default_rng(seed)),
        lambda: uniform_partition(len(labels), num_clients, np.random.default_rng(seed)),
    ):
        parts = divide()
        assert len(parts) == num_clients
        assert sorted(np.concatenate(parts)) == list(range(len(labels)))
        assert np.ptp([len(part) for part in parts]) <= 1
        assert all(np.array_equal(*pair) for pair in zip(parts, divide(), strict=True))


def test_class_mixes_are_dirichlet():
    """Against the moments of Dir(a, ..., a) with 4 classes: mean 1/4, variance (1/4) (3/4) / (4 a + 1)."""
    for concentration in (0.1, 1.0, 10.0):
        mixes = draw_class_mixes(20_000, 4, concentration, np.random.default_rng(0))
        variance, errors = 3 / 16 / (4 * concentration + 1), standard_errors(3 * 2 * 4)
        # A class's share is Beta(a, 3 a), of which a sampled variance errs by the fourth moment.
        excess = float(stats.beta.stats(concentration, 3 * concentration, moments="k"))
        np.testing.assert_allclose(mixes.mean(axis=0), 0.25, atol=errors * math.sqrt(variance / len(mixes)))
        np.testing.assert_allclose(mixes.var(axis=0), variance, rtol=errors * math.sqrt((excess + 2) / len(mixes)))


def test_class_mixes_by_hand():
    """Two draws from a mix of .5, .4 and .1, of which the first two classes have one example each.

    One after the other, a used-up class being drawn again: {0, 1} has .5 x .4 / .5 + .4 x .5 / .6 = 11 / 15; {0, 2}
    has .5 x .1 / .5 + .1 x .5 = 3 / 20; {1, 2} has .4 x .1 / .6 + .1 x .4 = 8 / 75; {2, 2} has .01.
    """
    labels, mixes = np.array([0, 1, 2, 2]), np.array([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]])
    generator, draws = np.random.default_rng(0), 6000
    firsts = [tuple(labels[partition_by_class_mixes(labels, mixes, generator)[0]]) for _ in range(draws)]
    for drawn, probability in {(0, 1): 11 / 15, (0, 2): 3 / 20, (1, 2): 8 / 75, (2, 2): 0.01}.items():
        deviation = np.sqrt(probability * (1 - probability) / draws)
        assert abs(firsts.count(drawn) / draws - probability) < 4 * deviation


def test_clients_whose_classes_are_used_up_take_what_is_left():
    labels = np.array([0] * 3 + [1] * 3)
    parts = partition_by_class_mixes(labels, np.array([[1.0, 0.0], [1.0, 0.0]]), np.random.default_rng(0))
    assert [sorted(labels[part]) for part in parts] == [[0, 0, 0], [1, 1, 1]]


def test_dirichlet_shares_of_each_class_add_up_to_one_and_leave_no_client_below_the_smallest_number():
    labels = np.repeat(np.arange(10), 100)
    shares = draw_dirichlet_shares(labels, 5, 10, 0.3, 40, np.random.default_rng(0))
    assert shares is not None and shares.shape == (5, 10)
    np.testing.assert_allclose(shares.sum(axis=0), 1)
    parts = partition_by_shares(labels, shares, np.random.default_rng(1))
    assert min(map(len, parts)) >= 40 and np.ptp([len(part) for part in parts]) > 20
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    # Boundaries between clients are rounded to whole examples.
    assert np.abs(counts - 100 * shares).max() < 1


def test_dirichlet_shares_are_dirichlet_over_clients():
    """Against the moments of Dir(a, ..., a) over 4 clients: mean 1/4, variance (1/4) (3/4) / (4 a + 1)."""
    labels, generator = np.zeros(4, np.int64), np.random.default_rng(0)
    shares = draw_dirichlet_shares(labels, 4, 20_000, 0.5, 1, generator)
    while shares is None:
        shares = draw_dirichlet_shares(labels, 4, 20_000, 0.5, 1, generator)
    others, errors = shares[:, 1:], standard_errors(2 * 4)
    # The share of one client is Beta(a, 3 a), of which a sampled variance errs by the fourth moment.
    variance, excess = 3 / 16 / (4 * 0.5 + 1), float(stats.beta.stats(0.5, 1.5, moments="k"))
    np.testing.assert_allclose(others.mean(axis=1), 0.25, atol=errors * math.sqrt(variance / others.shape[1]))
    np.testing.assert_allclose(others.var(axis=1), variance, rtol=errors * math.sqrt((excess + 2) / others.shape[1]))


def test_dirichlet_shares_that_cannot_be():
    labels = np.zeros(40, np.int64)
    assert draw_dirichlet_shares(labels, 5, 1, 1.0, 9, np.random.default_rng(0)) is None
    # In a thousand draws none is as even as that.
    assert draw_dirichlet_shares(labels, 5, 1, 0.01, 8, np.random.default_rng(0)) is None


def test_shards_by_hand():
    # Sorted: three of class 0, five of class 1, four of class 2; shards of three are 000, 111, 112, 222.
    labels = np.array([2, 1, 0, 1, 2, 0, 1, 2, 1, 0, 2, 1])
    parts = partition_by_shards(labels, np.array([[2, 0], [3, 1]]), np.random.default_rng(0))
    assert sorted(np.concatenate(parts)) == list(range(12))
    assert [sorted(labels[part]) for part in parts] == [[0, 0, 0, 1, 1, 2], [1, 1, 1, 2, 2, 2]]
    # The examples of a class are shuffled: another generator gives others of class 1.
    drawn = {
        tuple(partition_by_shards(labels, np.array([[0], [1], [2], [3]]), np.random.default_rng(seed))[1])
        for seed in range(8)
    }
    assert len(drawn) > 1


def test_shards_of_a_number_that_is_no_multiple_differ_by_one():
    parts = partition_by_shards(np.arange(14) % 3, np.arange(4).reshape(4, 1), np.random.default_rng(0))
    assert [len(part) for part in parts] == [3, 4, 3, 4] and sorted(np.concatenate(parts)) == list(range(14))


def test_digits_are_complete_and_deterministic(tmp_path):
    first = write_digits_leaf(tmp_path / "a", num_clients=6, concentration=0.5, seed=3)
    second = write_digits_leaf(tmp_path / "b", num_clients=6, concentration=0.5, seed=3)
    assert first.read_bytes() == second.read_bytes()
    leaf = json.loads(gzip.decompress(first.read_bytes()))
    assert leaf["users"] == [f"silo_{silo:02d}" for silo in range(6)]
    assert sum(leaf["num_samples"]) == 1797
    pixels = np.array([image for data in leaf["user_data"].values() for image in data["x"]])
    assert pixels.shape == (1797, 64) and pixels.min() == 0 and pixels.max() == 1
