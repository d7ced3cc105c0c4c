import collections
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.models.dense import build_linear, build_linear_regression
from tff_pdp.privacy.mechanisms.selection import NOTHING, build_selector

CLASSIFIER = build_linear((1,), 2)
REGRESSION = build_linear_regression((1,))


def stacked_data(y, num_examples=None, dtype=np.int64):
    """One client whose examples are all x = 1."""
    y = np.asarray(y, dtype)
    size = len(y) if num_examples is None else num_examples
    return collections.OrderedDict(
        x=tf.ones([1, len(y), 1]), y=tf.constant(y[np.newaxis]), num_examples=tf.constant([size], tf.int32)
    )


def constant_classifiers(classes):
    """Candidates that always answer with one class."""
    biases = np.eye(2, dtype=np.float32)[classes]
    return {"dense_0/kernel": tf.zeros([len(classes), 1, 2]), "dense_0/bias": tf.constant(biases)}


def seeds(number):
    return tf.constant(np.random.default_rng(number).integers(-(2**62), 2**62, [1, 2]))


def frequencies(selector, candidates, data, epsilon, draws=4000):
    number = next(iter(candidates.values())).shape[0]

    @tf.function
    def many(all_seeds):
        return tf.map_fn(
            lambda seed: selector(candidates, data, tf.constant([epsilon], tf.float32), seed[tf.newaxis])[0],
            all_seeds,
            fn_output_signature=tf.int32,
        )

    all_seeds = np.random.default_rng(1).integers(-(2**62), 2**62, [draws, 2])
    return np.bincount(many(tf.constant(all_seeds)).numpy(), minlength=number) / draws


def exponential_mechanism(scores, epsilon, sensitivity):
    """For scores that an example more never makes smaller."""
    weights = np.exp(-epsilon * np.asarray(scores) / sensitivity)
    return weights / weights.sum()


def test_frequencies_are_those_of_the_exponential_mechanism():
    # Three examples of class 1, one of class 0: errors 3, 1 and 3.
    data, candidates = stacked_data([1, 1, 1, 0]), constant_classifiers([0, 1, 0])
    found = frequencies(build_selector(CLASSIFIER, 1.0), candidates, data, epsilon=1.5)
    expected = exponential_mechanism([3, 1, 3], 1.5, 1.0)
    assert np.abs(found - expected).max() < 4.5 * math.sqrt(0.25 / 4000)


def test_a_regressions_losses_are_clipped():
    # Losses of 0.5 * (bias - y)^2, each at most 0.1: sums 0.2, 0.1 + 0.02 and 0.
    candidates = {
        "dense_0/kernel": tf.zeros([3, 1, 1]),
        "dense_0/bias": tf.constant([[9.0], [0.8], [1.0]]),
    }
    data = stacked_data([1.0, 1.0], dtype=np.float32)
    found = frequencies(build_selector(REGRESSION, 0.1), candidates, data, epsilon=3.0)
    expected = exponential_mechanism([0.2, 0.04, 0.0], 3.0, 0.1)
    assert np.abs(found - expected).max() < 4.5 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize("sensitivity", [1.0, 0.1])
def test_an_example_changes_no_log_probability_by_more_than_epsilon(sensitivity):
    # Every way in which one example can fit or not fit four candidates, the extremes of what it can add to the scores.
    scores, epsilon = sensitivity * np.array([5.0, 2.0, 0.0, 7.0]), 0.7
    before = np.log(exponential_mechanism(scores, epsilon, sensitivity))
    ranges = []
    for added in itertools.product([0.0, sensitivity], repeat=4):
        change = np.log(exponential_mechanism(scores + added, epsilon, sensitivity)) - before
        assert np.abs(change).max() <= epsilon
        ranges.append(np.ptp(change))
    # The privacy losses of all outcomes lie within epsilon of each other, and half the noise would be too little.
    assert max(ranges) == pytest.approx(epsilon)


def test_with_infinite_epsilon_the_best_is_selected_and_padding_counts_for_nothing():
    selector = build_selector(CLASSIFIER, 1.0)
    padded = stacked_data([1, 1, 0, 0, 0, 0, 0], num_examples=3)
    selected = selector(constant_classifiers([0, 1]), padded, tf.constant([math.inf]), seeds(0))
    assert selected.numpy().tolist() == [1]


def test_with_epsilon_zero_nothing_is_selected():
    selected = build_selector(CLASSIFIER, 1.0)(
        constant_classifiers([0, 1]), stacked_data([1, 1]), tf.constant([0.0]), seeds(0)
    )
    assert selected.numpy().tolist() == [NOTHING]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_counts_as_the_largest(loss):
    candidates = {"dense_0/kernel": tf.zeros([2, 1, 1]), "dense_0/bias": tf.constant([[loss], [0.9]])}
    data = stacked_data([1.0, 1.0], dtype=np.float32)
    selected = build_selector(REGRESSION, 0.1)(candidates, data, tf.constant([math.inf]), seeds(0))
    assert selected.numpy().tolist() == [1]


def test_clients_of_a_stack_select_for_themselves():
    data = collections.OrderedDict(
        x=tf.ones([3, 2, 1]), y=tf.constant([[1, 1], [0, 0], [1, 1]], tf.int64), num_examples=tf.constant([2, 2, 2])
    )
    three = tf.constant(np.random.default_rng(0).integers(0, 2**62, [3, 2]))
    selected = build_selector(CLASSIFIER, 1.0)(
        constant_classifiers([0, 1]), data, tf.constant([math.inf, math.inf, 0.0]), three
    )
    assert selected.numpy().tolist() == [1, 0, NOTHING]
