import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tff_pdp.algorithms.base import rounds_of
from tff_pdp.algorithms.whole_models.finetune import build_finetune

# Two rounds of FedAvg, two of fine-tuning.
ALGORITHM = build_finetune(rounds=4, federated_fraction=0.5)


def update(done, shared=1.0, own=2.0):
    """A client's round after so many: one step with rate 0.5 towards 5."""
    message = {"weights": weights(shared), "round": tf.constant(done)}
    state = {"weights": weights(own), "is_own": tf.constant(done > 2)}
    return ALGORITHM.client_update(message, state, NO_DATA, pull_to(5.0), hparams(learning_rate=0.5))


@pytest.mark.parametrize("done", [0, 1])
def test_federated_rounds_start_from_the_shared_weights_and_release_the_update(done):
    result = update(done)
    np.testing.assert_array_equal(result.state["weights"]["w"], [3.0])
    np.testing.assert_array_equal(result.released["update"]["w"], [2.0])


def test_the_first_round_of_fine_tuning_starts_from_the_shared_weights_and_releases_nothing():
    result = update(2)
    np.testing.assert_array_equal(result.state["weights"]["w"], [3.0])
    np.testing.assert_array_equal(result.released["update"]["w"], [0.0])


def test_later_rounds_go_on_from_the_clients_own_weights():
    result = update(3)
    np.testing.assert_array_equal(result.state["weights"]["w"], [3.5])
    np.testing.assert_array_equal(result.released["update"]["w"], [0.0])


@pytest.mark.parametrize(("done", "is_own"), [(1, False), (2, True), (3, True)])
def test_a_client_has_a_model_of_its_own_once_it_has_fine_tuned(done, is_own):
    state = update(done).state
    assert bool(state["is_own"]) == is_own
    # Also one that left before the last round: what it has of its own by then decides, not the round.
    message = {"weights": weights(1.0), "round": tf.constant(4)}
    expected = state["weights"]["w"] if is_own else [1.0]
    np.testing.assert_array_equal(ALGORITHM.personalise(message, state)["w"], expected)


@pytest.mark.parametrize(
    ("fraction", "rounds", "expected"), [(0.5, 4, 2), (0.1, 200, 20), (0.0, 9, 0), (0.01, 9, 1), (1.0, 7, 7)]
)
def test_rounds_of_a_fraction(fraction, rounds, expected):
    assert rounds_of(fraction, rounds) == expected
