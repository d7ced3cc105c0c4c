import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tests.contract.contract_support import assert_close, build
from tff_pdp.algorithms.whole_models.fed_nova import build_fed_nova
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.plans.user import check_for_users
from tff_pdp.testing.algorithms import SIZES, client_data, client_params

STEPS = (1, 2, 3, 4)


def test_a_round_by_hand():
    # w: 0 -> 2 -> 3, in two steps.
    algorithm, given = build_fed_nova(), hparams(learning_rate=0.5, local_steps=2)
    result = algorithm.client_update({"weights": weights(0.0)}, {}, NO_DATA, pull_to(4.0), given)
    np.testing.assert_array_equal(result.released["direction"]["w"], [1.5])
    assert float(algorithm.public_values(given)["steps"]) == 2.0
    # Beside a client that takes four steps: three steps on average.
    mean = {"direction": {"w": tf.constant([1.0])}, "steps": tf.constant(3.0)}
    after = algorithm.server_update({"weights": weights(1.0)}, mean)
    np.testing.assert_array_equal(after["weights"]["w"], [4.0])


def one_round(name, **given):
    algorithm, process = build(name)
    server = process.initialize()
    clients = [process.init_client(server)] * len(SIZES)
    params = client_params(algorithm, 1, sampling_rate=1.0, noise_multiplier=0.0, **given)
    return process.next(server, clients, client_data(), params)


@pytest.mark.parametrize("engine_name", ["loop", pytest.param("native", marks=pytest.mark.all)])
def test_with_equal_numbers_of_steps_it_is_fed_avg_and_with_others_the_mean_direction_counts(engines, engine_name):
    with engines[engine_name].install():
        nova, _, metrics = one_round("fed_nova", local_steps=3)
        assert_close(nova["algorithm"], one_round("fed_avg", local_steps=3)[0]["algorithm"])
        assert list(metrics) == ["direction_norm"]
        nova, clients, _ = one_round("fed_nova", local_steps=STEPS)
        assert list(map(dict, clients)) == [{}] * len(SIZES)
        alone = [one_round("local_only", local_steps=count)[1][place] for place, count in enumerate(STEPS)]
    initial = build("fed_nova")[1].initialize
    with engines[engine_name].install():
        start = initial()["algorithm"]["weights"]
    expected = {
        name: value
        + np.mean(STEPS)
        * np.mean([(own["weights"][name] - value) / tau for own, tau in zip(alone, STEPS, strict=True)], 0)
        for name, value in start.items()
    }
    assert_close(dict(nova["algorithm"]["weights"]), expected)


def test_it_is_not_for_users_of_whom_even_their_number_in_a_round_is_private():
    with pytest.raises(ConfigError, match="fed_nova tells the server the mean of steps over a round's clients"):
        check_for_users(build_fed_nova(), "uniform")
