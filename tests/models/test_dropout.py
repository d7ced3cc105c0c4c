import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.generators import chacha20, philox
from tff_pdp.models.dropout import RowDraws, dropout

KEY = tf.constant([5, -7], tf.int64)


def draws_of(rows, key=KEY, row_words=philox.row_words):
    return RowDraws(key, tf.constant(rows, tf.int64), row_words)


def given_words(*rows):
    """Draws whose words are these, whatever is asked."""
    return RowDraws(KEY, tf.zeros([len(rows)], tf.int64), lambda *_: tf.constant(rows, tf.uint32))


def test_masks_by_hand():
    # A rate of 1/4 drops halves of words below 2**14 = 16384. Lower halves decide first, then upper halves.
    words = [[16383 | 16384 << 16, 16384 | 16383 << 16], [65535 | 0 << 16, 0 | 65535 << 16]]
    x = tf.constant([[3.0, 6.0, 9.0], [3.0, 6.0, 9.0]])
    np.testing.assert_array_equal(dropout(x, 0.25, given_words(*words), 0), [[0.0, 8.0, 12.0], [4.0, 0.0, 0.0]])


def test_a_mask_of_a_smaller_shape_is_repeated():
    x = tf.ones([1, 2, 2])
    np.testing.assert_array_equal(dropout(x, 0.5, given_words([0 | 65535 << 16]), 0, [1, 2]), [[[0, 2], [0, 2]]])


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (1e-6, 1.0), (1.0, 0.0)])
def test_rates_that_drop_nothing_or_all_ask_for_no_words(rate, expected):
    x = tf.ones([2, 3])
    np.testing.assert_array_equal(dropout(x, rate, RowDraws(KEY, tf.zeros([2], tf.int64), None), 0), x * expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("row_words", [philox.row_words, chacha20.row_words])
def test_an_examples_mask_is_its_own(row_words):
    x = tf.ones([3, 100])
    masks = dropout(x, 0.5, draws_of([4, 9, 2], row_words=row_words), 0).numpy()
    other = dropout(x[:2], 0.5, draws_of([2, 4], row_words=row_words), 0).numpy()
    # Neither the place in the batch nor the other examples matter.
    np.testing.assert_array_equal(other, masks[[2, 0]])
    layers = dropout(x, 0.5, draws_of([4, 9, 2], row_words=row_words), 1).numpy()
    steps = dropout(x, 0.5, draws_of([4, 9, 2], tf.constant([6, -7], tf.int64), row_words), 0).numpy()
    for one in (layers, steps, masks[[1, 2, 0]]):
        assert (np.sum(one != masks, axis=1) > 20).all()


def test_the_share_that_is_dropped_is_the_rate():
    kept = dropout(tf.ones([100, 1000]), 0.3, draws_of(range(100)), 0).numpy() > 0
    # 100,000 independent decisions: the standard error is 0.00145, and six of them are allowed.
    assert abs(kept.mean() - 0.7) < 6 * 0.00145


def test_words_of_rows_are_keystreams():
    words = philox.row_words(KEY, tf.constant([3, 8], tf.int64), 10, 2)
    expected = philox.keystreams(tf.constant([[5, -4], [5, 1]], tf.int64), 10, 2)
    np.testing.assert_array_equal(words, expected)
    words = chacha20.row_words(KEY, tf.constant([3, 8], tf.int64), 40, 2)
    for row, number in enumerate((3, 8)):
        np.testing.assert_array_equal(words[row], chacha20.keystreams(KEY[tf.newaxis], 40, 2 * 2**40 + number)[0])
