"""The federated operators: aggregates, broadcasts, maps and zips, over any number of clients."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import (
    OPEN,
    VECTOR,
    Cases,
    add,
    double,
    square,
    squared_difference,
    vectors,
)
from tff_pdp import _tff

pytestmark = pytest.mark.timeout(120)

cases = Cases()


@cases.add
def sums_and_means():
    @_tff.federated_computation(_tff.at_clients(collections.OrderedDict(v=VECTOR, n=np.float32)))
    def aggregate(x):
        return [f(x) for f in (_tff.federated_sum, _tff.federated_mean, _tff.federated_min, _tff.federated_max)]

    values = [collections.OrderedDict(v=v, n=v[0]) for v in vectors(5)]
    return aggregate(values), aggregate(values[:1])


@cases.add
def weighted_means():
    @_tff.federated_computation(
        _tff.at_clients([VECTOR, np.float32]), _tff.at_clients(np.float32), _tff.at_clients(np.int32)
    )
    def average(x, weight, count):
        return _tff.federated_mean(x, weight), _tff.federated_mean(x, count)

    return average([[v, v[1]] for v in vectors(4)], [1.0, 0.5, 0.0, 3.0], [1, 2, 3, 100])


@cases.add
def numbers_of_many_types():
    floats = (np.float16, np.float32, np.float64)
    # TFF's minimum cannot start from the largest uint64.
    integers = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64)

    @_tff.federated_computation([_tff.at_clients(dtype) for dtype in (*integers, *floats)])
    def extremes(values):
        return [[_tff.federated_min(x), _tff.federated_max(x), _tff.federated_sum(x)] for x in values]

    @_tff.federated_computation([_tff.at_clients(dtype) for dtype in (*floats, np.complex64)])
    def means(values):
        return [[_tff.federated_mean(x), _tff.federated_sum(x)] for x in values]

    numbers = [3, 1, 7]
    return (
        extremes([[dtype(n) for n in numbers] for dtype in (*integers, *floats)]),
        means([[dtype(n) for n in numbers] for dtype in (*floats, np.complex64)]),
    )


@cases.add
def sums_wrap_around_like_their_type():
    @_tff.federated_computation(_tff.at_clients(np.int32))
    def total(x):
        return _tff.federated_sum(x)

    return total([2**31 - 1, 2, 3])


@cases.add
def aggregate_with_all_its_parts():
    zero_type = collections.OrderedDict(total=VECTOR, count=np.int32)

    @_tff.tensorflow_computation
    def zero():
        return collections.OrderedDict(total=tf.zeros(3), count=0)

    @_tff.tensorflow_computation(zero_type, VECTOR)
    def accumulate(state, value):
        return collections.OrderedDict(total=state["total"] + value, count=state["count"] + 1)

    @_tff.tensorflow_computation(zero_type, zero_type)
    def merge(a, b):
        return collections.OrderedDict(total=a["total"] + b["total"], count=a["count"] + b["count"])

    @_tff.tensorflow_computation(zero_type)
    def report(state):
        return state["total"], state["count"]

    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def aggregate(x):
        return _tff.federated_aggregate(x, zero(), accumulate, merge, report)

    return aggregate(vectors(4)), aggregate([])


@cases.add
def aggregate_into_a_growing_state():
    @_tff.tensorflow_computation
    def zero():
        return tf.zeros([0], tf.int32)

    @_tff.tensorflow_computation(_tff.TensorType(np.int32, [None]), np.int32)
    def accumulate(state, value):
        return tf.concat([state, [value]], axis=0)

    @_tff.tensorflow_computation(_tff.TensorType(np.int32, [None]), _tff.TensorType(np.int32, [None]))
    def merge(a, b):
        return tf.concat([a, b], axis=0)

    @_tff.tensorflow_computation(_tff.TensorType(np.int32, [None]))
    def report(state):
        return tf.sort(state)

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def collect(x):
        return _tff.federated_aggregate(x, zero(), accumulate, merge, report)

    return collect([5, 3, 9]), collect([2]), collect([])


@cases.add
def two_levels():
    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_server(VECTOR))
    def variance(x, offset):
        mean = _tff.federated_broadcast(_tff.federated_mean(x))
        spread = _tff.federated_map(squared_difference, (x, mean))
        top = _tff.federated_broadcast(_tff.federated_map(double, _tff.federated_max(spread)))
        far = _tff.federated_map(squared_difference, (spread, top))
        return _tff.federated_mean(spread), far, mean, _tff.federated_sum(far), offset

    return variance(vectors(4), np.ones(3, np.float32))


@cases.add
def zip_eval_and_value():
    @_tff.tensorflow_computation
    def seven():
        return tf.constant(7), tf.constant([1.0, 2.0, 3.0])

    @_tff.tensorflow_computation((np.int32, VECTOR), VECTOR)
    def combine(own, x):
        return tf.cast(own[0], tf.float32) * own[1] + x

    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_server(np.int32), _tff.at_server(VECTOR))
    def compute(x, a, b):
        at_clients = _tff.federated_zip((_tff.federated_eval(seven, _tff.CLIENTS), x))
        return (
            _tff.federated_map(combine, at_clients),
            at_clients,
            _tff.federated_zip(collections.OrderedDict(a=a, b=b)),
            _tff.federated_eval(seven, _tff.SERVER),
            _tff.federated_value(5, _tff.SERVER),
            _tff.federated_sum(_tff.federated_value(5, _tff.CLIENTS)),
            _tff.federated_map(square, a),
        )

    return compute(vectors(3), 6, np.zeros(3, np.float32))


@cases.add
def values_all_clients_share():
    shared = _tff.FederatedType(VECTOR, _tff.CLIENTS, all_equal=True)

    @_tff.federated_computation(_tff.at_clients(VECTOR), shared)
    def compute(x, y):
        return _tff.federated_map(squared_difference, (x, y)), _tff.federated_sum(y), y

    @_tff.federated_computation(_tff.at_server(VECTOR), _tff.at_clients(VECTOR))
    def share(y, x):
        sent, constant = _tff.federated_broadcast(y), _tff.federated_value(3, _tff.CLIENTS)
        sent_on = _tff.federated_map(double, sent)
        return (
            sent,
            constant,
            sent_on,
            _tff.federated_mean(x),
            _tff.federated_mean(sent_on),
            _tff.federated_sum(constant),
        )

    return compute(vectors(3), vectors(1, seed=1)[0]), share(vectors(1)[0], vectors(3))


@cases.add
def no_clients():
    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_server(VECTOR))
    def compute(x, y):
        z = _tff.federated_map(squared_difference, (x, _tff.federated_broadcast(y)))
        spread = _tff.federated_map(squared_difference, (z, _tff.federated_broadcast(_tff.federated_sum(x))))
        return [f(v) for v in (x, z, spread) for f in (_tff.federated_sum, _tff.federated_max, _tff.federated_min)]

    return compute([], np.ones(3, np.float32))


@cases.add
def clients_that_are_not_an_argument():
    @_tff.tensorflow_computation
    def one():
        return 1

    @_tff.federated_computation
    def count():
        return _tff.federated_sum(_tff.federated_eval(one, _tff.CLIENTS))

    return count()


@cases.add
def lambdas_and_nested_calls():
    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def inner(x):
        return _tff.federated_sum(_tff.federated_map(double, x)), x

    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_clients(VECTOR))
    def outer(x, y):
        total, same = inner(x)
        members = _tff.federated_zip(collections.OrderedDict(a=same, b=y))
        return total, inner(y), _tff.federated_map(squared_difference, (members["a"], members["b"]))

    @_tff.federated_computation(VECTOR, np.int32)
    def unplaced(x, number):
        return double(double(x)), [add(number, square(number))], x

    return outer(vectors(3), vectors(3, seed=1)), unplaced(vectors(1)[0], 4)


@pytest.mark.parametrize("name", cases)
def test_same_as_the_native_engine(name, mode, native_engine, caplog):
    cases.check(name, mode, native_engine, caplog)


# Where the native engine fails, or cannot be compared with
# ---------------------------------------------------------


def test_aggregates_of_values_of_open_shape(engine):
    @_tff.federated_computation(_tff.at_clients(OPEN), _tff.at_clients(np.int32))
    def compute(x, weight):
        aggregates = [f(x) for f in (_tff.federated_mean, _tff.federated_min, _tff.federated_max)]
        return [*aggregates, _tff.federated_mean(x, weight)]

    with engine.install():
        mean, least, most, weighted = compute([np.array(v, np.float32) for v in ([1, 5], [3, 1])], [3, 1])
    for value, expected in ((mean, [2, 3]), (least, [1, 1]), (most, [3, 5]), (weighted, [1.5, 4])):
        assert_same(value, np.array(expected, np.float32))


def test_client_values_of_no_clients(engine):
    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_server(VECTOR))
    def compute(x, y):
        z = _tff.federated_map(squared_difference, (x, _tff.federated_broadcast(y)))
        return x, z, _tff.federated_mean(z), _tff.federated_broadcast(y)

    with engine.install():
        same, mapped, mean, sent = compute([], np.ones(3, np.float32))
        again, *_ = compute(mapped, np.ones(3, np.float32))
    assert [len(same), len(mapped), len(again)] == [0, 0, 0]
    assert np.isnan(mean).all()
    assert_same(sent, np.ones(3, np.float32))


def test_secure_sums_are_simulated_with_their_bounds(engine):
    # TFF's wheels hold no cryptography, and the C++ engine cannot run these at all: sums in the clear, and the checks.
    @_tff.federated_computation(_tff.at_clients(np.int32))
    def total(x):
        return tff.federated_secure_sum_bitwidth(x, bitwidth=8), tff.federated_secure_sum(x, max_input=200)

    with engine.install():
        assert_same(total([3, 200, 0]), (np.int32(203), np.int32(203)))
        with pytest.raises(tf.errors.InvalidArgumentError, match="larger than maximum specified for secure sum"):
            total([3, 201, 0])
