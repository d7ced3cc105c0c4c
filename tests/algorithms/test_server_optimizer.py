import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import assert_within, gamma
from tff_pdp.algorithms.server_optimizer import build_server_optimizer
from tff_pdp.errors import ConfigError
from tff_pdp.experiment.hparams import build_algorithm


def pair(first, second):
    return collections.OrderedDict(b=tf.constant([first], tf.float32), a=tf.constant([second], tf.float32))


def follow(optimizer, updates, start=(10.0, 0.0)):
    """The weights after each round."""
    weights = pair(*start)
    state = optimizer.init(weights)
    path = []
    for update in updates:
        state, weights = optimizer.apply(state, weights, pair(*update))
        assert list(weights) == ["b", "a"]
        path.append([float(value[0]) for value in weights.values()])
    return path


UPDATES = [(1.0, 4.0), (-2.0, 0.0), (3.0, -8.0)]


def test_sgd_adds_the_update_times_the_rate():
    assert follow(build_server_optimizer("sgd", 0.5), UPDATES) == [[10.5, 2.0], [9.5, 2.0], [11.0, -2.0]]
    assert build_server_optimizer("sgd", 0.5).init(pair(1.0, 2.0)) == {}


def test_momentum_adds_the_decaying_sum_of_updates():
    # Sums: b: 1, 0.5 - 2 = -1.5, -0.75 + 3 = 2.25; a: 4, 2, 1 - 8 = -7.
    path = follow(build_server_optimizer("momentum", 2.0, 0.5), UPDATES)
    assert path == [[12.0, 8.0], [9.0, 12.0], [13.5, -2.0]]


def test_momentum_of_zero_is_sgd():
    assert follow(build_server_optimizer("momentum", 0.5, 0.0), UPDATES) == follow(
        build_server_optimizer("sgd", 0.5), UPDATES
    )


def test_adam_divides_by_the_root_of_the_mean_square():
    # First moments of b: 0.5, -0.75, 1.125; of a: 2, 1, -3.5.
    # Second ones of b: 0.01, 0.0499, 0.139401; of a: 0.16, 0.1584, 0.796816. To their roots comes 0.001.
    roots = np.sqrt([[0.01, 0.16], [0.0499, 0.1584], [0.139401, 0.796816]]) + 0.001
    moves = 0.1 * np.array([[0.5, 2.0], [-0.75, 1.0], [1.125, -3.5]]) / roots
    path = follow(build_server_optimizer("adam", 0.1, 0.5), UPDATES)
    # A round has eleven operations on a weight and its two moments, and three constants that are rounded.
    magnitudes = np.array([10.0, 0.0]) + np.abs(moves).cumsum(axis=0)
    assert_within(path, np.array([10.0, 0.0]) + moves.cumsum(axis=0), gamma(3 * 14) * magnitudes)


def test_adam_of_kingma_and_ba_divides_both_means_by_the_sum_of_their_factors():
    expected, first, second, place = [], np.zeros(2), np.zeros(2), np.array([10.0, 0.0])
    for number, update in enumerate(np.array(UPDATES), 1):
        first, second = 0.5 * first + 0.5 * update, 0.999 * second + 0.001 * update**2
        root = np.sqrt(second / (1 - 0.999**number)) + 1e-8
        place = place + 0.1 * (first / (1 - 0.5**number)) / root
        expected.append(place)
    path = follow(build_server_optimizer("adam", 0.1, 0.5, "kingma_ba"), UPDATES)
    # A decay of 0.999 in float32 is 1e-8 off; a round of three has some twenty roundings and two exponentials.
    assert_within(path, expected, gamma(3 * 40) * np.abs(expected) + 3e-6)
    # The first step is the rate, whatever the update's size.
    np.testing.assert_allclose(path[0], [10.1, 0.1], rtol=0, atol=3e-6)
    state = build_server_optimizer("adam", 0.1, 0.0, "kingma_ba").init(pair(1.0, 2.0))
    assert sorted(state) == ["first", "rounds", "second"]


def test_another_rate_may_take_the_place_of_the_optimizers():
    for kind in ("sgd", "momentum", "adam"):
        optimizer, slower = build_server_optimizer(kind, 0.5), build_server_optimizer(kind, 0.125)
        given = optimizer.init(pair(1.0, 2.0)), pair(1.0, 2.0), pair(4.0, 8.0)
        one, other = optimizer.apply(*given, tf.constant(0.125)), slower.apply(*given)
        for name, value in one[1].items():
            np.testing.assert_array_equal(value, other[1][name])


def test_adam_stays_where_nothing_has_ever_moved():
    assert follow(build_server_optimizer("adam", 1.0), [(0.0, 0.0)] * 2) == [[10.0, 0.0]] * 2


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_a_state_keeps_its_structure(kind):
    optimizer = build_server_optimizer(kind, 1.0)
    before = optimizer.init(pair(1.0, 2.0))
    after, _ = optimizer.apply(before, pair(1.0, 2.0), pair(3.0, 4.0))
    tf.nest.assert_same_structure(before, after)


METHODS = ["centaur", "dp_fed_avg_ft", "dp_pfed_dsu", "fed_per", "pmtl_ft", "pp_sgd", "udp_hypernet"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("optimizer", "adagrad", "one of adam, momentum, sgd"),
        ("learning_rate", 0.0, "a number above 0"),
        ("learning_rate", -1.0, "a number above 0"),
        ("learning_rate", float("nan"), "a number above 0"),
        ("momentum", 1.0, "a number of at least 0 and below 1"),
        ("momentum", -0.1, "a number of at least 0 and below 1"),
        ("momentum", float("nan"), "a number of at least 0 and below 1"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_every_method_that_takes_them(method, name, value, wanted):
    with pytest.raises(ConfigError, match=rf"{method}\.server_{name} must be {wanted}, not {value!r}"):
        build_algorithm(method, {f"server_{name}": value}, num_clients=2, rounds=1, head=("head",))
