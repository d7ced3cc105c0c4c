import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.local_sgd import Trajectory, View, local_sgd
from tff_pdp.experiment.kinds import ALGORITHMS


def train(start, data, grad_fn, *, learning_rate, local_steps, first_index=0, **options):
    """Trains one trajectory with its options."""
    steps = {"learning_rate": learning_rate, "local_steps": local_steps}
    return local_sgd(Trajectory(start, **options), data, grad_fn, **steps, first_index=first_index)


def test_two_steps_by_hand():
    # w: 0 -> 0 - 0.5 * (0 - 4) = 2 -> 2 - 0.5 * (2 - 4) = 3
    trained = train(weights(0.0), NO_DATA, pull_to(4.0), **hparams(learning_rate=0.5, local_steps=2))
    np.testing.assert_array_equal(trained["w"], [3.0])


def test_proximal_term_by_hand():
    # gradient (1 - 4) + 2 * (1 - 0) = -1, so w: 1 -> 1.5
    trained = train(
        weights(1.0),
        NO_DATA,
        pull_to(4.0),
        anchor=weights(0.0),
        **hparams(learning_rate=0.5, local_steps=1, prox_weight=2.0),
    )
    np.testing.assert_array_equal(trained["w"], [1.5])


def test_each_step_gets_its_own_index():
    def count_up(current, data, step, scale, pull, trainable):
        return collections.OrderedDict(w=-scale * tf.cast(step, tf.float32)[tf.newaxis])

    trained = train(weights(0.0), NO_DATA, count_up, **hparams(learning_rate=1.0, local_steps=4))
    np.testing.assert_array_equal(trained["w"], [0 + 1 + 2 + 3])


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_steps_from_the_count_to_the_bound_change_no_bit(count):
    given = {"learning_rate": 0.3, "prox_weight": 0.7}
    alone = train(weights(1.1), NO_DATA, pull_to(4.0), anchor=weights(0.5), **hparams(count, **given))
    among = train(weights(1.1), NO_DATA, pull_to(4.0), anchor=weights(0.5), **hparams(count, 7, **given))
    np.testing.assert_array_equal(alone["w"], among["w"])
    assert (float(alone["w"]) != np.float32(1.1)) == (count > 0)


def test_a_stack_of_clients_each_with_its_own_count():
    def of_one(count):
        steps = LocalSteps(count, tf.constant(3))
        return train(weights(0.0), NO_DATA, pull_to(4.0), learning_rate=tf.constant(0.5), local_steps=steps)["w"]

    trained = tf.vectorized_map(of_one, tf.constant([0, 1, 2, 3]))
    np.testing.assert_array_equal(trained, [[0.0], [2.0], [3.0], [3.5]])


def two_weights(second, first):
    """Not in the order of the alphabet."""
    return collections.OrderedDict(b=tf.constant([second], tf.float32), a=tf.constant([first], tf.float32))


def test_only_trainable_weights_are_asked_for_and_move():
    asked = []

    def product(current, data, index, scale, pull=None, trainable=None):
        # Of `a * b`; `a` has to be there although it is not trained.
        asked.append((list(current), trainable))
        return {"b": scale * current["a"]}

    trained = train(
        two_weights(5.0, 2.0), NO_DATA, product, trainable=["b"], **hparams(learning_rate=0.5, local_steps=3)
    )
    assert list(trained) == ["b", "a"]
    np.testing.assert_array_equal(trained["b"], [2.0])
    np.testing.assert_array_equal(trained["a"], [2.0])
    assert asked
    assert all(one == (["b", "a"], ["b"]) for one in asked)


def test_a_trainable_weight_is_pulled_to_its_own_anchor():
    # b: gradient 2, pull 3 * (5 - 1) = 12.
    trained = train(
        two_weights(5.0, 2.0),
        NO_DATA,
        lambda current, data, index, scale, pull, trainable: {"b": scale * current["a"]},
        trainable=["b"],
        anchor=two_weights(1.0, 100.0),
        **hparams(learning_rate=0.5, prox_weight=3.0),
    )
    np.testing.assert_array_equal(trained["b"], [-2.0])
    np.testing.assert_array_equal(trained["a"], [2.0])


# Towards 8 with rate 1/4 and momentum 1/2. Movements -2, -1.5, -0.875; velocities -2, -2.5, -2.125.
BY_MOMENTUM = [0.0, 2.0, 4.5, 6.625]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("bound", [3, 7])
def test_momentum_by_hand(count, bound):
    trained = train(
        weights(0.0),
        NO_DATA,
        pull_to(8.0),
        momentum=tf.constant(0.5),
        **hparams(count, bound, learning_rate=0.25),
    )
    np.testing.assert_array_equal(trained["w"], [BY_MOMENTUM[count]])


