"""The in-process engine: what it returns is what the native engine returns, and it fails with names.

Every comparison runs with clients one by one and with clients as stacks. Learning algorithms of TFF have a file of
their own, `test_inprocess_tff_learning.py`.
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
from tensorflow.python.eager import context

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
    # Every test has an engine of its own, which has traced nothing yet.
    return contextlib.closing(build_engine("inprocess", client_parallelism=mode, **options))


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def engine(mode):
    with inprocess(mode) as built:
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


# Comparisons with the native engine: each case returns the results of computations it builds and calls
# -----------------------------------------------------------------------------------------------------

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
        return (
            sent,
            constant,
            sent_on,
            _tff.federated_mean(x),
            _tff.federated_mean(sent_on),
            _tff.federated_sum(constant),
        )

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
def strings_at_clients():
    @_tff.tensorflow_computation(np.str_, _tff.TensorType(np.str_, [None]))
    def join(a, b):
        return tf.strings.join([a, "x"]), b

    @_tff.federated_computation(_tff.at_clients(np.str_), _tff.at_clients(_tff.TensorType(np.str_, [None])))
    def join_everywhere(a, b):
        return _tff.federated_map(join, (a, b)), a, b

    return join_everywhere([b"a", "bc"], [np.array([b"q", b"r"], object), np.array([b"s"], object)])


@case
def values_without_leaves():
    @_tff.federated_computation(_tff.at_clients([]), _tff.at_server([]), _tff.at_clients(np.int32))
    def compute(nothing, none, x):
        return nothing, none, _tff.federated_sum(nothing), _tff.federated_zip((nothing, x))

    @_tff.federated_computation
    def nothing():
        return []

    return compute([[], []], [], [1, 2]), nothing()


@case
def members_of_federated_structs():
    struct = collections.OrderedDict(a=np.int32, b=[np.float32, np.int32])

    @_tff.tensorflow_computation(np.int32)
    def build(x):
        return collections.OrderedDict(a=x, b=[tf.cast(x, tf.float32) / 2, x * x])

    @_tff.federated_computation(_tff.at_clients(np.int32), _tff.at_server(struct), _tff.at_clients(struct))
    def select(x, state, own):
        built = _tff.federated_map(build, x)
        mean = _tff.federated_mean(built["b"][0], own["a"])
        return _tff.federated_sum(built["b"][1]), built["b"], state["b"][0], mean, _tff.federated_broadcast(state["b"])

    own = [collections.OrderedDict(a=i, b=[0.5, i]) for i in range(3)]
    return select([1, 2, 3], own[0], own)


@case_one_by_one
def results_of_different_shapes():
    @_tff.tensorflow_computation(np.int32)
    def count_up(n):
        return tf.range(n)

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def count_up_everywhere(n):
        return _tff.federated_map(count_up, n)

    return count_up_everywhere([1, 2, 0])


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
            lambda n, i: n > 1,
            lambda n, i: (tf.cond(tf.equal(n % 2, 0), lambda: n // 2, lambda: 3 * n + 1), i + 1),
            (n, 0),
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

    @_tff.tensorflow_computation(_tff.SequenceType(element))
    def shorten(examples):
        return examples.take(1).map(lambda e: e["a"])

    @_tff.federated_computation(_tff.at_clients(_tff.SequenceType(element)))
    def shorten_everywhere(examples):
        return _tff.federated_map(shorten, examples), examples

    def elements(*sizes):
        return [
            collections.OrderedDict(b=np.ones(n, np.float32), a=(np.int32(n), np.int64(i))) for i, n in enumerate(sizes)
        ]

    as_dataset = tf.data.Dataset.from_tensor_slices(
        collections.OrderedDict(b=np.ones([5, 2], np.float32), a=(np.arange(5, dtype=np.int32), np.arange(5)))
    )
    given = [elements(1, 2), elements(2, 2), as_dataset, as_dataset.take(0), as_dataset.skip(3)]
    short, same = shorten_everywhere(given)
    return total(given), short, total(same)


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


@case
def operations_that_no_result_needs():
    @_tff.tensorflow_computation(np.int32)
    def compute(x):
        # TFF runs neither of the two; in a traced function they would both run.
        tf.debugging.assert_equal(x, -1)
        count = tf.Variable(10)
        count.assign_add(1)
        return count.read_value() + x

    @_tff.tensorflow_computation(np.int32)
    def compute_at_client(x):
        tf.debugging.assert_equal(x, -1)
        return x + 1

    @_tff.federated_computation(_tff.at_clients(np.int32))
    def everywhere(x):
        return _tff.federated_map(compute_at_client, x)

    return compute(1), everywhere([1, 2])


@case
def functions_of_one_name_with_different_definitions():
    @tf.function
    def scale(x):
        return x * tf.reduce_sum(x)

    @_tff.tensorflow_computation(VECTOR)
    def first(x):
        return scale(x)

    @_tff.tensorflow_computation(_tff.TensorType(np.float64, [2, 2]))
    def second(x):
        return scale(x), tf.map_fn(scale, x)

    @_tff.federated_computation(VECTOR, _tff.TensorType(np.float64, [2, 2]))
    def both(x, y):
        return first(x), second(y), first(first(x))

    x, y = vectors(1)[0], np.arange(4.0).reshape(2, 2)
    return first(x), second(y), both(x, y)


@case_one_by_one
def training_with_gradients():
    @_tff.tensorflow_computation(_tff.TensorType(np.float32, [None, 3]), OPEN, VECTOR)
    def descend(x, y, weights):
        @tf.function
        def step(weights, _):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
            return weights - 0.1 * tape.gradient(loss, weights)

        return tf.scan(step, tf.range(4), weights)[-1]

    @_tff.federated_computation(
        _tff.at_clients(_tff.TensorType(np.float32, [None, 3])), _tff.at_clients(OPEN), _tff.at_server(VECTOR)
    )
    def descend_everywhere(x, y, weights):
        return _tff.federated_mean(_tff.federated_map(descend, (x, y, _tff.federated_broadcast(weights))))

    rng = np.random.default_rng(0)
    x = [rng.normal(size=(n, 3)).astype(np.float32) for n in (2, 5, 3)]
    return descend_everywhere(x, [rows[:, 0] for rows in x], np.ones(3, np.float32))


@pytest.mark.parametrize("name", [*STACKED, *ONE_BY_ONE])
def test_same_as_the_native_engine(name, mode, native_engine, caplog):
    compute = {**STACKED, **ONE_BY_ONE}[name]
    with native_engine.install():
        expected = compute()
    with caplog.at_level("WARNING", logger="tff_pdp"), inprocess(mode) as engine, engine.install():
        print(f"{name}, {mode}: {assert_same(compute(), expected):.2g}")
    assert bool(messages_of(caplog)) == (mode == "vectorized" and name in ONE_BY_ONE)


def messages_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("tff_pdp")]


# Where the native engine fails, or cannot be compared with
# ---------------------------------------------------------


def test_members_are_found_by_name(engine):
    # TFF's own engine takes dictionaries in the order they come in.
    @_tff.federated_computation(
        collections.OrderedDict(
            c=_tff.at_clients(collections.OrderedDict(b=np.int32, a=np.float32)),
            s=_tff.at_server(Pair(np.int32, np.int32)),
        )
    )
    def compute(argument):
        return argument["c"], argument["s"]

    with engine.install():
        members, pair = compute({"s": Pair(second=2, first=1), "c": [{"a": 0.5, "b": 3}]})
    assert_same(members, [collections.OrderedDict(b=np.int32(3), a=np.float32(0.5))])
    assert_same(pair, Pair(np.int32(1), np.int32(2)))


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


def test_sequence_intrinsics(engine):
    @_tff.federated_computation(SEQUENCE)
    def sum_of_squares(numbers):
        return tff.sequence_sum(tff.sequence_map(square, numbers)), tff.sequence_reduce(numbers, 1, add)

    @_tff.federated_computation(_tff.at_clients(SEQUENCE))
    def everywhere(numbers):
        return _tff.federated_map(sum_of_squares, numbers)

    pairs_type = _tff.SequenceType(collections.OrderedDict(b=np.int32, a=(np.int32, np.int32)))

    @_tff.tensorflow_computation(pairs_type.element)
    def swap(element):
        return element["a"][1], element["b"]

    @_tff.federated_computation(pairs_type)
    def sums(elements):
        return tff.sequence_sum(tff.sequence_map(swap, elements)), tff.sequence_sum(elements)

    elements = [collections.OrderedDict(b=np.int32(i), a=(np.int32(10 * i), np.int32(100 * i))) for i in (1, 2)]
    with engine.install():
        assert_same(
            list(everywhere([[1, 2, 3], [4], tf.data.Dataset.from_tensors(np.int32(5))])),
            [(np.int32(14), np.int32(7)), (np.int32(16), np.int32(5)), (np.int32(25), np.int32(6))],
        )
        assert_same(
            sums(elements),
            (
                (np.int32(300), np.int32(3)),
                collections.OrderedDict(b=np.int32(3), a=(np.int32(30), np.int32(300))),
            ),
        )


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
    assert len(set(times)) == 6


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


# What is kept between calls
# --------------------------


@_tff.federated_computation(_tff.at_clients(VECTOR))
def double_and_sum(x):
    return _tff.federated_map(double, x), _tff.federated_sum(x)


@_tff.federated_computation(_tff.at_clients(np.int32))
def count_everywhere(steps):
    return _tff.federated_map(count_in_variable, steps)


@_tff.tensorflow_computation(OPEN)
def negate(x):
    return -x


@_tff.federated_computation(_tff.at_server(VECTOR), _tff.at_clients(VECTOR), _tff.at_clients(OPEN))
def next_round(state, client_state, data):
    changed = _tff.federated_map(squared_difference, (client_state, _tff.federated_broadcast(state)))
    return state, client_state, _tff.federated_mean(changed), _tff.federated_map(negate, data)


def address(tensor):
    return np.asarray(memoryview(tensor)).ctypes.data


def test_nothing_is_traced_or_registered_again_however_many_clients(engine):
    traced, functions = [], []
    with engine.install():
        for num_clients in (3, 3, 5, 1, 0, 3, 8):
            next_round(
                np.ones(3, np.float32), vectors(num_clients), [np.ones(i % 3, np.float32) for i in range(num_clients)]
            )
            traced.append(engine.num_traced)
            functions.append(len(context.context().list_function_names()))
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
                assert (engine.num_traced, other.num_traced) == (0, 1)
            assert isinstance(square(5), tf.Tensor)
        assert (engine.num_traced, other.num_traced) == (1, 1)
    with pytest.raises(EngineError, match="No engine is installed"):
        square(3)


# Errors
# ------


@_tff.tensorflow_computation(np.int32, np.int32)
def pick(database, key):
    return database + key


KEYS = _tff.TensorType(np.int32, [2])


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


@_tff.federated_computation(_tff.at_clients([np.int32, OPEN]), _tff.at_server(collections.OrderedDict(a=np.int32)))
def take_both(x, y):
    return x, y


@_tff.tensorflow_computation(SEQUENCE)
def first_of(numbers):
    return numbers.reduce(0, lambda a, b: a + b)


ONES = np.ones(3, np.float32)


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
            r"argument\.x: expected clients' <int32,float32\[\?\]>, not int32",
        ),
        (
            lambda: next_round(ONES, [ONES] * 2, [ONES] * 3),
            r"different numbers of clients: {'argument\.client_state': 2, 'argument\.data': 3}",
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
        with pytest.raises(EngineError, match="closed"):
            _ = engine.num_traced


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
        ({"client_parallelism": "both"}, "'both' is not known; write auto, loop or vectorized"),
        ({"clients_per_call": 0}, "at least 1, not 0"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused(options, message):
    with pytest.raises(EngineError, match=message):
        build_engine("inprocess", **options)
