import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, pull_to, weights
from tests.algorithms.two_part_support import hparams
from tff_pdp.algorithms.whole_models.pfedme import build_pfedme

GIVEN = {"learning_rate": 0.25, "outer_learning_rate": 0.25, "prox_weight": 2.0}


def a_round(**given):
    message = {"weights": weights(0.0)}
    return build_pfedme().client_update(message, {}, NO_DATA, pull_to(4.0), hparams(**GIVEN, **given))


@pytest.mark.parametrize("bounds", [(2, 2), (3, 4)])
def test_two_times_two_steps_by_hand(bounds):
    # theta: 0 -> 1, and 1 + (3 - 2 * 1) / 4 = 1.25; w moves half of the way, to 0.625. Then theta is 2.75 off, and
    # 0.625 from w: 1.25 + (2.75 - 1.25) / 4 = 1.625; and 2.375 off, and 1 from w: 1.625 + 0.375 / 4. w moves again.
    steps = {"local_steps": (2, bounds[0]), "inner_steps": (2, bounds[1])}
    result = a_round(**steps)
    np.testing.assert_array_equal(result.state["weights"]["w"], [1.71875])
    np.testing.assert_array_equal(result.released["update"]["w"], [(0.625 + 1.71875) / 2])


def test_the_server_takes_its_share_of_the_mean_update():
    after = build_pfedme(server_rate=0.5).server_update(
        {"weights": weights(3.0)}, {"update": {"w": tf.constant([1.0])}}
    )
    np.testing.assert_array_equal(after["weights"]["w"], [3.5])


def test_a_round_costs_the_product_of_its_steps():
    algorithm = build_pfedme()
    assert algorithm.num_gradients({"local_steps": np.array([2, 3]), "inner_steps": 5}).tolist() == [10, 15]
    assert algorithm.step_hparams == ("local_steps", "inner_steps")
