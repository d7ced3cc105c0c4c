import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tff_pdp.algorithms.base import LocalSteps
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.registry import ALGORITHMS


def test_two_steps_by_hand():
    # w: 0 -> 0 - 0.5 * (0 - 4) = 2 -> 2 - 0.5 * (2 - 4) = 3
    trained = local_sgd(weights(0.0), NO_DATA, pull_to(4.0), **hparams(learning_rate=0.5, local_steps=2))
    np.testing.assert_array_equal(trained["w"], [3.0])


def test_proximal_term_by_hand():
    # gradient (1 - 4) + 2 * (1 - 0) = -1, so w: 1 -> 1.5
    trained = local_sgd(
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

    trained = local_sgd(weights(0.0), NO_DATA, count_up, **hparams(learning_rate=1.0, local_steps=4))
    np.testing.assert_array_equal(trained["w"], [0 + 1 + 2 + 3])


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_steps_from_the_count_to_the_bound_change_no_bit(count):
    given = {"learning_rate": 0.3, "prox_weight": 0.7}
    alone = local_sgd(weights(1.1), NO_DATA, pull_to(4.0), anchor=weights(0.5), **hparams(count, **given))
    among = local_sgd(weights(1.1), NO_DATA, pull_to(4.0), anchor=weights(0.5), **hparams(count, 7, **given))
    np.testing.assert_array_equal(alone["w"], among["w"])
    assert (float(alone["w"]) != np.float32(1.1)) == (count > 0)


def test_a_stack_of_clients_each_with_its_own_count():
    def of_one(count):
        steps = LocalSteps(count, tf.constant(3))
        return local_sgd(weights(0.0), NO_DATA, pull_to(4.0), learning_rate=tf.constant(0.5), local_steps=steps)["w"]

    trained = tf.vectorized_map(of_one, tf.constant([0, 1, 2, 3]))
    np.testing.assert_array_equal(trained, [[0.0], [2.0], [3.0], [3.5]])


def test_fed_avg_releases_the_difference_and_adds_the_mean():
    algorithm = ALGORITHMS["fed_avg"]()
    message = {"weights": weights(1.0)}
    result = algorithm.client_update(message, {}, NO_DATA, pull_to(5.0), hparams(learning_rate=0.5, local_steps=1))
    np.testing.assert_array_equal(result.released["update"]["w"], [2.0])
    server = algorithm.server_update({"weights": weights(1.0)}, {"update": weights(2.0)})
    np.testing.assert_array_equal(server["weights"]["w"], [3.0])
    np.testing.assert_array_equal(algorithm.personalise(server, {})["w"], [3.0])


def test_mr_mtl_trains_its_own_weights_towards_the_mean():
    algorithm = ALGORITHMS["mr_mtl"]()
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
    algorithm = ALGORITHMS["mr_mtl"]()
    server = algorithm.server_update({"mean": weights(1.0)}, {"movement": weights(0.5)})
    np.testing.assert_array_equal(algorithm.global_model(server)["w"], [1.5])


def test_local_only_releases_nothing():
    algorithm = ALGORITHMS["local_only"]()
    state = algorithm.init_client({"weights": weights(1.0)})
    result = algorithm.client_update({}, state, NO_DATA, pull_to(5.0), hparams(learning_rate=0.5, local_steps=1))
    assert not algorithm.released
    assert not result.released
    np.testing.assert_array_equal(algorithm.personalise({}, result.state)["w"], [3.0])
