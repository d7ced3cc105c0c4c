import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tff_pdp.algorithms.whole_models.apfl import build_apfl

ALGORITHM = build_apfl()


def a_round(shared, own, **given):
    return ALGORITHM.client_update(
        {"weights": weights(shared)}, {"weights": weights(own), "share": 0.5}, NO_DATA, pull_to(4.0), hparams(**given)
    )


def test_two_steps_by_hand():
    # w: 0 -> 0 + 4 / 2 = 2 -> 3. The mixture is at 8 / 4 = 2, 2 off: v 8 -> 8 + 2 / 8 = 8.25. Then it is at
    # 8.25 / 4 + 2 * 3 / 4 = 3.5625, 0.4375 off: v 8.25 + 0.4375 / 8.
    result = a_round(0.0, 8.0, learning_rate=0.5, local_steps=2, mixture=0.25)
    np.testing.assert_array_equal(result.released["update"]["w"], [3.0])
    np.testing.assert_array_equal(result.state["weights"]["w"], [8.25 + 0.4375 / 8])
    # A client's model has the newest shared weights, here 1.
    own = ALGORITHM.personalise({"weights": weights(1.0)}, result.state)
    np.testing.assert_array_equal(own["w"], [0.25 * (8.25 + 0.4375 / 8) + 0.75])


@pytest.mark.parametrize(("mixture", "moves"), [(0.0, False), (1.0, True)])
def test_at_its_ends_a_mixture_is_the_shared_model_or_local_training(mixture, moves):
    result = a_round(0.0, 8.0, learning_rate=0.5, local_steps=3, mixture=mixture)
    np.testing.assert_array_equal(result.state["weights"]["w"], [4.5 if moves else 8.0])
    own = ALGORITHM.personalise({"weights": weights(1.0)}, result.state)
    np.testing.assert_array_equal(own["w"], [4.5 if moves else 1.0])


def test_a_client_that_has_not_trained_has_the_shared_model():
    message = {"weights": weights(3.0)}
    np.testing.assert_array_equal(ALGORITHM.personalise(message, ALGORITHM.init_client(message))["w"], [3.0])
    after = ALGORITHM.server_update({"weights": weights(3.0)}, {"update": {"w": tf.constant([0.5])}})
    np.testing.assert_array_equal(after["weights"]["w"], [3.5])
