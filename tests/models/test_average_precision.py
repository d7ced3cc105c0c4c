import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from tests.rounding import gamma, probable_gamma
from tff_pdp.models.average_precision import average_precision, average_precision_of_arrays

# Inside a computation all is float64 but the result: so `gamma(2)`, of the one cast and of the float64 below.
# Few of them, so that most are tied; the two zeros are equal. All are numbers of float32, and none is subnormal: what
# only float64 tells apart, or what TensorFlow takes for zero, would be tied inside a computation but not elsewhere.
FEW = [float(np.float32(score)) for score in (-3e38, -2.0, -0.0, 0.0, 1e-7, 0.5, 0.50000006, 3e38)]
SCORES = st.sampled_from(FEW) | st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
EXAMPLES = st.lists(st.tuples(SCORES, st.integers(0, 1)), min_size=1, max_size=30)


def in_a_computation(scores, y, included=None):
    included = np.ones(np.shape(y), bool) if included is None else included
    return average_precision(tf.constant(scores, tf.float32), tf.constant(y, tf.int64), tf.constant(included)).numpy()


@pytest.mark.parametrize("function", [in_a_computation, average_precision_of_arrays])
@pytest.mark.parametrize(
    ("scores", "y", "expected"),
    [
        # Precision is 1 at the first positive example and 2/3 at the second.
        ([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0], 5 / 6),
        # The two of 0.7 are one threshold, at which 2 of 3 are positive; then 3 of 4.
        ([0.1, 0.7, 0.9, 0.7], [1, 1, 1, 0], (1 + 2 / 3 + 3 / 4) / 3),
        # All alike: the share of positive examples.
        ([2.0, 2.0, 2.0, 2.0, 2.0], [0, 1, 0, 0, 1], 2 / 5),
        ([1.0, 2.0, 3.0], [1, 0, 0], 1 / 3),
        # No score is less than any.
        ([math.nan, -5.0, math.nan], [1, 0, 0], 1 / 3),
        ([math.nan, 1.0, math.inf], [0, 0, 1], 1.0),
    ],
)
def test_by_hand(function, scores, y, expected):
    assert function(np.array(scores, np.float32), np.array(y)) == pytest.approx(expected, rel=gamma(2))


@settings(deadline=None, derandomize=True)
@given(examples=EXAMPLES)
def test_arrays_as_scikit_learn(examples):
    scores, y = (np.array(column) for column in zip(*examples, strict=True))
    found = average_precision_of_arrays(scores, y)
    # A quotient, a product and a sum for each example, by both.
    assert found == pytest.approx(_scikit_learn(scores, y), rel=2 * gamma(3 * len(y), np.float64), nan_ok=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(examples=EXAMPLES, others=EXAMPLES, data=st.data())
def test_a_stack_with_padding_anywhere_as_scikit_learn_on_what_is_included(examples, others, data):
    """Padding holds any score and any label."""
    padding = st.tuples(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), st.sampled_from([0, 1, 7]))
    longest = max(len(examples), len(others)) + 2
    rows, expected = [], []
    for own in (examples, others):
        padded = data.draw(st.lists(padding, min_size=longest - len(own), max_size=longest - len(own)))
        rows.append(data.draw(st.permutations([(*one, True) for one in own] + [(*one, False) for one in padded])))
        expected.append(_scikit_learn(*(np.array(column) for column in zip(*own, strict=True))))
    scores, y, included = (np.array([[one[part] for one in row] for row in rows]) for part in range(3))
    together = in_a_computation(scores, y, included)
    assert (together.dtype, together.shape) == (np.float32, (2,))
    np.testing.assert_allclose(together, expected, rtol=gamma(2))
    for row, found in enumerate(together):
        np.testing.assert_array_equal(in_a_computation(scores[row], y[row], included[row]), found)


def test_without_positive_examples_it_is_not_a_number():
    assert math.isnan(average_precision_of_arrays(np.array([1.0, 2.0]), np.array([0, 0])))
    assert math.isnan(average_precision_of_arrays(np.empty(0), np.empty(0)))
    found = in_a_computation([[1.0, 2.0]] * 3, [[0, 0], [1, 1], [1, 0]], [[True, True], [False, False], [False, True]])
    assert np.isnan(found).all()


def test_many_examples_lose_no_precision():
    """One in ten is positive and ranks among the others by a coin: sums of counts far beyond what float32 holds."""
    rng = np.random.default_rng(0)
    y = (rng.random(200_000) < 0.1).astype(np.int64)
    scores = (rng.normal(size=len(y)) + y).astype(np.float32).round(3)
    expected = average_precision_score(y, scores)
    assert average_precision_of_arrays(scores, y) == pytest.approx(
        expected, rel=2 * probable_gamma(3 * len(y), np.float64)
    )
    assert in_a_computation(scores, y) == pytest.approx(expected, rel=gamma(2))


def _scikit_learn(scores, y):
    if not y.any():
        return math.nan
    return average_precision_score(y, scores)
