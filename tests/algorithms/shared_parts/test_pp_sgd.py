import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA
from tests.algorithms.two_part_support import HEAD, assert_values, hparams, product_to, two_weights, values
from tff_pdp.algorithms.shared_parts.dp_fed_avg_ft import build_dp_fed_avg_ft
from tff_pdp.algorithms.shared_parts.pp_sgd import build_pp_sgd

ALGORITHM = build_pp_sgd(head=HEAD)


def own_part(value):
    return {"own": {"head": tf.constant([value])}}


def update(algorithm=ALGORITHM, target=5.0, own=0.5, asked=None, **given):
    message = {"weights": two_weights(2.0, 1.0)}
    given = {"learning_rate": 0.5, "local_steps": 1, "personal_rate": 0.25, **given}
    return algorithm.client_update(message, own_part(own), NO_DATA, product_to(target, asked), hparams(**given))


def test_one_step_takes_the_gradient_of_both_parts_at_one_point():
    # The head is 1 + 0.5. Off by 2 * 1.5 - 5 = -2; by the body -2 * 1.5, by the head, and so by each part, -2 * 2.
    result = update()
    assert_values(result.released["update"], body=1.5, head=2.0)
    assert_values(result.state["own"], head=0.5 + 0.25 * 2)


def test_the_next_step_is_where_both_have_moved():
    # Body 3.5, head 3 + 1 = 4, off by 9: by the body 36, by each part of the head 31.5.
    asked = []
    result = update(local_steps=(2, 4), asked=asked)
    assert_values(result.released["update"], body=1.5 - 18, head=2 - 15.75)
    assert_values(result.state["own"], head=1 - 0.25 * 15.75)
    # One gradient for both, by which all of the model's weights move.
    assert asked == [(0, ["body", "head"]), (1, ["body", "head"])]
    assert ALGORITHM.data_passes == 1


def test_the_own_part_is_not_released():
    result = update()
    assert ALGORITHM.released == {"update": "mean"}
    assert {name: list(value) for name, value in result.released.items()} == {"update": ["body", "head"]}
    assert {name: list(value) for name, value in result.state.items()} == {"own": ["head"]}


def test_with_a_personal_rate_of_zero_it_is_dp_fed_avg_to_the_bit():
    plain = build_dp_fed_avg_ft(head=HEAD)
    given = {"learning_rate": 0.0123, "local_steps": (3, 5), "personal_rate": 0.0}
    result = update(own=0.0, target=6.1, **given)
    expected = plain.client_update({"weights": two_weights(2.0, 1.0)}, {}, NO_DATA, product_to(6.1), hparams(**given))
    assert values(result.released["update"]) == values(expected.released["update"])
    assert_values(result.state["own"], head=0.0)


def test_a_new_client_adds_nothing():
    message = ALGORITHM.broadcast(ALGORITHM.init_server(two_weights(2.0, 7.0)))
    state = ALGORITHM.init_client(message)
    assert_values(state["own"], head=0.0)
    assert values(ALGORITHM.personalise(message, state)) == {"body": 2.0, "head": 7.0}


def test_a_personal_model_is_the_sum():
    model = ALGORITHM.personalise({"weights": two_weights(2.0, 7.0)}, own_part(-3.0))
    assert list(model) == ["body", "head"]
    assert_values(model, body=2.0, head=4.0)


def test_adapting_moves_the_own_part_alone():
    # Towards 10, from head 1 + 2 with body 2: to 4 and then to 4.5, so 3.5 more than the shared head.
    asked = []
    message = {"weights": two_weights(2.0, 1.0)}
    given = hparams(learning_rate=0.5, head_learning_rate=0.125, personal_rate=0.25, adapt_steps=(2, 3))
    adapted = ALGORITHM.adapt(message, own_part(2.0), NO_DATA, product_to(10.0, asked), given)
    assert {name: list(value) for name, value in adapted.items()} == {"own": ["head"]}
    assert_values(adapted["own"], head=3.5)
    assert asked == [(0, ["head"]), (1, ["head"])]
    assert_values(ALGORITHM.personalise(message, adapted), body=2.0, head=4.5)
    assert_values(message["weights"], body=2.0, head=1.0)


@pytest.mark.parametrize(("optimizer", "expected"), [("sgd", (6.0, 3.0)), ("momentum", (7.0, 2.0))])
def test_the_server_moves_all_shared_weights(optimizer, expected):
    algorithm = build_pp_sgd(head=HEAD, server_optimizer=optimizer, server_learning_rate=2.0, server_momentum=0.5)
    state = algorithm.init_server(two_weights(2.0, 7.0))
    for _ in range(2):
        state = algorithm.server_update(state, {"update": two_weights(1.0, -1.0)})
    assert_values(state["weights"], body=expected[0], head=expected[1])
    assert values(algorithm.global_model(state)) == values(state["weights"])


def test_in_a_stack_every_client_moves_its_own_part():
    message = {"weights": two_weights(2.0, 1.0)}

    def of_one(given):
        own, target = given
        result = ALGORITHM.client_update(
            message,
            {"own": {"head": own}},
            NO_DATA,
            lambda current, data, index, scale, pull, trainable: {
                "body": scale * (current["body"] * current["head"] - target) * current["head"],
                "head": scale * (current["body"] * current["head"] - target) * current["body"],
            },
            hparams(learning_rate=0.5, local_steps=1, personal_rate=0.25),
        )
        return result.state["own"]["head"], result.released["update"]["head"]

    own, released = tf.vectorized_map(of_one, (tf.constant([[0.5], [0.0]]), tf.constant([5.0, 5.0])))
    # The second is off by 2 - 5 = -3.
    np.testing.assert_array_equal(own, [[1.0], [0.75]])
    np.testing.assert_array_equal(released, [[2.0], [3.0]])
