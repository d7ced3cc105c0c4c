"""What the in-process engine refuses, and how it fails: with names."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import OPEN, SEQUENCE, VECTOR, inprocess, next_round, square, vectors
from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientValues
from tff_pdp.engines.running import build_engine
from tff_pdp.errors import EngineError

pytestmark = pytest.mark.timeout(120)

ONES = np.ones(3, np.float32)
KEYS = _tff.TensorType(np.int32, [2])


# Computations that it does not support
# -------------------------------------


@_tff.tensorflow_computation(np.int32, np.int32)
def pick(database, key):
    return database + key


@_tff.federated_computation(_tff.at_clients(KEYS), _tff.at_server(np.int32), _tff.at_server(np.int32))
def select(keys, max_key, database):
    return tff.federated_select(keys, max_key, database, pick)


@_tff.federated_computation(_tff.at_clients(KEYS), _tff.at_server(np.int32), _tff.at_server(np.int32))
def select_securely(keys, max_key, database):
    return tff.federated_secure_select(keys, max_key, database, pick)


@tff.jax.computation(np.int32)
def in_jax(x):
    return x + 1


@_tff.federated_computation(_tff.FunctionType(np.int32, np.int32), np.int32)
def call_it(function, x):
    return function(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select([np.array([1, 2], np.int32)], 3, 5), "does not support the intrinsic 'federated_select'"),
        # TFF itself lowers the secure one to the plain one.
        (
            lambda: select_securely([np.array([1, 2], np.int32)], 3, 5),
            "does not support the intrinsic 'federated_select'",
        ),
        (lambda: in_jax(1), "runs TensorFlow, not 'xla'"),
        (lambda: call_it(square, 1), "does not take functions as arguments"),
    ],
    ids=["select", "secure select", "JAX", "function as argument"],
)
def test_what_it_does_not_support_is_named(call, message, engine):
    with engine.install(), pytest.raises(EngineError, match=message):
        call()


# Arguments of another type
# -------------------------


@_tff.federated_computation(_tff.at_clients([np.int32, OPEN]), _tff.at_server(collections.OrderedDict(a=np.int32)))
def take_both(x, y):
    return x, y


@_tff.tensorflow_computation(SEQUENCE)
def first_of(numbers):
    return numbers.reduce(0, lambda a, b: a + b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: take_both([[1, ONES]], {"b": 2}), r"argument\.y: expected the members \['a'\], not \['b'\]"),
        (lambda: take_both([[1, ONES]], 3), r"argument\.y: expected the members \['a'\], not int"),
        (lambda: take_both([[1, ONES]], {"a": 2.5}), r"argument\.y\.a: expected int32, not 2\.5"),
        (lambda: take_both([[1, ONES]], {"a": np.int64(1)}), r"argument\.y\.a: expected int32, not int64"),
        (lambda: take_both([[1, ONES]], {"a": [1, 2]}), r"argument\.y\.a: expected int32, not int32\[2\]"),
        (
            lambda: take_both([[1, ONES], [1, ONES.astype(float)]], {"a": 1}),
            r"argument\.x\[1\]\[1\]: expected float32\[\?\]",
        ),
        (
            lambda: take_both([[1, np.ones([3, 3], np.float32)]], {"a": 1}),
            r"argument\.x\[0\]\[1\]: .*, not float32\[3, 3\]",
        ),
        (lambda: take_both([[1]], {"a": 1}), r"argument\.x\[0\]: expected the members .* not 1 of them"),
        (lambda: take_both([[1, None]], {"a": 1}), r"argument\.x\[0\]\[1\]: expected float32\[\?\], not None"),
        (lambda: take_both(3, {"a": 1}), r"argument\.x: expected a list with one value per client, not int"),
        (lambda: take_both(([1, ONES],), {"a": 1}), r"argument\.x: expected a list .* not tuple"),
        (
            lambda: take_both(ClientValues.from_members(_tff.to_type(np.int32), [1]), {"a": 1}),
            r"argument\.x: expected <int32,float32\[\?\]> per client, not int32",
        ),
        (lambda: first_of([1, 1.5]), r"argument\[1\]: expected int32, not 1\.5"),
        (lambda: first_of(tf.data.Dataset.range(3)), r"argument: expected elements of type int32, not int64"),
        (lambda: first_of(3), r"argument: expected a tf\.data\.Dataset or a list of elements, not int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_of_another_type_is_named(call, message):
    with inprocess() as engine, engine.install(), pytest.raises(TypeError, match=message):
        call()


def test_different_numbers_of_clients_are_an_error_of_the_same_type_on_all_engines(engine, native_engine):
    with native_engine.install(), pytest.raises(ValueError, match="Conflicting cardinalities"):
        next_round(ONES, [ONES] * 2, [ONES] * 3)
    message = r"Conflicting cardinalities: .* {'argument\.client_state': 2, 'argument\.data': 3}"
    with engine.install(), pytest.raises(ValueError, match=message):
        next_round(ONES, [ONES] * 2, [ONES] * 3)


# Failures
# --------


@_tff.tensorflow_computation(VECTOR)
def check_numbers(x):
    return tf.debugging.check_numerics(x, "not a number")


@_tff.tensorflow_computation(np.int32)
def check_zero(x):
    with tf.control_dependencies([tf.debugging.assert_equal(x, 0, message="x must be zero")]):
        return tf.identity(x)


@_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_clients(np.int32), _tff.at_server(np.int32))
def check_everywhere(x, y, z):
    return _tff.federated_map(check_numbers, x), _tff.federated_map(check_zero, y), _tff.federated_map(check_zero, z)


def test_a_failing_operation_is_raised_and_spares_the_engine(engine):
    good = (vectors(2), [0, 0], 0)
    bad = ([vectors(1)[0], np.full(3, np.nan, np.float32)], [0, 1], 1)
    with engine.install():
        expected = check_everywhere(*good)
        for position, message in enumerate(("not a number", "x must be zero", "x must be zero")):
            arguments = [bad[i] if i == position else good[i] for i in range(3)]
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                check_everywhere(*arguments)
        assert_same(check_everywhere(*good), expected)


def test_a_closed_engine_refuses_calls():
    with inprocess() as engine:
        with engine.install():
            square(2)
            engine.close()
            with pytest.raises(EngineError, match="closed"):
                square(2)
        engine.close()
        with pytest.raises(EngineError, match="closed"), engine.install():
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu:99"}, "'gpu:99' is absent"),
        pytest.param(
            {"device": "gpu:0"},
            "'gpu:0' is absent: TensorFlow sees 0 GPUs here",
            marks=pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU"),
        ),
        ({"device": "tpu"}, "'tpu' is not known; write cpu, gpu"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused(options, message):
    with pytest.raises(EngineError, match=message):
        build_engine("inprocess", **options)