def test_momentum_in_a_stack_ends_with_a_clients_own_steps():
    def of_one(count):
        steps = LocalSteps(count, tf.constant(5))
        trained = train(
            weights(0.0),
            NO_DATA,
            pull_to(8.0),
            learning_rate=tf.constant(0.25),
            local_steps=steps,
            momentum=tf.constant(0.5),
        )
        return trained["w"]

    trained = tf.vectorized_map(of_one, tf.constant([0, 1, 2, 3]))
    np.testing.assert_array_equal(trained[:, 0], BY_MOMENTUM)


def test_momentum_carries_the_proximal_term_too():
    # Movements 0.25 * (-8 + 0) = -2 and 0.25 * (-6 + 2 * (2 - 0)) = -0.5; velocities -2 and -1.5.
    trained = train(
        weights(0.0),
        NO_DATA,
        pull_to(8.0),
        momentum=tf.constant(0.5),
        anchor=weights(0.0),
        **hparams(2, learning_rate=0.25, prox_weight=2.0),
    )
    np.testing.assert_array_equal(trained["w"], [3.5])


def test_a_view_makes_the_models_weights_and_spreads_their_gradient():
    # The model has w = 2 t, so the gradient by t is 2 (w - 4). t: 3 -> 3 - 2 * 2 / 4 = 2, where w is 4.
    seen = []

    def spread(gradient, current):
        seen.append((list(gradient), list(current)))
        return {"t": 2.0 * gradient["w"]}

    trained = train(
        {"t": tf.constant([3.0])},
        NO_DATA,
        pull_to(4.0),
        view=View(lambda current: {"w": 2.0 * current["t"]}, spread),
        **hparams(5, learning_rate=0.25),
    )
    np.testing.assert_array_equal(trained["t"], [2.0])
    assert seen
    assert all(one == (["w"], ["t"]) for one in seen)


def test_a_view_says_what_gradients_are_asked_for():
    asked = []

    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        asked.append(trainable)
        return {"w": scale * current["fixed"]}

    start = collections.OrderedDict(fixed=tf.constant([3.0]), t=tf.constant([10.0]))
    trained = train(
        start,
        NO_DATA,
        grad_fn,
        trainable=["t"],
        view=View(
            lambda current: {"w": current["t"], "fixed": 2.0 * current["fixed"]},
            lambda gradient, current: {"t": gradient["w"] + current["fixed"]},
            trainable=["w"],
        ),
        **hparams(learning_rate=0.5),
    )
    # 10 - (0.5 * 6 + 3)
    np.testing.assert_array_equal(trained["t"], [4.0])
    np.testing.assert_array_equal(trained["fixed"], [3.0])
    assert set(map(tuple, asked)) == {("w",)}


@pytest.mark.parametrize(("count", "expected"), [(1, 1.5), (2, 1.25)])
def test_a_penalty_is_added_to_the_gradient_of_own_steps(count, expected):
    # Gradients -3 + 2 * 1 = -1 and -2.5 + 2 * 1.5 = 0.5, with rate 1/2.
    trained = train(
        weights(1.0),
        NO_DATA,
        pull_to(4.0),
        penalty=lambda current: {"w": 2.0 * current["w"]},
        **hparams(count, 6, learning_rate=0.5),
    )
    np.testing.assert_array_equal(trained["w"], [expected])


def test_a_penalty_is_of_the_trainable_weights():
    asked = []

    def penalty(current):
        asked.append(list(current))
        return {name: tf.ones_like(value) for name, value in current.items()}

    trained = train(
        two_weights(5.0, 2.0),
        NO_DATA,
        lambda current, data, index, scale, pull, trainable: {"b": scale * current["a"]},
        trainable=["b"],
        penalty=penalty,
        **hparams(learning_rate=0.5),
    )
    # 5 - 0.5 * (2 + 1)
    np.testing.assert_array_equal(trained["b"], [3.5])
    np.testing.assert_array_equal(trained["a"], [2.0])
    assert set(map(tuple, asked)) == {("b",)}


def test_gradients_are_numbered_on_from_the_first_index():
    """For clients of different counts in a stack, and never beyond the last that a client has."""

    def of_one(given):
        before, count = given

        def powers(current, data, index, scale, pull=None, trainable=None):
            # Whoever asks for a gradient that there is not gets NaN, also in steps that are not the client's own.
            is_there = tf.logical_and(index >= 0, index < before + count)
            power = tf.pow(2.0, tf.cast(index, tf.float32))
            return {"w": tf.where(is_there, -scale * power, float("nan"))[tf.newaxis]}

        steps = LocalSteps(count, tf.constant(4))
        return train(
            weights(0.0),
            NO_DATA,
            powers,
            learning_rate=tf.constant(1.0),
            local_steps=steps,
            first_index=before,
        )["w"]

    trained = tf.vectorized_map(of_one, (tf.constant([0, 1, 3, 2]), tf.constant([4, 2, 1, 3])))
    # Sums of two to the power of 0, 1, 2, 3; of 1, 2; of 3; of 2, 3, 4.
    np.testing.assert_array_equal(trained[:, 0], [15.0, 6.0, 8.0, 28.0])


