import collections
import itertools
import math

import mpmath
import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.models.dense import build_linear, build_linear_regression
from tff_pdp.privacy.mechanisms.random_bits import draw_bits
from tff_pdp.privacy.mechanisms.selection import (
    LOSS_STEPS,
    NOTHING,
    build_selector,
    exponential_times,
    first_of,
)

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


# --- the draw, by itself


def exact_times(words):
    """The times that words stand for, at fifty digits."""
    with mpmath.workdps(60):
        found = []
        for coin, *digits in np.asarray(words).T.tolist():
            uniform = mpmath.mpf(1) / 2
            for digit in reversed(digits):
                uniform = (digit + uniform) / 2**32
            found.append(-mpmath.log(uniform / 2) if coin < 2**31 else -mpmath.log(1 - uniform / 2))
        return found


def words_of_all_sizes(number, seed=0):
    """Words whose uniform numbers lie near zero, near one and between, over all sizes that a float64 tells apart."""
    random = np.random.default_rng(seed)
    words = random.integers(0, 2**32, [6, number], dtype=np.uint32)
    for place in range(0, number, 2):
        size, fill = int(random.integers(160)), 2**32 - 1 if place % 4 else 0
        whole, part = divmod(size, 32)
        words[1 : 1 + whole, place] = fill
        if whole < 5 and fill:
            words[1 + whole, place] |= np.uint32((2**32 - 1) ^ ((2**32 - 1) >> part))
        elif whole < 5:
            words[1 + whole, place] >>= np.uint32(part)
    return words


def test_tensorflows_functions_are_as_exact_as_the_bound_takes_them_to_be():
    """Eight units of 2**-53 for each function; with the digits, 51 for a time."""
    words = words_of_all_sizes(2000)
    times = exponential_times(tf.constant(words)).numpy()
    unit = 2.0**-53
    # Here the digits are what they are, so that of the 51 units the 30 remain that are not of digits never drawn.
    assert (
        max(abs(mpmath.mpf(time) / exact - 1) for time, exact in zip(times, exact_times(words), strict=True))
        < 30 * unit
    )
    exponents = np.random.default_rng(0).uniform(0, 100, 2000)
    powers = tf.exp(tf.constant(exponents)).numpy()
    with mpmath.workdps(60):
        errors = [
            abs(power / mpmath.exp(mpmath.mpf(x)) - 1)
            for x, power in zip(exponents.tolist(), powers.tolist(), strict=True)
        ]
    assert max(errors) < 8 * unit


def test_the_first_is_the_one_that_exact_arithmetic_finds():
    """Scores as whole numbers, times at sixty digits, bits drawn as in a round."""
    epsilon, sensitivity = 0.7, LOSS_STEPS
    found = collections.Counter()
    for number in range(100):
        scores = np.random.default_rng(number).integers(0, 5 * LOSS_STEPS, 4)
        words = tf.reshape(draw_bits(seeds(number)[0], 24), [6, 4])
        with mpmath.workdps(60):
            stretched = [
                time * mpmath.exp(mpmath.mpf(epsilon) * int(score) / sensitivity)
                for time, score in zip(exact_times(words.numpy()), scores, strict=True)
            ]
        expected = stretched.index(min(stretched))
        selected = first_of(tf.constant(scores, tf.float64), sensitivity, tf.constant(epsilon, tf.float64), words)
        assert selected.numpy() == expected
        found[expected] += 1
    assert min(found.values()) > 5 and len(found) == 4


@pytest.mark.parametrize("gap", [0, 1, 3, 8])
def test_enumerated_at_a_reduced_width_the_law_is_the_exponential_mechanisms(gap):
    """All pairs of times of two candidates that 13 bits make: the coin, and twelve of the uniform number."""
    bits = 12
    halves = (np.arange(2**bits, dtype=np.uint64) * 2 + 1) << np.uint64(31 - bits)
    words = np.zeros([6, 2 ** (bits + 1)], np.uint32)
    words[0, : 2**bits] = 2**31
    words[1] = np.tile(halves, 2)
    times = np.sort(exponential_times(tf.constant(words)).numpy())
    stretched = times * tf.exp(tf.constant(1.0 * gap, tf.float64)).numpy()
    # How many times of the better one come before each of the other's; at a tie the first in the list.
    wins = np.searchsorted(times, stretched, side="right").sum() / len(times) ** 2
    # A uniform number is the middle of one of 2**13 cells: its distribution function errs by half a cell, and so does
    # the other, so that the probability that one comes before the other errs by a cell at most.
    most = 2.0 ** -(bits + 1)
    for share, exact in ((wins, 1 / (1 + math.exp(-gap))), (1 - wins, 1 / (1 + math.exp(gap)))):
        assert most < 0.4 * exact
        assert abs(share - exact) <= most


def test_frequencies_of_many_draws_are_those_of_the_law():
    """Rare candidates too: a twentieth of a per cent among them."""
    scores, epsilon, draws = tf.constant([3.0, 0.0, 7.0, 1.0, 0.0], tf.float64), 1.1, 200_000
    words = draw_bits(seeds(5)[0], 6 * 5 * draws)
    times = tf.reshape(exponential_times(tf.reshape(words, [6, -1])), [draws, 5]).numpy()
    found = np.bincount(np.argmin(times * np.exp(epsilon * scores.numpy()), axis=1), minlength=5)
    expected = draws * exponential_mechanism(scores.numpy(), epsilon, 1.0)
    assert (np.abs(found - expected) < 4.5 * np.sqrt(expected)).all()


@pytest.mark.parametrize("fill", [0, 2**32 - 1])
def test_no_words_and_no_scores_make_a_selection_undefined(fill):
    words = tf.fill([6, 3], tf.constant(fill, tf.uint32))
    assert np.isfinite(exponential_times(words)).all() and (exponential_times(words).numpy() > 0).all()
    for epsilon in (1e-30, 1.0, 1e30, math.inf):
        scores = tf.constant([2.0**52, 0.0, 2.0**40], tf.float64)
        assert first_of(scores, 1, tf.constant(epsilon, tf.float64), words).numpy() in ((0, 1) if epsilon < 1 else (1,))


def test_a_score_does_not_depend_on_the_order_of_examples():
    random = np.random.default_rng(0)
    y = random.normal(0.5, 0.3, 3000).astype(np.float32)
    candidates = {"dense_0/kernel": tf.zeros([3, 1, 1]), "dense_0/bias": tf.constant([[0.5], [0.5], [0.4999]])}
    selector, selected = build_selector(REGRESSION, 0.1), []
    for number in range(20):
        given = [y, y[::-1], random.permutation(y)]
        own = {
            int(selector(candidates, stacked_data(one, dtype=np.float32), tf.constant([5.0]), seeds(number))[0])
            for one in given
        }
        assert len(own) == 1
        selected += own
    assert len(set(selected)) > 1
