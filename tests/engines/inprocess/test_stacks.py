"""Clients as stacks: shapes that differ, numbers that must, sizes, and the choice between stacks and one by one."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import (
    MODES,
    OPEN,
    SEQUENCE,
    VECTOR,
    Cases,
    count_everywhere,
    double,
    inprocess,
    messages_of,
    vectors,
)
from tff_pdp import _tff
from tff_pdp.processes.vectorizable import vectorizable

pytestmark = pytest.mark.timeout(120)

cases = Cases()


@cases.add
def ragged_clients():
    @_tff.tensorflow_computation(_tff.TensorType(np.float32, [None, 2]), OPEN)
    def compute(x, y):
        return tf.reduce_sum(x, axis=0) + tf.reduce_sum(y), 2 * x

    @_tff.federated_computation(_tff.at_clients(_tff.TensorType(np.float32, [None, 2])), _tff.at_clients(OPEN))
    def total(x, y):
        sums, doubled = _tff.federated_map(compute, (x, y))
        return _tff.federated_sum(sums), sums, doubled

    sizes = (3, 0, 5, 3, 1)
    x = [np.full([n, 2], i + 1, np.float32) for i, n in enumerate(sizes)]
    y = [np.full([n % 2], i, np.float32) for i, n in enumerate(sizes)]
    return total(x, y)


@cases.add
def many_clients_of_two_shapes():
    @_tff.tensorflow_computation(OPEN)
    def norm(x):
        return tf.norm(x)

    @_tff.federated_computation(_tff.at_clients(OPEN))
    def norms(x):
        return _tff.federated_map(norm, x), _tff.federated_mean(_tff.federated_map(norm, x))

    return norms([np.full([1 + i % 2], i, np.float32) for i in range(40)])


@cases.add_one_by_one
def results_of_different_shapes():
    @_tff.tensorflow_computation(np.int32)
    def count_up(n):
        return tf.range(n)

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def count_up_everywhere(n):
        return _tff.federated_map(count_up, n)

    return count_up_everywhere([1, 2, 0])


@pytest.mark.parametrize("name", cases)
def test_same_as_the_native_engine(name, mode, native_engine, caplog):
    cases.check(name, mode, native_engine, caplog)


# What clients of a stack do not share
# ------------------------------------


@_tff.tensorflow_computation(np.int32)
def draw(x):
    return tf.random.normal([4]) + tf.cast(x, tf.float32)


@_tff.federated_computation(_tff.at_clients(np.int32))
def draw_everywhere(x):
    @_tff.tensorflow_computation
    def draw_alone():
        return tf.random.uniform([4])

    return _tff.federated_map(draw, x), _tff.federated_eval(draw_alone, _tff.CLIENTS)


def test_random_numbers_differ_between_clients_and_calls(engine, caplog):
    with caplog.at_level("WARNING", logger="tff_pdp"), engine.install():
        drawn = [draw_everywhere([0] * 6) for _ in range(3)]
        at_server = [draw(0) for _ in range(3)]
    assert not messages_of(caplog)
    for kind in (0, 1):
        assert len(np.unique([value for values in drawn for value in values[kind]], axis=0)) == 3 * 6
    assert len(np.unique(at_server, axis=0)) == 3


def test_clients_of_a_stack_do_not_share_what_the_clock_says():
    @_tff.tensorflow_computation
    def read_clock():
        return tf.timestamp()

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def read_everywhere(x):
        return _tff.federated_map(draw, x), _tff.federated_eval(read_clock, _tff.CLIENTS)

    with inprocess("vectorized") as engine, engine.install():
        times = read_everywhere([0] * 6)[1]
    # Not 6: two threads may read the clock within one microsecond.
    assert len(set(times)) > 1


# What is stacked
# ---------------


@_tff.federated_computation(_tff.at_clients(VECTOR))
def double_and_sum(x):
    return _tff.federated_map(double, x), _tff.federated_sum(x)


def test_stacks_are_no_larger_than_asked_for():
    clients = vectors(5)
    with inprocess("vectorized", clients_per_call=2) as engine, engine.install():
        mapped, total = double_and_sum(clients)
    assert [len(group.indices) for group in mapped.groups] == [2, 2, 1]
    assert_same([mapped, total], [[2 * v for v in clients], np.sum(clients, axis=0)])


def test_auto_chooses_once_for_each_computation_and_keeps_to_it():
    choices = {}
    with inprocess("auto", choices=choices) as engine, engine.install():
        for num_clients in (3, 3, 7):
            _, total = double_and_sum(vectors(num_clients))
            assert_same(total, np.sum(vectors(num_clients), axis=0))
        assert list(choices.values()) in (["loop"], ["vectorized"])
        assert_same(count_everywhere([1, 2]), [np.int32(11), np.int32(12)])
        assert list(choices.values())[1:] == ["loop"]
    for chosen in MODES:
        resumed = dict.fromkeys(choices, chosen)
        with inprocess("auto", choices=resumed) as engine, engine.install():
            mapped, _ = double_and_sum(vectors(3))
        assert len(mapped.groups) == {"loop": 3, "vectorized": 1}[chosen]
        assert resumed == dict.fromkeys(choices, chosen)


def test_data_sets_are_computed_one_by_one_which_is_logged(caplog):
    @_tff.tensorflow_computation(SEQUENCE)
    def total(numbers):
        return numbers.reduce(0, lambda a, b: a + b)

    @_tff.federated_computation(_tff.at_clients(SEQUENCE))
    def totals(numbers):
        return _tff.federated_map(total, numbers)

    with caplog.at_level("WARNING", logger="tff_pdp"), inprocess("vectorized") as engine, engine.install():
        for _ in range(2):
            assert_same(totals([[1, 2], [3]]), [np.int32(3), np.int32(3)])
    assert messages_of(caplog) == ["clients are computed one by one, because data sets cannot be stacked"]


# Sums over a stack
# -----------------


@pytest.mark.parametrize("returns_values", [False, True])
def test_clients_values_of_which_only_the_sum_is_used_are_not_made(returns_values):
    asked = []

    def stacked(x):
        asked.append("values")
        return 2 * x

    def summed(x):
        asked.append("sum")
        return 2 * tf.reduce_sum(x, axis=0)

    twice = vectorizable(lambda x: 2 * x, stacked, num_shared=0, summed=summed)
    double_one = _tff.tensorflow_computation(lambda x: twice(x), VECTOR)

    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def compute(x):
        doubled = _tff.federated_map(double_one, x)
        total = _tff.federated_sum(doubled)
        return (total, doubled) if returns_values else total

    with inprocess("vectorized") as engine, engine.install():
        result = compute(vectors(3))
    total = result[0] if returns_values else result
    np.testing.assert_array_equal(total, 2 * np.sum(vectors(3), axis=0))
    assert sorted(set(asked)) == (["sum", "values"] if returns_values else ["sum"])
