"""Clients' values read the same however they are kept."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp import _tff
from tff_pdp.engines.client_values import ClientGroup, ClientValues
from tff_pdp.engines.running import build_engine

MEMBER = _tff.to_type(
    collections.OrderedDict(
        weights=collections.OrderedDict([("dense/kernel", _tff.TensorType(np.float32, [2])), ("steps", np.int32)]),
        x=_tff.TensorType(np.float32, [None, 3]),
        y=_tff.TensorType(np.int64, [None]),
    )
)
FIXED = MEMBER["weights"]
NOTHING = _tff.to_type(collections.OrderedDict())


def member(number, rows=2):
    return collections.OrderedDict(
        weights=collections.OrderedDict(
            [("dense/kernel", np.array([number, -number], np.float32)), ("steps", np.int32(number))]
        ),
        x=np.full([rows, 3], number, np.float32),
        y=np.arange(rows, dtype=np.int64) + number,
    )


def columns_of(members):
    return tf.nest.map_structure(lambda *leaves: np.stack(leaves), *members)


def assert_same(first, second):
    tf.nest.assert_same_structure(first, second)
    for one, other in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
        assert isinstance(one, np.ndarray | np.generic)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


MEMBERS = [member(number) for number in range(5)]
RAGGED = [member(number, rows) for number, rows in enumerate([2, 4, 2, 0, 4])]
STACKS_OF_RAGGED = [np.array([2, 0]), np.array([1, 4]), np.array([3])]


def in_stacks(members, partition, member_type=MEMBER):
    groups = [
        ClientGroup(
            np.array(indices),
            tuple(tf.constant(leaf) for leaf in tf.nest.flatten(columns_of([members[index] for index in indices]))),
            True,
        )
        for indices in partition
    ]
    return ClientValues(member_type, groups)


def mixed(members):
    single = ClientValues.from_members(MEMBER, members).groups[1]
    return ClientValues(MEMBER, [*in_stacks(members, [[4, 2]]).groups, single, *in_stacks(members, [[3], [0]]).groups])


ARRANGEMENTS = {
    "members": lambda: ClientValues.from_members(MEMBER, MEMBERS),
    "columns": lambda: ClientValues.from_columns(MEMBER, columns_of(MEMBERS)),
    "stacks": lambda: in_stacks(MEMBERS, [[3, 0], [4, 2, 1]]),
    "mixed": lambda: mixed(MEMBERS),
}


@pytest.fixture(params=ARRANGEMENTS)
def values(request):
    return ARRANGEMENTS[request.param]()


def test_it_is_a_sequence_of_the_members(values):
    assert len(values) == 5
    for given, read in zip(MEMBERS, values, strict=True):
        assert_same(read, given)
    assert_same(list(values), MEMBERS)
    assert_same(list(reversed(values)), MEMBERS[::-1])
    assert isinstance(values[0], collections.OrderedDict)
    assert list(values[0]["weights"]) == ["dense/kernel", "steps"]


def test_indices_and_slices_are_those_of_a_list(values):
    for index in (0, 4, -1, -5):
        assert_same(values[index], MEMBERS[index])
    for part in (slice(1, 3), slice(None, None, -2), slice(3, None), slice(-2, 99), slice(2, 2)):
        assert_same(values[part], MEMBERS[part])
    for index in (5, -6):
        with pytest.raises(IndexError):
            values[index]


def test_columns_are_the_members_stacked_in_their_order(values):
    assert_same(values.columns(), columns_of(MEMBERS))


def test_separating_changes_nothing_but_where_the_values_are(values):
    values.separate()
    assert sorted(int(group.indices[0]) for group in values.groups) == list(range(5))
    assert not any(group.stacked or len(group.indices) > 1 for group in values.groups)
    assert_same(list(values), MEMBERS)
    assert_same(values.columns(), columns_of(MEMBERS))
    before = [leaf for group in values.groups for leaf in group.leaves]
    values.separate()
    assert all(
        leaf is kept for leaf, kept in zip(before, (leaf for g in values.groups for leaf in g.leaves), strict=True)
    )


@pytest.mark.parametrize("partition", [[[0, 1, 2, 3, 4]], [[3, 1], [4], [0, 2]], [[4], [3], [2], [1], [0]]], ids=len)
def test_arranging_changes_nothing_but_where_the_values_are(values, partition):
    partition = [np.array(indices) for indices in partition]
    values.arrange(partition)
    assert all(group.stacked for group in values.groups)
    for group, indices in zip(values.groups, partition, strict=True):
        np.testing.assert_array_equal(group.indices, indices)
        np.testing.assert_array_equal(group.leaves[1], indices)
    assert_same(list(values), MEMBERS)
    assert_same(values.columns(), columns_of(MEMBERS))
    before = values.groups
    values.arrange(partition)
    assert all(group is kept for group, kept in zip(values.groups, before, strict=True)), "copied without need"


def test_reading_a_member_before_and_after_arranging(values):
    # What is remembered of the members' places must not outlive an arrangement.
    assert_same(values[3], MEMBERS[3])
    values.arrange([np.array([4, 3, 2, 1, 0])])
    assert_same(values[3], MEMBERS[3])
    values.separate()
    assert_same(values[3], MEMBERS[3])


def test_members_of_different_shapes():
    values = ClientValues.from_members(MEMBER, RAGGED)
    assert values.shapes() == [((rows, 3), (rows,)) for rows in (2, 4, 2, 0, 4)]
    values.arrange(STACKS_OF_RAGGED)
    assert values.shapes() == [((rows, 3), (rows,)) for rows in (2, 4, 2, 0, 4)]
    assert_same(list(values), RAGGED)
    values.arrange([np.array([4]), np.array([0, 2]), np.array([1]), np.array([3])])
    assert_same(list(values), RAGGED)
    values.separate()
    assert_same(list(values), RAGGED)


@pytest.mark.parametrize("stacked", [False, True])
def test_members_of_different_shapes_have_no_columns(stacked):
    values = in_stacks(RAGGED, STACKS_OF_RAGGED) if stacked else ClientValues.from_members(MEMBER, RAGGED)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"[Ss]hape|[Dd]imension"):
        values.columns()


def test_where_no_dimension_is_open_there_are_no_shapes_to_tell_apart():
    values = ClientValues.from_members(FIXED, [one["weights"] for one in MEMBERS])
    assert values.shapes() == [()] * 5


def test_members_may_be_anything_that_the_native_engine_takes():
    weights = {"dense/kernel": [1.0, 2.0], "steps": 3}
    given = [
        {"weights": weights, "x": np.zeros([0, 3], np.float32), "y": tf.range(2, dtype=tf.int64)},
        [((1.0, 2.0), np.int32(3)), tf.zeros([1, 3]), []],
    ]
    read = list(ClientValues.from_members(MEMBER, given))
    for one in read:
        assert_same(one["weights"], {"dense/kernel": np.array([1, 2], np.float32), "steps": np.int32(3)})
    assert [len(one["x"]) for one in read] == [0, 1]
    assert [one["y"].tolist() for one in read] == [[0, 1], []]


def test_members_that_keep_nothing():
    values = ClientValues.from_members(NOTHING, [{}] * 3)
    assert list(values) == [{}] * 3
    values.arrange([np.array([2, 1]), np.array([0])])
    assert list(values) == [{}] * 3
    assert values.shapes() == [()] * 3
    values.separate()
    assert list(values) == [{}] * 3
    assert values.columns() == {}


def test_data_sets():
    values = ClientValues.from_members(
        _tff.SequenceType(np.int32), [[1, 2], tf.data.Dataset.range(3, output_type=tf.int32)]
    )
    assert [[int(element) for element in one] for one in values] == [[1, 2], [0, 1, 2]]


def test_no_members():
    values = ClientValues.from_members(MEMBER, [])
    assert len(values) == 0
    assert list(values) == values[:] == values.shapes() == []
    values.separate()
    values.arrange([])
    with pytest.raises(IndexError):
        values[0]


def changed(number, **changes):
    return collections.OrderedDict({**member(number), **changes})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (changed(0, x=np.zeros([2, 4], np.float32)), r"states\[3\]\.x: expected float32\[\?,3\], not float32\[2, 4\]"),
        (changed(0, y=np.zeros(2, np.uint64)), r"states\[3\]\.y: expected int64\[\?\], not uint64\[2\]"),
        (changed(0, y="many"), r"states\[3\]\.y: expected int64\[\?\], not 'many'"),
        (changed(0, weights={"dense/kernel": np.zeros(2, np.float32)}), r"states\[3\]\.weights: expected the members"),
        (
            changed(0, weights={"dense/kernel": np.zeros(3, np.float32), "steps": 1}),
            r"states\[3\]\.weights\.dense/kernel: expected float32\[2\], not float32\[3\]",
        ),
        ({"x": 1}, r"states\[3\]: expected the members \['weights', 'x', 'y'\], not \['x'\]"),
        (None, r"states\[3\]"),
        (7, r"states\[3\]: expected the members .*, not int"),
    ],
)
def test_an_error_names_the_client_and_the_member(bad, message):
    with pytest.raises(TypeError, match=message):
        ClientValues.from_members(MEMBER, [*MEMBERS[:3], bad, MEMBERS[4]], "states")


def test_columns_that_do_not_fit_are_refused():
    columns = columns_of(MEMBERS)
    with pytest.raises(TypeError, match=r"states: expected columns of one length, not of \[4, 5\]"):
        ClientValues.from_columns(MEMBER, {**columns, "y": columns["y"][:4]}, "states")
    with pytest.raises(TypeError, match=r"states\.y: expected int64\[\?,\?\], not int64\[5\]"):
        ClientValues.from_columns(MEMBER, {**columns, "y": columns["y"][:, 0]}, "states")
    with pytest.raises(TypeError, match=r"states\.x: expected float32"):
        ClientValues.from_columns(MEMBER, {**columns, "x": columns["x"].astype(np.float64)}, "states")
    with pytest.raises(TypeError, match=r"type int32\* cannot be stacked"):
        ClientValues.from_columns(_tff.SequenceType(np.int32), [[1], [2]])


@_tff.tensorflow_computation(FIXED)
def count_up(state):
    return collections.OrderedDict([("dense/kernel", 2.0 * state["dense/kernel"]), ("steps", state["steps"] + 1)])


@_tff.federated_computation(_tff.at_clients(FIXED))
def next_round(states):
    return _tff.federated_map(count_up, states)


@pytest.mark.parametrize("parallelism", ["loop", "vectorized"])
@pytest.mark.parametrize("build", [ClientValues.from_members, ClientValues.from_columns])
def test_an_engine_takes_them_and_gives_them_back_and_leaves_the_callers_as_they_were(parallelism, build):
    states = [one["weights"] for one in MEMBERS]
    given = build(FIXED, columns_of(states) if build == ClientValues.from_columns else states)
    engine = build_engine("inprocess", client_parallelism=parallelism)
    with engine.install():
        once = next_round(given)
        twice = next_round(once)
    engine.close()
    assert isinstance(twice, ClientValues)
    assert_same(list(given), states)
    assert_same(
        list(once), [{"dense/kernel": 2 * s["dense/kernel"], "steps": s["steps"] + np.int32(1)} for s in states]
    )
    assert_same(
        list(twice), [{"dense/kernel": 4 * s["dense/kernel"], "steps": s["steps"] + np.int32(2)} for s in states]
    )


def test_the_native_engine_takes_them_too(native_engine):
    states = [one["weights"] for one in MEMBERS]
    with native_engine.install():
        result = next_round(ClientValues.from_columns(FIXED, columns_of(states)))
    assert [int(one["steps"]) for one in result] == [1, 2, 3, 4, 5]


def test_some_clients_values_and_their_replacement():
    member_type = _tff.to_type(collections.OrderedDict(x=_tff.TensorType(np.float32, [None])))
    members = [collections.OrderedDict(x=np.full(1 + index % 2, index, np.float32)) for index in range(5)]
    values = ClientValues.from_members(member_type, members).stack()
    some = values.select([1, 2, 4])
    assert [one["x"].tolist() for one in some] == [[1.0, 1.0], [2.0], [4.0]]
    new = ClientValues.from_members(member_type, [collections.OrderedDict(x=one["x"] + 10) for one in some])
    for replacement in (new, new.stack()):
        replaced = values.replace([1, 2, 4], replacement)
        assert [one["x"].tolist() for one in replaced] == [[0.0], [11.0, 11.0], [12.0], [3.0, 3.0], [14.0]]
    assert [one["x"].tolist() for one in values] == [m["x"].tolist() for m in members]
