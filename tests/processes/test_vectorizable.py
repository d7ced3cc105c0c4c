"""Stacks without idle reshapes: fewer operations, and the same bits as TensorFlow's own form."""

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.processes.vectorizable import map_stack

ROWS = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
SHARED = {
    "scalar": np.float32(0.3),
    "vector": np.array([0.1, 0.7], np.float32),
    "matrix": ROWS[0] * 2,
    "higher rank": ROWS[:2] + 1,
}


def operations_of(function, *arguments):
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    return [operation.type for operation in graph.get_operations()]


def test_operations_on_one_rank_are_not_reshaped():
    rows = tf.constant(ROWS)
    assert "Reshape" not in operations_of(lambda x: map_stack(lambda row: row * row + row, x), rows)
    # A row of lower rank is: it would meet the wrong axis.
    assert "Reshape" in operations_of(lambda x: map_stack(lambda row: row[0, 0] + row, x), rows)
    # TensorFlow's own function is as it was.
    assert "Reshape" in operations_of(lambda x: tf.vectorized_map(lambda row: row * row + row, x), rows)


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("is_known", [True, False], ids=["known rank", "unknown rank"])
def test_a_stack_gives_what_each_row_gives(shared, is_known):
    def one(row):
        scale = row[0, 0]
        return scale * row + shared, tf.maximum(row, shared), tf.where(row > 0, row, scale)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(ROWS.shape if is_known else None, tf.float32)])
    def stacked(rows):
        return map_stack(one, rows)

    for number, row in enumerate(tf.constant(ROWS)):
        for whole, alone in zip(stacked(tf.constant(ROWS)), one(row), strict=True):
            np.testing.assert_array_equal(whole[number], alone)
