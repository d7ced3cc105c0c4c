import numpy as np
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tff_pdp.algorithms.whole_models.ditto import build_ditto


def test_a_round_by_hand():
    # Shared: w: 1 -> 1 - 0.5 * (1 - 5) = 3, released: 2.
    # Personal: v: 2 -> 2 - 0.5 * ((2 - 5) + 3 * (2 - 1)) = 2, pulled to where the round began, not to 3.
    algorithm = build_ditto()
    result = algorithm.client_update(
        {"weights": weights(1.0)},
        {"weights": weights(2.0)},
        NO_DATA,
        pull_to(5.0),
        hparams(learning_rate=0.5, prox_weight=3.0),
    )
    np.testing.assert_array_equal(result.released["update"]["w"], [2.0])
    np.testing.assert_array_equal(result.state["weights"]["w"], [2.0])


def test_the_second_pass_asks_for_gradients_of_its_own():
    asked = []

    def grad_fn(current, data, index, scale, pull, trainable):
        asked.append(int(tf.get_static_value(index)) if tf.executing_eagerly() else index)
        return {name: tf.zeros_like(value) for name, value in current.items()}

    tf.config.run_functions_eagerly(True)
    try:
        build_ditto().client_update(
            {"weights": weights(1.0)},
            {"weights": weights(2.0)},
            NO_DATA,
            grad_fn,
            hparams(2, learning_rate=0.5, prox_weight=1.0),
        )
    finally:
        tf.config.run_functions_eagerly(False)
    assert asked == [0, 1, 2, 3]


def test_a_pull_inside_the_clip_is_handed_to_the_gradient():
    result = build_ditto(prox_inside_clip=True).client_update(
        {"weights": weights(1.0)},
        {"weights": weights(2.0)},
        NO_DATA,
        pull_to(5.0),
        hparams(learning_rate=0.5, prox_weight=3.0),
    )
    # Without a clip it is the same as outside.
    np.testing.assert_array_equal(result.state["weights"]["w"], [2.0])
