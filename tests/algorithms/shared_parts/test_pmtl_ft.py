import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, pull_to, weights
from tests.algorithms.two_part_support import HEAD, assert_values, hparams, product_to, two_weights
from tests.rounding import gamma
from tff_pdp.algorithms.shared_parts.dp_fed_avg_ft import build_dp_fed_avg_ft, build_pmtl_ft

ALGORITHM = build_pmtl_ft(head=("w",))


@pytest.mark.parametrize(("penalty", "expected"), [(1.0, 1.25), (0.25, 1.625), (0.0, 1.75)])
def test_the_gradient_of_lambda_times_the_squared_distance(penalty, expected):
    # From 1 towards 5 with rate 1/4: to 2, where the loss's gradient is -3 and that of lambda (w - 1)^2 is 2 lambda:
    # on by (3 - 2 lambda) / 4. The weight of the pull is twice lambda.
    result = ALGORITHM.client_update(
        {"weights": weights(1.0)},
        {},
        NO_DATA,
        pull_to(5.0),
        hparams(learning_rate=0.25, local_steps=(2, 3), prox_weight=2 * penalty),
    )
    np.testing.assert_array_equal(result.released["update"]["w"], [expected])


def test_where_the_steps_lead_the_loss_and_penalty_are_least():
    # Of (w - 5)^2 / 2 + lambda (w - 1)^2, with lambda = 1: w = 7 / 3.
    start, penalty = 1.0, 1.0
    result = ALGORITHM.client_update(
        {"weights": weights(start)},
        {},
        NO_DATA,
        pull_to(5.0),
        hparams(learning_rate=0.25, local_steps=40, prox_weight=2 * penalty),
    )

    def objective(w):
        return (w - 5) ** 2 / 2 + penalty * (w - start) ** 2

    candidates, apart = np.linspace(0, 5, 5001, retstep=True)
    least = candidates[np.argmin(objective(candidates))]
    # The nearest candidate; four operations of a step round numbers below 5, and a step forgets three quarters of that.
    bound = apart / 2 + gamma(4) * 5 / 0.75
    np.testing.assert_allclose(start + result.released["update"]["w"], [least], atol=bound)


def test_the_published_lambda_is_the_default():
    assert ALGORITHM.hparams["prox_weight"].default == 2.0
    assert (ALGORITHM.name, ALGORITHM.step_hparams) == ("pmtl_ft", ("local_steps",))
    plain = build_dp_fed_avg_ft(head=HEAD)
    assert {**plain.hparams, "prox_weight": ALGORITHM.hparams["prox_weight"]} == ALGORITHM.hparams
    assert "prox_weight" not in plain.hparams


def test_the_pull_is_to_the_shared_weights_of_head_and_body():
    # Both steps off by -4 would lead to body 3 and head 3; the second step is off by 3 * 3 - 6 = 3 and pulled:
    # body 3 - (3 * 3 + 2 * 1) / 4, head 3 - (3 * 3 + 2 * 2) / 4.
    result = build_pmtl_ft(head=HEAD).client_update(
        {"weights": two_weights(2.0, 1.0)},
        {},
        NO_DATA,
        product_to(6.0),
        hparams(learning_rate=0.25, local_steps=2, prox_weight=2.0),
    )
    assert_values(result.released["update"], body=3 - 11 / 4 - 2, head=3 - 13 / 4 - 1)


def test_nothing_pulls_while_the_head_is_tuned():
    algorithm = build_pmtl_ft(head=HEAD)
    message = {"weights": two_weights(2.0, 3.0)}
    given = hparams(learning_rate=0.25, head_learning_rate=0.125, adapt_steps=2, prox_weight=2.0)
    adapted = algorithm.adapt(message, {}, NO_DATA, product_to(10.0), given)
    assert_values(algorithm.personalise(message, adapted), body=2.0, head=4.5)


def test_the_server_adds_the_mean_update():
    state = ALGORITHM.init_server(collections.OrderedDict(w=tf.constant([1.0])))
    assert_values(ALGORITHM.server_update(state, {"update": weights(0.5)})["weights"], w=1.5)
