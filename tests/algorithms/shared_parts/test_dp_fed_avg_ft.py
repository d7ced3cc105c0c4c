import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA
from tests.algorithms.two_part_support import HEAD, assert_values, hparams, product_to, two_weights, values
from tff_pdp.algorithms.shared_parts.dp_fed_avg_ft import build_dp_fed_avg_ft
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg

ALGORITHM = build_dp_fed_avg_ft(head=HEAD)
GIVEN = {"learning_rate": 0.25, "head_learning_rate": 0.125, "adapt_steps": (2, 3)}


def test_a_round_moves_all_weights_and_releases_how_far():
    # Towards 6, off by 2 * 1 - 6 = -4: body 2 + 4 * 1 / 4, head 1 + 4 * 2 / 4.
    asked = []
    result = ALGORITHM.client_update(
        {"weights": two_weights(2.0, 1.0)}, {}, NO_DATA, product_to(6.0, asked), hparams(**GIVEN, local_steps=(1, 4))
    )
    assert {name: list(value) for name, value in result.released.items()} == {"update": ["body", "head"]}
    assert_values(result.released["update"], body=1.0, head=2.0)
    assert result.state == {}
    assert asked == [(0, ["body", "head"])]


def test_rounds_are_those_of_fed_avg_to_the_bit():
    fed_avg = build_fed_avg()
    given = hparams(learning_rate=0.0123, local_steps=(3, 5))
    servers = [one.init_server(two_weights(2.3, 1.1)) for one in (ALGORITHM, fed_avg)]
    for target in (6.1, 5.3, 7.7):
        updates = [
            one.client_update(one.broadcast(server), {}, NO_DATA, product_to(target), given).released
            for one, server in zip((ALGORITHM, fed_avg), servers, strict=True)
        ]
        assert values(updates[0]["update"]) == values(updates[1]["update"])
        servers = [
            one.server_update(server, update)
            for one, server, update in zip((ALGORITHM, fed_avg), servers, updates, strict=True)
        ]
        assert values(servers[0]["weights"]) == values(servers[1]["weights"])
    assert values(servers[0]["weights"]) != values(two_weights(2.3, 1.1))


def test_the_servers_rate_and_momentum_are_used():
    algorithm = build_dp_fed_avg_ft(
        head=HEAD, server_optimizer="momentum", server_learning_rate=2.0, server_momentum=0.5
    )
    state = algorithm.init_server(two_weights(2.0, 7.0))
    for _ in range(2):
        state = algorithm.server_update(state, {"update": two_weights(1.0, -1.0)})
    assert_values(state["weights"], body=2 + 2 * 1 + 2 * 1.5, head=7 - 2 * 1 - 2 * 1.5)
    assert_values(algorithm.global_model(state), body=7.0, head=2.0)


def test_a_client_tunes_the_head_of_the_shared_weights():
    # Towards 10, from head 3 with body 2: off by -4 and then -2, head 3 + 4 * 2 / 8 = 4 and then 4 + 2 * 2 / 8 = 4.5.
    asked = []
    message = {"weights": two_weights(2.0, 3.0)}
    adapted = ALGORITHM.adapt(message, {}, NO_DATA, product_to(10.0, asked), hparams(**GIVEN))
    assert {name: list(value) for name, value in adapted.items()} == {"head": ["head"]}
    assert_values(adapted["head"], head=4.5)
    assert asked == [(0, ["head"]), (1, ["head"])]
    model = ALGORITHM.personalise(message, adapted)
    assert list(model) == ["body", "head"]
    assert_values(model, body=2.0, head=4.5)


@pytest.mark.parametrize("rate", [0.0, 0.125])
def test_the_bodys_rate_is_not_the_heads(rate):
    given = hparams(**{**GIVEN, "head_learning_rate": rate})
    adapted = ALGORITHM.adapt({"weights": two_weights(2.0, 3.0)}, {}, NO_DATA, product_to(10.0), given)
    np.testing.assert_array_equal(adapted["head"]["head"], tf.constant([4.5 if rate else 3.0]))
