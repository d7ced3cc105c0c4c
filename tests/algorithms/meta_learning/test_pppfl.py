import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, weights
from tests.contract.contract_support import assert_same, build
from tests.rounding import ELEMENTARY, gamma
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.meta_learning.pppfl import build_pppfl
from tff_pdp.testing.algorithms import run

# FedMeta's server: a constant rate, Adam as in other methods, and no decay.
AS_FED_META = {"cycles": 0, "server_adam": "reddi", "weight_decay": 0.0}
ONCE = LocalSteps(tf.constant(1), tf.constant(1))


def grad_fn(current, data, index, scale, pull=None, trainable=None):
    """Gradients of `(w - t)^2 / 2`, where t is 4 for the step and 1 for the query."""
    return collections.OrderedDict(w=scale * (current["w"] - tf.gather((4.0, 1.0), index)))


def a_round(own, order="first", share=0.25):
    given = {**hparams(learning_rate=0.5, moving_average=share), "query_steps": ONCE}
    algorithm = build_pppfl(rounds=3, order=order)
    return algorithm.client_update({"weights": weights(0.0)}, {"weights": weights(own)}, NO_DATA, grad_fn, given)


@pytest.mark.parametrize(("order", "update"), [("first", -1.5), ("second", -0.75), ("reptile", 2.5)])
def test_a_round_starts_from_an_average_of_the_shared_and_the_last_own_weights(order, update):
    # The start is 0 + 0.25 * 4 = 1, and w: 1 -> 2.5, where the gradient of the query is 1.5.
    result = a_round(4.0, order)
    np.testing.assert_array_equal(result.state["weights"]["w"], [2.5])
    np.testing.assert_array_equal(result.released["update"]["w"], [update])


def test_a_first_round_and_a_share_of_zero_start_from_the_bits_of_the_shared_weights():
    algorithm = build_pppfl(rounds=3)
    message = {"weights": weights(0.1)}
    np.testing.assert_array_equal(algorithm.init_client(message)["weights"]["w"], message["weights"]["w"])
    assert_same(a_round(0.0, share=0.3), a_round(7.0, share=0.0))


def test_the_servers_rate_falls_along_a_cosine_and_starts_again():
    # Seven rounds in two cycles: four rounds and three.
    algorithm = build_pppfl(rounds=7, cycles=2, server_optimizer="sgd", server_learning_rate=2.0, weight_decay=0.0)
    state, moves = algorithm.init_server(weights(0.0)), []
    for _ in range(7):
        after = algorithm.server_update(state, {"update": weights(1.0)})
        moves.append(float(after["weights"]["w"][0] - state["weights"]["w"][0]))
        state = after
    root = math.sqrt(0.5)
    cycle = [2.0, 1.0 + root, 1.0, 1.0 - root]
    # A cosine, whose argument is near pi, and a sum of up to seven moves of at most two.
    np.testing.assert_allclose(moves, [*cycle, *cycle[:3]], rtol=0, atol=gamma(ELEMENTARY + 16) * 14.0)
    assert int(state["round"]) == 7


@pytest.mark.parametrize("cycles", [0, 7, 100])
def test_no_cycles_or_one_in_each_round_is_a_constant_rate(cycles):
    algorithm = build_pppfl(rounds=7, cycles=cycles, server_optimizer="sgd", server_learning_rate=0.3, weight_decay=0.0)
    state = algorithm.init_server(weights(0.0))
    for place in range(3):
        state = algorithm.server_update(state, {"update": weights(1.0)})
        if place == 0:
            np.testing.assert_array_equal(state["weights"]["w"], [np.float32(0.3)])
    np.testing.assert_allclose(state["weights"]["w"], [0.9], rtol=gamma(6))


def test_weights_decay_before_the_optimizer():
    given = {"server_optimizer": "sgd", "server_learning_rate": 0.5, "weight_decay": 0.25}
    algorithm = build_pppfl(rounds=1, **given)
    after = algorithm.server_update(algorithm.init_server(weights(8.0)), {"update": weights(1.0)})
    np.testing.assert_array_equal(after["weights"]["w"], [8.0 + 0.5 * (1.0 - 2.0)])


def test_a_first_step_of_the_server_is_the_rate_whatever_the_size_of_the_update():
    algorithm = build_pppfl(rounds=10, weight_decay=0.0)
    for size in (1e-3, 50.0):
        after = algorithm.server_update(algorithm.init_server(weights(1.0)), {"update": weights(-size)})
        np.testing.assert_allclose(after["weights"]["w"], [1.0 - 0.03], rtol=2e-6)


@pytest.mark.parametrize("order", ["first", pytest.param("second", marks=pytest.mark.all), "reptile"])
def test_without_averages_cycles_and_decay_it_is_fed_meta_to_the_bit(engines, order):
    with engines["loop"].install():
        (pppfl, process), (fed_meta, other) = build("pppfl", order=order, **AS_FED_META), build("fed_meta", order=order)
        server, clients = run(process, pppfl, moving_average=0.0)
        plain, alone = run(other, fed_meta)
        assert_same(server["algorithm"]["weights"], plain["algorithm"]["weights"])
        assert_same(list(clients), list(alone))
        # Averages, cycles and decay each make a difference.
        for settings, share in (({}, 0.5), ({"cycles": 1}, 0.0), ({"weight_decay": 0.1}, 0.0)):
            pppfl, process = build("pppfl", order=order, **{**AS_FED_META, **settings})
            moved = run(process, pppfl, moving_average=share)[0]["algorithm"]["weights"]
            same = [np.array_equal(value, plain["algorithm"]["weights"][name]) for name, value in moved.items()]
            assert not any(same)


def test_only_second_order_needs_plain_gradients():
    needs = {
        order: build_pppfl(rounds=1, order=order).needs_plain_gradients for order in ("first", "second", "reptile")
    }
    assert needs == {"first": False, "second": True, "reptile": False}
