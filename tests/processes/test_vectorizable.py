"""Stacks without idle reshapes: fewer operations, and the same bits as TensorFlow's own form."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import autograph_util

from tff_pdp.processes.vectorizable import map_stack

ROWS = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
SHARED = {
    "scalar": np.float32(0.3),
    "vector": np.array([0.1, 0.7], np.float32),
    "matrix": ROWS[0] * 2,
    "higher rank": ROWS[:2] + 1,
}


def operations_of(function, *arguments):
    """The types of the operations that the results need; pfor leaves the loop's body in the graph, unused."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    needed = [output.op for output in graph.outputs]
    for operation in needed:
        needed += [given.op for given in operation.inputs if given.op not in needed]
    return [operation.type for operation in needed]


def test_operations_on_one_rank_are_not_reshaped():
    rows = tf.constant(ROWS)
    assert "Reshape" not in operations_of(lambda x: map_stack(lambda row: row * row + row, x), rows)
    # A row of lower rank gets axes, two here: it would meet the wrong axis.
    of_two_ranks = operations_of(lambda x: map_stack(lambda row: row[0, 0] + row, x), rows)
    assert of_two_ranks.count("ExpandDims") == 2
    assert "Reshape" not in of_two_ranks
    # TensorFlow's own function is as it was.
    assert "Reshape" in operations_of(lambda x: tf.vectorized_map(lambda row: row * row + row, x), rows)


def test_conversions_of_calls_and_loops_are_not_rewritten_by_autograph(monkeypatch):
    rewritten = []
    in_autograph = autograph_util.py_func_from_autograph

    def noted(function, *options):
        rewritten.append(function.__name__)
        return in_autograph(function, *options)

    monkeypatch.setattr(autograph_util, "py_func_from_autograph", noted)

    def count_to(number):
        # A loop whose number of steps differs between rows, with a call in each step.
        step = tf.function(lambda index: index + 1, autograph=False)
        return tf.while_loop(lambda index: index < number, lambda index: [step(index)], [tf.constant(0)])[0]

    traced = tf.function(lambda rows: map_stack(count_to, rows), autograph=False)
    np.testing.assert_array_equal(traced(tf.constant([3, 0, 5])), [3, 0, 5])
    assert rewritten == []
    # TensorFlow's functions elsewhere are as they were.
    tf.function(lambda x: x + 1)(tf.constant(0))
    assert "<lambda>" in rewritten


@pytest.mark.parametrize("shape", [[4, 3, 2], [None, 3, 2]], ids=["known size", "unknown size"])
def test_elements_are_not_copied(shape):
    spec = tf.TensorSpec(shape, tf.float32)
    assert not {"Gather", "GatherV2"} & set(operations_of(lambda x: map_stack(lambda row: row + 1, x), spec))
    # TensorFlow's own function copies a stack whose size is unknown while it traces.
    copies = "GatherV2" in operations_of(lambda x: tf.vectorized_map(lambda row: row + 1, x), spec)
    assert copies == (shape[0] is None)


def test_rows_of_other_tensors_are_still_chosen():
    table = tf.constant(ROWS[0])

    @tf.function(autograph=False)
    def chosen(rows):
        numbers = tf.range(tf.shape(rows)[0]) % 3
        return map_stack(lambda own: own[1] + tf.gather(table, own[0]), (numbers, rows))

    expected = ROWS + ROWS[0][[0, 1, 2, 0]][:, np.newaxis]
    np.testing.assert_array_equal(chosen(tf.constant(ROWS)), expected)


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
