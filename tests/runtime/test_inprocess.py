"""The in-process engine: what it returns is what the native engine returns, and it fails with names.

Every comparison runs with clients one by one and with clients as stacks. Learning algorithms of TFF have a file of their
own, `test_inprocess_tff_learning.py`.
"""

import collections
import contextlib
import threading
from typing import NamedTuple

import attrs
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.runtime.engine_equality import assert_same
from tff_pdp import _tff
from tff_pdp.errors import EngineError
from tff_pdp.runtime.client_values import ClientValues
from tff_pdp.runtime.engines import build_engine

pytestmark = pytest.mark.timeout(120)

MODES = ("loop", "vectorized")
VECTOR = _tff.TensorType(np.float32, [3])
OPEN = _tff.TensorType(np.float32, [None])
SEQUENCE = _tff.SequenceType(np.int32)


class Point(NamedTuple):
    x: object
    y: object


@attrs.define
class Pair:
    first: object
    second: object


def inprocess(mode="loop", **options):
    # An engine of its own for every test: what one test's computations chose must not reach another's.
    return contextlib.closing(build_engine("inprocess", client_parallelism=mode, **options))


@pytest.fixture(params=MODES)
def engine(request):
    with inprocess(request.param) as built:
        yield built


def vectors(num_clients=3, seed=0, dtype=np.float32):
    return list(np.random.default_rng(seed).normal(scale=10, size=(num_clients, 3)).astype(dtype))


@_tff.tensorflow_computation(np.int32, np.int32)
def add(a, b):
    return a + b


@_tff.tensorflow_computation(np.int32)
def square(a):
    return a * a


@_tff.tensorflow_computation(VECTOR)
def double(x):
    return 2 * x


@_tff.tensorflow_computation(VECTOR, VECTOR)
def squared_difference(x, y):
    return (x - y) ** 2


@_tff.tensorflow_computation(np.int32)
def count_in_variable(step):
    count = tf.Variable(10)
    with tf.control_dependencies([count.assign_add(step)]):
        return count.read_value()


@_tff.federated_computation(_tff.at_clients(VECTOR))
def sum_of_vectors(x):
    return _tff.federated_sum(x)


# Comparisons with the native engine. Each returns results of computations it builds and calls.
# -----------------------------------------------------------------------------------------------

STACKED = {}
ONE_BY_ONE = {}  # Clients hold data sets, variables, tables or control flow: never stacked.


def case(function):
    STACKED[function.__name__] = function
    return function


def case_one_by_one(function):
    ONE_BY_ONE[function.__name__] = function
    return function


@case
def tensorflow_of_scalars_and_structs():
    @_tff.tensorflow_computation(np.float32, collections.OrderedDict(b=np.int32, a=VECTOR))
    def compute(scale, members):
        return collections.OrderedDict(z=scale * members["a"], c=[members["b"], (scale,)])

    @_tff.tensorflow_computation
    def constant():
        return np.float64(1.5), tf.constant([[True, False]])

    members = collections.OrderedDict(b=3, a=vectors(1)[0])
    return compute(2.0, members), compute(np.float32(2), members=members), constant()


@case
def containers():
    @_tff.tensorflow_computation(
        Point(np.int32, [np.int32, np.float32]), Pair(np.int32, collections.OrderedDict(b=np.int32)), (np.bool_,)
    )
    def rearrange(point, pair, alone):
        return Pair(Point(point.x, pair.first), collections.OrderedDict(q=[point.y, alone], e=(), b=pair.second))

    point, pair = Point(1, [2, 3.5]), Pair(4, {"b": 5})
    return rearrange(point, pair, (True,)), rearrange(Point(np.int32(1), [2, np.float32(3.5)]), pair, [False])


@case
def containers_at_clients_and_server():
    member = collections.OrderedDict(b=VECTOR, a=[np.int32, Point(np.float32, np.int64)], e=())

    @_tff.federated_computation(collections.OrderedDict(c=_tff.at_clients(member), s=_tff.at_server(member)))
    def swap(argument):
        return Pair(_tff.federated_broadcast(argument["s"]), [argument["c"], Point(argument["s"], [])])

    values = [collections.OrderedDict(b=v, a=[i, Point(i / 2, -i)], e=()) for i, v in enumerate(vectors(4))]
    returned = swap(collections.OrderedDict(c=values[1:], s=values[0]))
    return returned, swap(collections.OrderedDict(c=returned.second[0], s=returned.second[1].x))


@case
def sums_and_means():
    @_tff.federated_computation(_tff.at_clients(collections.OrderedDict(v=VECTOR, n=np.float32)))
    def aggregate(x):
        return [f(x) for f in (_tff.federated_sum, _tff.federated_mean, _tff.federated_min, _tff.federated_max)]

    values = [collections.OrderedDict(v=v, n=v[0]) for v in vectors(5)]
    return aggregate(values), aggregate(values[:1])


