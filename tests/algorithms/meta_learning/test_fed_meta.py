import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, weights
from tests.contract.contract_support import assert_close, assert_same, build
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.meta_learning.fed_meta import build_fed_meta
from tff_pdp.testing.algorithms import run

# Of each gradient in a round: the batch's optimum. The last is for steps after a client's own, which have no effect.
TARGETS = (4.0, 4.0, 1.0, 7.0, 50.0)


def grad_fn(current, data, index, scale, pull=None, trainable=None):
    return collections.OrderedDict(w=scale * (current["w"] - tf.gather(TARGETS, index)))


def a_round(algorithm, bound=2, **given):
    query = LocalSteps(tf.constant(2), tf.constant(bound))
    given = {**hparams(2, bound, learning_rate=0.5), "query_steps": query}
    return algorithm.client_update({"weights": weights(0.0)}, {"weights": weights(9.0)}, NO_DATA, grad_fn, given)


@pytest.mark.parametrize("bound", [2, 5])
@pytest.mark.parametrize(("order", "update"), [("first", 1.0), ("reptile", 3.0)])
def test_a_round_by_hand(order, update, bound):
    # w: 0 -> 2 -> 3. The gradients at 3 are 3 - 1 and 3 - 7; their mean is -1.
    result = a_round(build_fed_meta(order=order), bound)
    np.testing.assert_array_equal(result.released["update"]["w"], [update])
    np.testing.assert_array_equal(result.state["weights"]["w"], [3.0])


def test_each_gradient_is_counted():
    first, reptile = build_fed_meta(), build_fed_meta(order="reptile")
    assert (first.step_hparams, reptile.step_hparams) == (("local_steps", "query_steps"), ("local_steps",))
    assert first.num_gradients({"local_steps": 3, "query_steps": 2}) == 5
    assert reptile.num_gradients({"local_steps": 3}) == 3


def test_the_server_takes_a_step_of_its_optimizer():
    mean = {"update": weights(2.0)}
    plain = build_fed_meta(server_optimizer="sgd", server_learning_rate=0.25)
    after = plain.server_update(plain.init_server(weights(1.0)), mean)
    np.testing.assert_array_equal(after["weights"]["w"], [1.5])
    # Adam's means of updates and of squares are 0.1 * 2 and 0.01 * 4.
    adam = build_fed_meta()
    after = adam.server_update(adam.init_server(weights(1.0)), mean)
    np.testing.assert_allclose(after["weights"]["w"], [1.0 + 0.03 * 0.2 / (0.2 + 1e-3)])
    assert adam.global_model(after) is after["weights"]


def test_a_clients_model_is_its_own_adapted_one_and_before_it_trains_the_shared_one():
    algorithm = build_fed_meta()
    message = {"weights": weights(7.0)}
    np.testing.assert_array_equal(algorithm.personalise(message, algorithm.init_client(message))["w"], [7.0])
    np.testing.assert_array_equal(algorithm.personalise(message, a_round(algorithm).state)["w"], [3.0])


def test_reptile_with_a_server_that_adds_the_mean_is_fed_avg_and_its_models_are_one_round_from_the_shared_one(engines):
    with engines["loop"].install():
        reptile, process = build("fed_meta_reptile", server_optimizer="sgd", server_learning_rate=1.0)
        (fed_avg, shared), (local_only, alone) = build("fed_avg"), build("local_only")
        assert_close(run(process, reptile)[0]["algorithm"]["weights"], run(shared, fed_avg)[0]["algorithm"]["weights"])
        assert_same(list(run(process, reptile, 1)[1]), list(run(alone, local_only, 1)[1]))
