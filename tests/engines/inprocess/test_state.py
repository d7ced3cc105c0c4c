"""What stays between calls, and engines beside one another: in threads, and one inside another."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import (
    MODES,
    VECTOR,
    count_everywhere,
    inprocess,
    next_round,
    num_traced,
    square,
    vectors,
)
from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.errors import EngineError

pytestmark = pytest.mark.timeout(120)


# What is kept between calls
# --------------------------


def address(tensor):
    return np.asarray(memoryview(tensor)).ctypes.data


def registered_functions():
    # TensorFlow itself registers `__wrapped__Pack_N_3` when it first stacks three tensors, whichever test that is in.
    return [name for name in context.context().list_function_names() if not name.startswith("__wrapped__")]


def test_nothing_is_traced_or_registered_again_however_many_clients(engine):
    traced, functions = [], []
    with engine.install():
        for num_clients in (3, 3, 5, 1, 0, 3, 8):
            next_round(
                np.ones(3, np.float32), vectors(num_clients), [np.ones(i % 3, np.float32) for i in range(num_clients)]
            )
            traced.append(num_traced(engine))
            functions.append(len(registered_functions()))
    assert len(set(traced)) == 1
    assert len(set(functions)) == 1


def test_state_goes_from_round_to_round_without_copies(engine):
    data = [np.ones(2, np.float32)] * 3
    with engine.install():
        state, client_states, *_ = next_round(np.ones(3, np.float32), vectors(3), data)
        before = [address(leaf) for group in client_states.groups for leaf in group.leaves]
        assert isinstance(state, tf.Tensor)
        assert isinstance(client_states, ClientValues)
        next_state, next_client_states, mean, _ = next_round(state, client_states, data)
    assert address(next_state) == address(state)
    assert [address(leaf) for group in next_client_states.groups for leaf in group.leaves] == before
    assert mean.device.endswith("CPU:0")


def test_client_values_pass_between_engines_and_back(engine, native_engine):
    data = [np.full(n, n, np.float32) for n in (1, 2, 2)]
    states = vectors(3)
    with engine.install():
        _, kept, _, negated = next_round(np.ones(3, np.float32), states, data)
    assert_same([kept, negated], [states, [-row for row in data]])
    assert_same(kept.columns(), np.stack(states))
    assert_same(kept[-1], states[-1])
    assert_same(kept[:2], states[:2])
    with native_engine.install():
        from_native = next_round(np.ones(3, np.float32), kept, negated)
    for mode in (*MODES, *MODES):
        with inprocess(mode) as other, other.install():
            assert_same(next_round(np.ones(3, np.float32), kept, negated), from_native)
    columns = ClientValues.from_columns(VECTOR, np.stack(states))
    with engine.install():
        assert_same(next_round(np.ones(3, np.float32), columns, negated), from_native)


def test_a_caller_may_overwrite_what_it_passed_and_what_it_got(engine):
    state, clients = np.ones(3, np.float32), vectors(3)
    with engine.install():
        first_state, first_clients, *_ = next_round(state, clients, [np.ones(1, np.float32)] * 3)
        state[:] = 7
        for array in (*clients, first_state.numpy(), *first_clients):
            array[:] = 7
        assert_same([first_state, first_clients], [np.ones(3, np.float32), vectors(3)])


# Threads and engines
# -------------------


@_tff.federated_computation(_tff.at_clients(VECTOR))
def sum_of_vectors(x):
    return _tff.federated_sum(x)


def run_together(*functions):
    """Runs functions at once, one thread each; their results, or the first exception."""
    outcomes = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(index):
        start.wait(30)
        try:
            outcomes[index] = functions[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def count_often(engine, start):
    with engine.install():
        return [int(value) for step in range(20) for value in count_everywhere([start + step, start])]


def test_two_threads_run_one_computation_with_a_variable(engine):
    with inprocess("loop") as other:
        results = run_together(*(lambda e=e, n=n: count_often(e, n) for e in (engine, other) for n in (100, 2000)))
    expected = [[10 + number for step in range(20) for number in (start + step, start)] for start in (100, 2000)]
    assert results == [*expected, *expected]


def test_another_thread_installs_for_itself(engine):
    def call():
        return sum_of_vectors([])

    def call_installed():
        with engine.install():
            return call()

    assert_same(run_together(call_installed), [np.zeros(3, np.float32)])
    with engine.install(), pytest.raises(RuntimeError, match="No default context installed"):
        run_together(call)


def test_engines_install_inside_one_another(engine, native_engine):
    with inprocess() as other:
        with engine.install():
            with other.install():
                with native_engine.install():
                    assert isinstance(square(3), np.int32)
                square(4)
                assert (num_traced(engine), num_traced(other)) == (0, 1)
            assert isinstance(square(5), tf.Tensor)
        assert (num_traced(engine), num_traced(other)) == (1, 1)
    with pytest.raises(EngineError, match="No engine is installed"):
        square(3)