@case
def weighted_means():
    @_tff.federated_computation(
        _tff.at_clients([VECTOR, np.float32]), _tff.at_clients(np.float32), _tff.at_clients(np.int32)
    )
    def average(x, weight, count):
        return _tff.federated_mean(x, weight), _tff.federated_mean(x, count)

    return average([[v, v[1]] for v in vectors(4)], [1.0, 0.5, 0.0, 3.0], [1, 2, 3, 100])


@case
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


@case
def sums_wrap_around_like_their_type():
    @_tff.federated_computation(_tff.at_clients(np.int32))
    def total(x):
        return _tff.federated_sum(x)

    return total([2**31 - 1, 2, 3])


@case
def aggregate_with_all_its_parts():
    zero_type = collections.OrderedDict(total=VECTOR, count=np.int32)

    @_tff.tensorflow_computation
    def zero():
        return collections.OrderedDict(total=tf.zeros(3), count=0)

    @_tff.tensorflow_computation(zero_type, VECTOR)
    def accumulate(state, value):
        # Not commutative: clients have to come in their order.
        return collections.OrderedDict(total=0.5 * state["total"] + value, count=state["count"] + 1)

    @_tff.tensorflow_computation(zero_type, zero_type)
    def merge(a, b):
        return collections.OrderedDict(total=a["total"] + b["total"], count=a["count"] + b["count"])

    @_tff.tensorflow_computation(zero_type)
    def report(state):
        return state["total"], state["count"]

    @_tff.federated_computation(_tff.at_clients(VECTOR))
    def aggregate(x):
        return _tff.federated_aggregate(x, zero(), accumulate, merge, report)

    return aggregate(vectors(1)), aggregate([])


@case
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


@case
def two_levels():
    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_server(VECTOR))
    def variance(x, offset):
        mean = _tff.federated_broadcast(_tff.federated_mean(x))
        spread = _tff.federated_map(squared_difference, (x, mean))
        top = _tff.federated_broadcast(_tff.federated_map(double, _tff.federated_max(spread)))
        far = _tff.federated_map(squared_difference, (spread, top))
        return _tff.federated_mean(spread), far, mean, _tff.federated_sum(far), offset

    return variance(vectors(4), np.ones(3, np.float32))


@case
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


@case
def values_all_clients_share():
    shared = _tff.FederatedType(VECTOR, _tff.CLIENTS, all_equal=True)

    @_tff.federated_computation(_tff.at_clients(VECTOR), shared)
    def compute(x, y):
        return _tff.federated_map(squared_difference, (x, y)), _tff.federated_sum(y), y

    @_tff.federated_computation(_tff.at_server(VECTOR), _tff.at_clients(VECTOR))
    def share(y, x):
        sent, constant = _tff.federated_broadcast(y), _tff.federated_value(3, _tff.CLIENTS)
        sent_on = _tff.federated_map(double, sent)
        return sent, constant, sent_on, _tff.federated_mean(x), _tff.federated_mean(sent_on), _tff.federated_sum(constant)

    return compute(vectors(3), vectors(1, seed=1)[0]), share(vectors(1)[0], vectors(3))


@case
def no_clients():
    @_tff.federated_computation(_tff.at_clients(VECTOR), _tff.at_server(VECTOR))
    def compute(x, y):
        z = _tff.federated_map(squared_difference, (x, _tff.federated_broadcast(y)))
        spread = _tff.federated_map(squared_difference, (z, _tff.federated_broadcast(_tff.federated_sum(x))))
        return [f(v) for v in (x, z, spread) for f in (_tff.federated_sum, _tff.federated_max, _tff.federated_min)]

    return compute([], np.ones(3, np.float32))


@case
def clients_that_are_not_an_argument():
    @_tff.tensorflow_computation
    def one():
        return 1

    @_tff.federated_computation
    def count():
        return _tff.federated_sum(_tff.federated_eval(one, _tff.CLIENTS))

    return count()


@case
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


@case
def strings():
    @_tff.tensorflow_computation(np.str_, _tff.TensorType(np.str_, [None]))
    def join(a, b):
        return tf.strings.join([a, tf.strings.reduce_join(b, separator=",")]), b

    return join("é".encode(), np.array([b"x", b"yz"], object)), join(b"b", np.array(["q"], object))


@case
def stateless_random_numbers():
    @_tff.tensorflow_computation(_tff.TensorType(np.int32, [2]))
    def draw(seed):
        return tf.random.stateless_normal([4], seed)

    @_tff.federated_computation(_tff.at_clients(_tff.TensorType(np.int32, [2])))
    def draws(seed):
        values = _tff.federated_map(draw, seed)
        return values, _tff.federated_sum(values)

    return draws([np.array([i, 7], np.int32) for i in range(3)])


@case
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


@case
def many_clients_of_two_shapes():
    @_tff.tensorflow_computation(OPEN)
    def norm(x):
        return tf.norm(x)

    @_tff.federated_computation(_tff.at_clients(OPEN))
    def norms(x):
        return _tff.federated_map(norm, x), _tff.federated_mean(_tff.federated_map(norm, x))

    return norms([np.full([1 + i % 2], i, np.float32) for i in range(40)])


