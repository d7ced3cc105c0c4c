import numpy as np
import pyarrow
import pytest

from beam_pipelines.records import Reason
from beam_pipelines.tables.columns import Category, Classes, Column, Fault, Integer, Number, Tokens
from tff_pdp.errors import ConfigError
from tff_pdp.settings import read_settings

TEXTS = pyarrow.array(["1.5", " +2e1 ", "tall", "NA", None, "inf", "1_0", "1e39", ".5", "-7."], pyarrow.string())


def test_texts_become_numbers_and_everything_else_is_a_fault():
    numbers, faults = Number().numbers(TEXTS)
    np.testing.assert_array_equal(numbers[:, 0], np.array([1.5, 20, 0, 0, 0, 0, 0, 0, 0.5, -7], np.float32))
    assert faults == [
        Fault(2, Reason.VALUE_TYPE, "tall"),
        Fault(3, Reason.VALUE_MISSING, "NA"),
        Fault(4, Reason.VALUE_MISSING, ""),
        Fault(5, Reason.VALUE_RANGE, "inf"),
        Fault(6, Reason.VALUE_TYPE, "1_0"),
        # Beyond float32.
        Fault(7, Reason.VALUE_RANGE, "1e39"),
    ]


def test_bounds_are_allowed_values_and_missing_values_may_be_replaced():
    values = pyarrow.array([0.0, 1.0, 1.001, -0.001, None])
    numbers, faults = Number(low=0, high=1, missing=0.5).numbers(values)
    np.testing.assert_array_equal(numbers[:, 0], [0, 1, 0, 0, 0.5])
    assert [(fault.row, fault.reason) for fault in faults] == [(2, Reason.VALUE_RANGE), (3, Reason.VALUE_RANGE)]


def test_whole_numbers_are_exact_or_refused():
    values = pyarrow.array([2**24, 2**24 + 1, -(2**24), 3])
    numbers, faults = Integer().numbers(values)
    np.testing.assert_array_equal(numbers[:, 0], [2**24, 0, -(2**24), 3])
    assert faults == [Fault(1, Reason.VALUE_RANGE, str(2**24 + 1))]
    assert Integer().numbers(pyarrow.array(["2.5"]))[1] == [Fault(0, Reason.VALUE_TYPE, "2.5")]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_categories_become_zeros_and_ones(kind):
    values = pyarrow.array(["b", " a", "c", None], pyarrow.string()).cast(kind)
    numbers, faults = Category(categories=("a", "b")).numbers(values)
    np.testing.assert_array_equal(numbers, [[0, 1], [1, 0], [0, 0], [0, 0]])
    assert faults == [Fault(2, Reason.VALUE_RANGE, "c"), Fault(3, Reason.VALUE_MISSING, "")]
    assert Category(categories=("a", "b")).names("letter") == ("letter=a", "letter=b")


def test_classes_have_numbers_in_the_declared_order_whatever_the_type_of_the_column():
    numbers, faults = Classes(classes=(3, 1, 2)).numbers(pyarrow.array([1, 2, 3, 4]))
    np.testing.assert_array_equal(numbers[:, 0], [1, 2, 0, 0])
    assert faults == [Fault(3, Reason.VALUE_RANGE, "4")]
    assert Classes(classes=(True, False)).numbers(pyarrow.array([True, False]))[0].ravel().tolist() == [0, 1]


def test_ids_are_padded_with_zeros_and_checked():
    values = pyarrow.array([[1, 2, 3], [4], [], None, [1, 5], [-1], [1, 1, 1, 1]], pyarrow.list_(pyarrow.int64()))
    column = Tokens(vocabulary_size=5, sequence_length=3)
    numbers, faults = column.numbers(values)
    np.testing.assert_array_equal(numbers[:3], [[1, 2, 3], [4, 0, 0], [0, 0, 0]])
    assert faults == [
        Fault(3, Reason.VALUE_MISSING, ""),
        Fault(4, Reason.VALUE_RANGE, "5 at position 1"),
        Fault(5, Reason.VALUE_RANGE, "-1 at position 0"),
        Fault(6, Reason.VALUE_RANGE, "a sequence of 4"),
    ]
    assert column.words == "at most 3 ids from 0 to 4"
    cut, faults = Tokens(vocabulary_size=5, sequence_length=3, cut=True).numbers(values[6:])
    assert (cut.tolist(), faults) == ([[1, 1, 1]], [])


def test_ids_may_be_texts_between_spaces():
    numbers, faults = Tokens(vocabulary_size=9, sequence_length=2).numbers(pyarrow.array(["7  8", "3", "x", "1.5"]))
    np.testing.assert_array_equal(numbers[:2], [[7, 8], [3, 0]])
    assert faults == [Fault(2, Reason.VALUE_TYPE, "x at position 0"), Fault(3, Reason.VALUE_TYPE, "1.5 at position 0")]


def test_words_have_ids_from_one_and_unknown_words_share_the_last():
    column = Tokens(vocabulary=("good", "bad"), sequence_length=3)
    numbers, faults = column.numbers(pyarrow.array(["bad good", "a good film"]))
    assert (column.size, faults) == (4, [])
    np.testing.assert_array_equal(numbers, [[2, 1, 0], [3, 1, 3]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kind": "category", "categories": ["a", "a"]}, "'a' more than once"),
        ({"kind": "class", "classes": []}, "at least one value"),
        ({"kind": "tokens", "vocabulary": ["a"], "vocabulary_size": 2}, "must be 3 for a vocabulary of 1 words"),
        ({"kind": "colour"}, "one of number, integer, category, tokens, class"),
        ({"kind": "integer", "high": 2**24 + 1}, "high"),
    ],
)
def test_a_schema_that_cannot_be_meant_is_refused(content, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(Column, content, "my.yaml", "data.schema.x")
