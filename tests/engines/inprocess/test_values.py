"""What goes into computations and comes out of them: containers, names, strings, data sets."""

import collections
from typing import NamedTuple

import attrs
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import OPEN, SEQUENCE, VECTOR, Cases, add, square, vectors
from tff_pdp import _tff

pytestmark = pytest.mark.timeout(120)

cases = Cases()


class Point(NamedTuple):
    x: object
    y: object


@attrs.define
class Pair:
    first: object
    second: object


@cases.add
def tensorflow_of_scalars_and_structs():
    @_tff.tensorflow_computation(np.float32, collections.OrderedDict(b=np.int32, a=VECTOR))
    def compute(scale, members):
        return collections.OrderedDict(z=scale * members["a"], c=[members["b"], (scale,)])

    @_tff.tensorflow_computation
    def constant():
        return np.float64(1.5), tf.constant([[True, False]])

    members = collections.OrderedDict(b=3, a=vectors(1)[0])
    return compute(2.0, members), compute(np.float32(2), members=members), constant()


@cases.add
def containers():
    @_tff.tensorflow_computation(
        Point(np.int32, [np.int32, np.float32]), Pair(np.int32, collections.OrderedDict(b=np.int32)), (np.bool_,)
    )
    def rearrange(point, pair, alone):
        return Pair(Point(point.x, pair.first), collections.OrderedDict(q=[point.y, alone], e=(), b=pair.second))

    point, pair = Point(1, [2, 3.5]), Pair(4, {"b": 5})
    return rearrange(point, pair, (True,)), rearrange(Point(np.int32(1), [2, np.float32(3.5)]), pair, [False])


@cases.add
def containers_at_clients_and_server():
    member = collections.OrderedDict(b=VECTOR, a=[np.int32, Point(np.float32, np.int64)], e=())

    @_tff.federated_computation(collections.OrderedDict(c=_tff.at_clients(member), s=_tff.at_server(member)))
    def swap(argument):
        return Pair(_tff.federated_broadcast(argument["s"]), [argument["c"], Point(argument["s"], [])])

    values = [collections.OrderedDict(b=v, a=[i, Point(i / 2, -i)], e=()) for i, v in enumerate(vectors(4))]
    returned = swap(collections.OrderedDict(c=values[1:], s=values[0]))
    return returned, swap(collections.OrderedDict(c=returned.second[0], s=returned.second[1].x))


@cases.add
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


@cases.add
def values_without_leaves():
    @_tff.federated_computation(_tff.at_clients([]), _tff.at_server([]), _tff.at_clients(np.int32))
    def compute(nothing, none, x):
        return nothing, none, _tff.federated_sum(nothing), _tff.federated_zip((nothing, x))

    @_tff.federated_computation
    def nothing():
        return []

    return compute([[], []], [], [1, 2]), nothing()


@cases.add
def strings():
    @_tff.tensorflow_computation(np.str_, _tff.TensorType(np.str_, [None]))
    def join(a, b):
        return tf.strings.join([a, tf.strings.reduce_join(b, separator=",")]), b

    return join("é".encode(), np.array([b"x", b"yz"], object)), join(b"b", np.array(["q"], object))


@cases.add
def strings_at_clients():
    @_tff.tensorflow_computation(np.str_, _tff.TensorType(np.str_, [None]))
    def join(a, b):
        return tf.strings.join([a, "x"]), b

    @_tff.federated_computation(_tff.at_clients(np.str_), _tff.at_clients(_tff.TensorType(np.str_, [None])))
    def join_everywhere(a, b):
        return _tff.federated_map(join, (a, b)), a, b

    return join_everywhere([b"a", "bc"], [np.array([b"q", b"r"], object), np.array([b"s"], object)])


@cases.add
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


@cases.add_one_by_one
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


@pytest.mark.parametrize("name", cases)
def test_same_as_the_native_engine(name, mode, native_engine, caplog):
    cases.check(name, mode, native_engine, caplog)


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