@case_one_by_one
def variables_at_clients():
    @_tff.federated_computation(_tff.at_clients(np.int32))
    def count(x):
        return _tff.federated_map(count_in_variable, x)

    return count([1, 2, 3]), count([4])


@case
def variables_at_the_server():
    @_tff.tensorflow_computation(np.float32)
    def compute(x):
        first, second = tf.Variable(x), tf.Variable([1.0, 2.0])
        with tf.control_dependencies([first.assign_add(1.0), second.assign(second + x)]):
            return first.read_value(), second.read_value()

    @_tff.tensorflow_computation(np.float32)
    def twice(x):
        # Both calls import the graph above, each with variables of its own.
        return compute(x), compute(x + 1)

    return compute(1.0), compute(5.0), twice(2.0), count_in_variable(1), count_in_variable(1)


@case
def tables():
    @_tff.tensorflow_computation(OPEN, np.int64)
    def look_up(contents, key):
        keys = tf.range(tf.shape(contents, tf.int64)[0])
        initializer = tf.lookup.KeyValueTensorInitializer(keys, contents)
        return tf.lookup.StaticHashTable(initializer, -1.0).lookup(key)

    @_tff.tensorflow_computation(_tff.TensorType(np.str_, [None]))
    def number(words):
        initializer = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([5, 6], tf.int64))
        return tf.lookup.StaticVocabularyTable(initializer, 3).lookup(words)

    contents = [np.array([1, 2], np.float32), np.array([7, 8, 9], np.float32)]
    return [look_up(c, np.int64(1)) for c in contents], look_up(contents[0], np.int64(2)), number(["b", "a", "zzz"])


@case_one_by_one
def tables_at_clients():
    @_tff.tensorflow_computation(OPEN)
    def look_up(contents):
        initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1]), contents)
        return tf.lookup.StaticHashTable(initializer, -1.0).lookup(tf.constant([1, 2]))

    @_tff.federated_computation(_tff.at_clients(OPEN))
    def look_up_everywhere(contents):
        return _tff.federated_map(look_up, contents)

    return look_up_everywhere([v[:2] for v in vectors(3)])


@case_one_by_one
def control_flow_at_clients():
    @_tff.tensorflow_computation(np.int32)
    def steps(n):
        return tf.while_loop(
            lambda n, i: n > 1, lambda n, i: (tf.cond(tf.equal(n % 2, 0), lambda: n // 2, lambda: 3 * n + 1), i + 1), (n, 0)
        )[1]

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def all_steps(n):
        return _tff.federated_map(steps, n)

    return all_steps([1, 6, 27])


@case_one_by_one
def sequences_at_clients():
    element = collections.OrderedDict(b=OPEN, a=(np.int32, np.int64))

    @_tff.tensorflow_computation(_tff.SequenceType(element))
    def reduce(examples):
        return examples.reduce(0.0, lambda total, e: total + tf.reduce_sum(e["b"]) * tf.cast(e["a"][0], tf.float32))

    @_tff.federated_computation(_tff.at_clients(_tff.SequenceType(element)))
    def total(examples):
        each = _tff.federated_map(reduce, examples)
        return each, _tff.federated_sum(each)

    def elements(*sizes):
        return [collections.OrderedDict(b=np.ones(n, np.float32), a=(np.int32(n), np.int64(i))) for i, n in enumerate(sizes)]

    as_dataset = tf.data.Dataset.from_tensor_slices(
        collections.OrderedDict(b=np.ones([5, 2], np.float32), a=(np.arange(5, dtype=np.int32), np.arange(5)))
    )
    return total([elements(1, 2), elements(2, 2), as_dataset, as_dataset.take(0), as_dataset.skip(3)])


@case
def sequences():
    @_tff.tensorflow_computation(SEQUENCE)
    def summarise(numbers):
        pairs = numbers.batch(2).map(lambda batch: (tf.reduce_sum(batch), {"batch": batch}))
        return numbers.reduce(0, lambda a, b: a + b), pairs, numbers.map(lambda n: n * n)

    @_tff.tensorflow_computation(_tff.SequenceType((np.int32, np.int32)))
    def products(pairs):
        return pairs.map(lambda a, b: a * b)

    @_tff.tensorflow_computation(np.int64)
    def count_up(n):
        return tf.data.Dataset.range(n)

    @_tff.federated_computation(SEQUENCE)
    def reduce(numbers):
        return tff.sequence_reduce(numbers, 0, add)

    in_list, in_dataset = [1, 2, 3], tf.data.Dataset.range(4).map(lambda n: tf.cast(n, tf.int32))
    return (
        [summarise(in_list), summarise(in_dataset)],
        products([(1, 2), (3, 4)]),
        [count_up(np.int64(n)) for n in (3, 0)],
        [reduce(in_list), reduce(in_dataset)],
    )


@pytest.mark.parametrize("name", [*STACKED, *ONE_BY_ONE])
def test_same_as_the_native_engine(name, engine, native_engine):
    compute = {**STACKED, **ONE_BY_ONE}[name]
    with native_engine.install():
        expected = compute()
    with engine.install():
        difference = assert_same(compute(), expected)
    print(f"{name}: {difference:.2g}")
