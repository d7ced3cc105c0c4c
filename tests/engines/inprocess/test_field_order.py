"""Fields of a data set's elements are not taken for each other: TensorFlow keeps no names with them."""

import collections
from typing import NamedTuple

import attrs
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.engines.engine_equality import assert_same
from tests.engines.inprocess.inprocess_support import inprocess
from tff_pdp import _tff

pytestmark = pytest.mark.timeout(120)


class Sorted(NamedTuple):
    x: object
    y: object


class Unsorted(NamedTuple):
    y: object
    x: object


@attrs.define
class UnsortedAttrs:
    y: object
    x: object


def ordered(**fields):
    return collections.OrderedDict(fields)


def unsorted_dictionary(x, y):
    return collections.OrderedDict(y=y, x=x)


ROWS = [{"x": 10, "y": 1}, {"x": 20, "y": 2}]


def computations(kind):
    """What TFF has for sequences: x is 30 and y is 3 in all."""
    element = kind(x=np.int32, y=np.int32)
    sequence = _tff.SequenceType(element)

    @_tff.tensorflow_computation(element)
    def x_and_y(row):
        fields = row if isinstance(row, dict) else {"x": row.x, "y": row.y}
        return unsorted_dictionary(x=2 * fields["x"], y=3 * fields["y"])

    @_tff.tensorflow_computation(np.int32, element)
    def add_x(total, row):
        return total + (row["x"] if isinstance(row, dict) else row.x)

    @_tff.federated_computation(sequence)
    def compute(rows):
        return (
            tff.sequence_sum(rows),
            tff.sequence_sum(tff.sequence_map(x_and_y, rows)),
            tff.sequence_reduce(rows, 0, add_x),
        )

    return compute


def data_set(kind):
    return tf.data.Dataset.from_tensor_slices(kind(x=np.array([10, 20], np.int32), y=np.array([1, 2], np.int32)))


@pytest.mark.parametrize("kind", [Sorted, ordered, unsorted_dictionary])
@pytest.mark.parametrize("build", [data_set, lambda kind: [kind(**row) for row in ROWS]], ids=["data set", "list"])
def test_sequences_keep_their_fields_apart(kind, build):
    with inprocess() as engine, engine.install():
        total, mapped, reduced = computations(kind)(build(kind))
    assert_same(total, kind(x=np.int32(30), y=np.int32(3)))
    assert_same(mapped, unsorted_dictionary(x=np.int32(60), y=np.int32(9)))
    assert_same(reduced, np.int32(30))


@pytest.mark.parametrize("kind", [Unsorted, UnsortedAttrs])
@pytest.mark.parametrize("build", [data_set, lambda kind: [kind(**row) for row in ROWS]], ids=["data set", "list"])
def test_fields_that_could_be_mistaken_are_refused(kind, build):
    message = rf"argument: the fields \['y', 'x'\] of {kind.__name__} can be mistaken"
    with inprocess() as engine, engine.install(), pytest.raises(TypeError, match=message):
        computations(kind)(build(kind))


def test_data_sets_of_another_container_than_declared_are_refused_as_by_the_native_engine(native_engine):
    @_tff.tensorflow_computation(_tff.SequenceType(unsorted_dictionary(x=np.int32, y=np.int32)))
    def sum_of_x(rows):
        return rows.reduce(0, lambda total, row: total + row["x"])

    with native_engine.install(), pytest.raises(ValueError, match="ambiguous"):
        sum_of_x(data_set(Unsorted))
    with inprocess() as engine, engine.install():
        assert_same(sum_of_x(data_set(unsorted_dictionary)), np.int32(30))
        with pytest.raises(TypeError, match="can be mistaken"):
            sum_of_x(data_set(Unsorted))
