"""Functions that graphs bring along, and what TensorFlow 1 leaves in graphs."""

import gc

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import MODES, VECTOR, inprocess, messages_of, vectors
from tests.tiers import parameters
from tff_pdp import _tff
from tff_pdp.engines.inprocess import engine as engine_context
from tff_pdp.errors import EngineError
from tff_pdp.processes import vectorizable

pytestmark = pytest.mark.timeout(120)


def with_loop(factor):
    @_tff.tensorflow_computation(VECTOR)
    def compute(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, factor * total), (0, x))[1]

    return compute


def everywhere(function):
    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def compute(x):
        return _tff.federated_map(function, x)

    return compute


def functions_of_loops():
    gc.collect()
    return {name for name in context.context().list_function_names() if name.startswith("while_")}


@pytest.mark.parametrize("mode", parameters(MODES, test=["loop"]), indirect=True)
def test_functions_go_with_the_programs_that_brought_them(mode, monkeypatch):
    monkeypatch.setattr(engine_context, "_KEPT_PROGRAMS", 4)
    # What other tests have left need not be looked through each time.
    gc.collect()
    gc.freeze()
    before = functions_of_loops()
    numbers = []
    with inprocess(mode) as engine, engine.install():
        for factor in range(20):
            with_loop(factor)(vectors(1)[0])
            everywhere(with_loop(factor))(vectors())
            numbers.append(len(functions_of_loops() - before))
    assert max(numbers) == numbers[4] > 0
    del engine
    assert functions_of_loops() <= before
    gc.unfreeze()


def test_functions_that_programs_share_stay_until_the_last_of_them_goes():
    compute, x = with_loop(2), vectors(1)[0]
    with inprocess() as kept:
        with inprocess() as closed:
            for engine in (kept, closed):
                with engine.install():
                    assert_same(compute(x).numpy(), 8 * x)
        del engine, closed
        gc.collect()
        with kept.install():
            assert_same(compute(x).numpy(), 8 * x)


def test_data_sets_outlive_the_program_that_made_them():
    @_tff.tensorflow_computation(np.int64)
    def count(start):
        return tf.data.Dataset.range(3).map(lambda i: tf.cond(i > 1, lambda: i, lambda: i + start))

    with inprocess() as engine, engine.install():
        numbers = count(5)
    del engine
    gc.collect()
    assert list(numbers.as_numpy_iterator()) == [5, 6, 2]


def test_programs_outlive_a_function_of_the_caller_in_which_they_were_traced():
    compute, x = with_loop(2), vectors(1)[0]
    with inprocess() as engine, engine.install():
        tf.function(lambda x: compute(x), autograph=False)(x)
        gc.collect()
        assert_same(compute(x).numpy(), 8 * x)


@pytest.mark.parametrize("place", [lambda compute: compute, everywhere], ids=["server", "clients"])
def test_variables_that_calls_would_share_are_refused(place, engine):
    @_tff.tensorflow_computation(VECTOR)
    def add_to_variable(x):
        variable = tf.compat.v1.get_variable(
            "total", [3], initializer=tf.compat.v1.zeros_initializer(), use_resource=False
        )
        with tf.control_dependencies([variable.assign_add(x)]):
            return tf.identity(variable)

    with engine.install(), pytest.raises(EngineError, match=r"does not run 'VariableV2' \(operation 'total'\)"):
        place(add_to_variable)(vectors(3) if place is everywhere else vectors(1)[0])


def test_what_pfor_fails_on_is_computed_one_by_one(caplog, monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(vectorizable._control_flow, "pfor", fail)

    @_tff.tensorflow_computation(VECTOR)
    def double(x):
        return 2 * x

    with caplog.at_level("WARNING", logger="tff_pdp"), inprocess("vectorized") as engine, engine.install():
        assert_same(list(everywhere(double)(vectors())), [2 * x for x in vectors()])
    assert messages_of(caplog) == [
        "clients are computed one by one, because TensorFlow cannot stack the computation: AssertionError"
    ]
