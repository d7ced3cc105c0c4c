import numpy as np

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tests.contract.contract_support import assert_close, build
from tff_pdp.algorithms.whole_models.fed_prox import build_fed_prox
from tff_pdp.testing.algorithms import run


def movement(**given):
    result = build_fed_prox().client_update({"weights": weights(1.0)}, {}, NO_DATA, pull_to(5.0), hparams(**given))
    assert result.state == {}
    return float(result.released["update"]["w"][0])


def test_two_steps_by_hand():
    # The pull begins with the second step: w: 1 -> 1 + 4 / 2 = 3 -> 3 - ((3 - 5) + 2 * (3 - 1)) / 2 = 2.
    assert movement(learning_rate=0.5, local_steps=2, prox_weight=2.0) == 1.0
    # With a pull as strong as the data's, many steps end half way.
    assert movement(learning_rate=0.5, local_steps=30, prox_weight=1.0) == 2.0


def test_the_server_adds_the_mean_update_and_serves_the_shared_weights():
    algorithm = build_fed_prox()
    after = algorithm.server_update({"weights": weights(1.0)}, {"update": weights(2.0)})
    np.testing.assert_array_equal(after["weights"]["w"], [3.0])
    assert algorithm.personalise(algorithm.broadcast(after), {}) is after["weights"]


def test_without_a_pull_it_is_fed_avg_and_with_one_it_is_not(engines):
    with engines["loop"].install():
        (algorithm, process), (fed_avg, shared) = build("fed_prox"), build("fed_avg")
        plain = run(shared, fed_avg, local_steps=3)[0]["algorithm"]["weights"]
        assert_close(run(process, algorithm, local_steps=3, prox_weight=0.0)[0]["algorithm"]["weights"], plain)
        pulled = run(process, algorithm, local_steps=3, prox_weight=1.0)[0]["algorithm"]["weights"]
    assert not any(np.array_equal(pulled[name], value) for name, value in plain.items())
