"""Arrays of clients as what is shared and rows of what differs: every case worked out by hand."""

import numpy as np
import pytest

from tff_pdp.personal_models.served import PersonalRows


def weights(body, head):
    return {"body": np.array(body, np.float32), "head": np.array(head, np.float32)}


GLOBAL = weights([1, 2], 0)


def parts(clients, size=2):
    """The clients' arrays in stacks of some clients."""
    for start in range(0, len(clients), size):
        some = clients[start : start + size]
        yield {name: np.stack([client[name] for client in some]) for name in some[0]}


def models_of(rows, clients):
    """Each client's arrays, put together from what is shared and its row."""
    return [
        {**rows.shared, **{name: stack[rows.rows[client]] for name, stack in rows.stacked.items()}}
        for client in range(clients)
    ]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        for name, array in other.items():
            assert one[name].tobytes() == array.tobytes()


def test_what_everybody_has_is_held_once():
    clients = [weights([1, 2], 5), weights([1, 2], 6), weights([1, 2], 5)]
    rows = PersonalRows(GLOBAL, 3, parts(clients))
    assert list(rows.shared) == ["body"]
    assert rows.stacked["head"].tolist() == [0, 5, 6]
    assert (rows.rows.tolist(), rows.rows.dtype, rows.num_rows) == ([1, 2, 1], np.int32, 3)
    rows.separate()
    assert rows.stacked["head"].tolist() == [0, 5, 6, 5]
    assert rows.rows.tolist() == [1, 2, 3]
    assert_equal(models_of(rows, 3), clients)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_name_that_differs_late_is_filled_in_for_all_before(size):
    clients = [weights([1, 2], 5), weights([1, 2], 0), weights([3, 2], 5), weights([1, 2], 7)]
    rows = PersonalRows(GLOBAL, 4, parts(clients, size))
    assert rows.shared == {}
    assert rows.stacked["body"].tolist() == [[1, 2], [1, 2], [3, 2], [1, 2]]
    assert rows.stacked["head"].tolist() == [0, 5, 5, 7]
    assert rows.rows.tolist() == [1, 0, 2, 3]
    assert_equal(models_of(rows, 4), clients)
    rows.separate()
    assert rows.stacked["head"].tolist() == [0, 5, 0, 5, 7]
    assert_equal(models_of(rows, 4), clients)


def test_where_everybody_has_the_global_model_nothing_is_stacked():
    rows = PersonalRows(GLOBAL, 2, parts([weights([1, 2], 0)] * 2))
    rows.separate()
    assert (rows.stacked, rows.rows.tolist(), rows.num_rows) == ({}, [0, 0], 1)
    assert_equal([rows.shared], [GLOBAL])


def test_equal_means_equal_bits():
    rows = PersonalRows(GLOBAL, 2, parts([weights([1, 2], -0.0), weights([1, 2], np.nan)]))
    assert np.signbit(rows.stacked["head"]).tolist() == [False, True, False]
    assert np.isnan(rows.stacked["head"]).tolist() == [False, False, True]


def test_arrays_that_do_not_lie_in_order_count_by_their_values():
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    stack = np.stack([kernel, kernel[:, ::-1]]).copy("F")
    rows = PersonalRows({"kernel": kernel}, 2, iter([{"kernel": stack}]))
    assert rows.rows.tolist() == [0, 1]
    np.testing.assert_array_equal(rows.stacked["kernel"][1], [[2, 1, 0], [5, 4, 3]])


@pytest.mark.parametrize("size", [1, 7, 100])
def test_many_random_clients_come_back_as_they_were(size):
    rng = np.random.default_rng(0)
    names = ["a", "b", "c"]
    clients = [{name: rng.integers(0, 2, (2, 2)).astype(np.float32) for name in names} for _ in range(100)]
    base = {name: np.zeros((2, 2), np.float32) for name in names}
    rows = PersonalRows(base, 100, parts(clients, size))
    distinct = {tuple(client[name].tobytes() for name in names) for client in [base, *clients]}
    assert rows.num_rows == len(distinct)
    assert_equal(models_of(rows, 100), clients)
    rows.separate()
    assert rows.rows.tolist() == list(range(1, 101))
    assert_equal(models_of(rows, 100), clients)
    assert_equal([{name: stack[0] for name, stack in rows.stacked.items()}], [base])


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"body": np.zeros(2, np.float32)}, "'head' is not an array of every client"),
        ({**weights([1, 2], 0), "more": np.zeros(1)}, "'more' is not an array of every client"),
        (weights([1, 2, 3], 0), r"'body' is float32 \(3,\) for some clients, but float32 \(2,\)"),
        ({**GLOBAL, "head": np.array(0.0)}, "'head' is float64"),
    ],
)
def test_clients_of_another_kind_are_refused(client, message):
    with pytest.raises(ValueError, match=message):
        PersonalRows(GLOBAL, 1, parts([client]))


@pytest.mark.parametrize("number", [1, 3])
def test_every_client_must_come(number):
    with pytest.raises(ValueError, match=r"there are (1 clients, not 2|more clients than 2)$"):
        PersonalRows(GLOBAL, 2, parts([GLOBAL] * number))
