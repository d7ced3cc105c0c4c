"""What `auto` chooses and keeps, and under which name."""

import os
import threading

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import SEQUENCE, VECTOR, double, inprocess, vectors
from tff_pdp import _tff
from tff_pdp.engines.inprocess import execution
from tff_pdp.engines.inprocess.clients import ClientWork, Lanes
from tff_pdp.engines.inprocess.program import fingerprint, lower
from tff_pdp.processes.vectorizable import vectorizable

pytestmark = pytest.mark.timeout(120)


def at_clients(function, member=VECTOR):
    @_tff.federated_computation(_tff.at_clients(member))
    def compute(x):
        return _tff.federated_map(_tff.tensorflow_computation(function, member), x)

    return compute


def scale(factor):
    return lambda x: factor * x


def repeat(times):
    return lambda x: tf.while_loop(lambda i, _: i < times, lambda i, total: (i + 1, 2 * total), (0, x))[1]


def in_vectorizable(factor):
    scaled = vectorizable(lambda x: factor * x, lambda x: factor * x, num_shared=0)
    return lambda x: scaled(x)  # TFF takes no functions of any number of arguments.


def in_functions(factor):
    @tf.function
    def inner(x):
        return tf.cond(x[0] > 0, lambda: factor * x, lambda: x)

    @tf.function
    def outer(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(inner(x) ** 2)
        return tape.gradient(loss, x)

    return outer


def in_state(factor):
    def compute(x):
        variable = tf.Variable(x)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [float(factor)]), -1.0)
        with tf.control_dependencies([variable.assign_add(x)]):
            return variable.read_value() * table.lookup(tf.constant("a"))

    return compute


def in_data_set(factor):
    def compute(x):
        rows = tf.data.Dataset.from_tensor_slices(x).map(lambda row: factor * row).batch(2)
        return rows.reduce(0.0, lambda total, row: total + tf.reduce_sum(row))

    return compute


@pytest.mark.parametrize(
    "build", [scale, repeat, in_vectorizable, in_functions, in_state, in_data_set], ids=lambda build: build.__name__
)
def test_a_computation_has_the_same_name_whenever_it_is_built_and_no_other_has_it(build):
    first = fingerprint(lower(at_clients(build(2))))
    tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([], tf.float32))
    tf.data.Dataset.range(3).map(lambda x: x + 1)
    assert fingerprint(lower(at_clients(build(2)))) == first
    assert fingerprint(lower(at_clients(build(3)))) != first


def test_computations_that_differ_in_their_order_alone_have_other_names():
    def in_order(first, second):
        @_tff.federated_computation(_tff.at_clients(VECTOR))
        def compute(x):
            mapped = [
                _tff.federated_map(_tff.tensorflow_computation(function, VECTOR), x) for function in (first, second)
            ]
            return tff.federated_sum(mapped[0]), tff.federated_mean(mapped[1])

        return fingerprint(lower(compute))

    assert in_order(scale(2), repeat(2)) != in_order(repeat(2), scale(2))


def test_computations_of_the_same_types_do_not_share_a_choice():
    stackable, not_stackable = at_clients(lambda x: 2 * x), at_clients(repeat(3))
    choices = {}
    with inprocess("auto", choices=choices) as engine, engine.install():
        assert_same(list(not_stackable(vectors(6))), [8 * x for x in vectors(6)])
        assert_same(list(stackable(vectors(6))), [2 * x for x in vectors(6)])
    assert list(choices) == [fingerprint(lower(each)) for each in (not_stackable, stackable)]
    assert choices[fingerprint(lower(not_stackable))] == "loop"


def test_data_that_fail_in_both_forms_leave_no_choice():
    compute = at_clients(lambda x: tf.debugging.check_numerics(x, "not a number"))
    choices = {}
    with inprocess("auto", choices=choices) as engine, engine.install():
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
            compute([np.full(3, np.nan, np.float32)] * 6)
        assert not choices
        compute(vectors(6))
    assert len(choices) == 1


def test_errors_of_stacks_alone_leave_the_loop(monkeypatch):
    run = ClientWork.run

    def run_without_room(work, chunks, sums):
        if work.mode == "vectorized":
            raise tf.errors.ResourceExhaustedError(None, None, "no room for a stack")
        return run(work, chunks, sums)

    monkeypatch.setattr(ClientWork, "run", run_without_room)
    choices = {}
    with inprocess("auto", choices=choices) as engine, engine.install():
        assert_same(list(at_clients(scale(2))(vectors(6))), [2 * x for x in vectors(6)])
    assert list(choices.values()) == ["loop"]


@pytest.mark.parametrize("cores", [1, 2])
def test_with_two_cores_the_loop_is_prepared_beside_the_stacks(cores, monkeypatch):
    build, threads = execution.build_client_step, {}

    def noted(*arguments, stacked, compiled):
        assert stacked not in threads, "each form is traced once"
        threads[stacked] = threading.get_ident()
        return build(*arguments, stacked=stacked, compiled=compiled)

    monkeypatch.setattr(execution, "build_client_step", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    with inprocess("auto") as engine, engine.install():
        assert_same(list(at_clients(scale(2))(vectors(6))), [2 * x for x in vectors(6)])
    assert threads[True] == threading.get_ident()
    assert (threads[False] == threading.get_ident()) == (cores == 1)


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_beside_a_block_is_raised_unless_the_block_has_one(cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    lanes = Lanes("/CPU:0")

    def fail():
        raise ValueError("beside the block")

    with pytest.raises(ValueError, match="beside the block"), lanes.beside(fail):
        pass
    with pytest.raises(ValueError, match="in the block"), lanes.beside(fail):
        raise ValueError("in the block")


def test_a_computation_without_graphs_has_a_name():
    @_tff.federated_computation(_tff.at_clients(SEQUENCE))
    def same(x):
        return x

    assert len({fingerprint(lower(each)) for each in (same, double)}) == 2


@pytest.mark.parametrize(
    ("calls", "seconds", "is_tried"),
    [(3, 0.0, False), (3, 1e3, True), (execution._FEW_CALLS + 1, 0.0, True), (None, 0.0, True)],
)
def test_stacks_are_not_tried_where_they_cannot_save_what_the_trial_costs(calls, seconds, is_tried, monkeypatch):
    build, traced = execution.build_client_step, []

    def noted(*arguments, stacked, compiled):
        traced.append(stacked)
        return build(*arguments, stacked=stacked, compiled=compiled)

    # A call after the first.
    monkeypatch.setattr(execution.LoadedProgram, "_seconds", lambda *_: seconds)
    monkeypatch.setattr(execution, "build_client_step", noted)
    choices = {}
    with inprocess("auto", calls=calls, choices=choices) as engine, engine.install():
        assert_same(list(at_clients(scale(2))(vectors(6))), [2 * x for x in vectors(6)])
    assert (True in traced) == is_tried
    assert traced.count(False) == 1
    if not is_tried:
        # On record as every choice.
        assert list(choices.values()) == ["loop"]


def test_the_rest_of_the_clients_counts(monkeypatch):
    """A trial of 32 clients stands for all: one call on 320 takes ten times as long."""
    monkeypatch.setattr(execution, "_TRIAL_CLIENTS", 2)
    shares = []
    monkeypatch.setattr(execution.LoadedProgram, "_seconds_of_few_calls", lambda *_, of_all: shares.append(of_all))
    with inprocess("auto", calls=1) as engine, engine.install():
        at_clients(scale(2))(vectors(20))
    assert shares == [10.0]