@pytest.mark.parametrize("first_index", [3, tf.constant(3)])
def test_a_first_index_as_number_or_tensor(first_index):
    def number(current, data, index, scale, pull=None, trainable=None):
        return {"w": -scale * tf.cast(index, tf.float32)[tf.newaxis]}

    trained = train(weights(0.0), NO_DATA, number, first_index=first_index, **hparams(2, 5, learning_rate=1.0))
    np.testing.assert_array_equal(trained["w"], [3 + 4])


def test_fed_avg_releases_the_difference_and_adds_the_mean():
    algorithm = ALGORITHMS.find("fed_avg")()
    message = {"weights": weights(1.0)}
    result = algorithm.client_update(message, {}, NO_DATA, pull_to(5.0), hparams(learning_rate=0.5, local_steps=1))
    np.testing.assert_array_equal(result.released["update"]["w"], [2.0])
    server = algorithm.server_update({"weights": weights(1.0)}, {"update": weights(2.0)})
    np.testing.assert_array_equal(server["weights"]["w"], [3.0])
    np.testing.assert_array_equal(algorithm.personalise(server, {})["w"], [3.0])


def test_mr_mtl_trains_its_own_weights_towards_the_mean():
    algorithm = ALGORITHMS.find("mr_mtl")()
    # gradient (2 - 4) + 1 * (2 - 0) = 0: data and mean pull equally, so nothing moves
    result = algorithm.client_update(
        {"mean": weights(0.0)},
        {"weights": weights(2.0)},
        NO_DATA,
        pull_to(4.0),
        hparams(learning_rate=0.5, local_steps=3, prox_weight=1.0),
    )
    np.testing.assert_array_equal(result.state["weights"]["w"], [2.0])
    np.testing.assert_array_equal(result.released["movement"]["w"], [0.0])


def test_mr_mtl_server_follows_the_mean_of_the_clients():
    algorithm = ALGORITHMS.find("mr_mtl")()
    server = algorithm.server_update({"mean": weights(1.0)}, {"movement": weights(0.5)})
    np.testing.assert_array_equal(algorithm.global_model(server)["w"], [1.5])


def test_local_only_releases_nothing():
    algorithm = ALGORITHMS.find("local_only")()
    state = algorithm.init_client({"weights": weights(1.0)})
    result = algorithm.client_update({}, state, NO_DATA, pull_to(5.0), hparams(learning_rate=0.5, local_steps=1))
    assert not algorithm.released
    assert not result.released
    np.testing.assert_array_equal(algorithm.personalise({}, result.state)["w"], [3.0])


HALF_WAY = View(
    lambda first, second: {"w": 0.5 * first["w"] + 0.5 * second["w"]},
    lambda gradient, own: {"w": 0.5 * gradient["w"]},
)


@pytest.mark.parametrize("bound", [3, 7])
def test_two_trajectories_step_at_the_same_time_by_hand(bound):
    # The first: 0 -> 2 -> 3 -> 3.5, of which the second sees where a step begins. Half-way: (0 + 10) / 2 = 5, 1 off:
    # 10 - 0.25 = 9.75; then 2 more and 0.25 less, 1.875 off: 9.75 - 1.875 / 4; then (3 + 9.28125) / 2, 2.140625 off.
    both = Trajectory(weights(0.0)), Trajectory(weights(10.0), view=HALF_WAY)
    first, second = local_sgd(both, NO_DATA, pull_to(4.0), **hparams(3, bound, learning_rate=0.5))
    np.testing.assert_array_equal(first["w"], [3.5])
    np.testing.assert_array_equal(second["w"], [10.0 - (1.0 + 1.875 + 2.140625) / 4])


def test_each_of_two_trajectories_has_its_own_options():
    pulled = Trajectory(weights(1.0), anchor=weights(0.0), prox_weight=2.0)
    with_momentum = Trajectory(weights(0.0), momentum=tf.constant(0.5))
    found = local_sgd((with_momentum, pulled), NO_DATA, pull_to(8.0), **hparams(2, learning_rate=0.25))
    alone = [local_sgd(one, NO_DATA, pull_to(8.0), **hparams(2, learning_rate=0.25)) for one in (with_momentum, pulled)]
    assert [float(one["w"]) for one in found] == [float(one["w"]) for one in alone] == [BY_MOMENTUM[2], 2.5625]


@pytest.mark.parametrize("first_index", [0, 5])
@pytest.mark.parametrize("bound", [2, 4])
def test_gradients_of_two_trajectories_are_numbered_in_turn(first_index, bound):
    numbers = []

    def note(number, size):
        numbers.extend([int(number)] if size else [])
        return np.float32(0)

    def grad_fn(current, data, index, scale, pull, trainable):
        return {"w": tf.reshape(tf.numpy_function(note, [index, scale], tf.float32), [1])}

    start = first_index if first_index == 0 else tf.constant(first_index)
    both = Trajectory(weights(0.0)), Trajectory(weights(1.0))
    local_sgd(both, NO_DATA, grad_fn, first_index=start, **hparams(2, bound, learning_rate=1.0))
    assert sorted(numbers) == [first_index + place for place in range(4)]
