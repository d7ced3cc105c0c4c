"""The first phase is the method; in the second, clients train alone, from its model, and release nothing."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.phases import in_phases
from tff_pdp.algorithms.whole_models.fed_avg import build_fed_avg
from tff_pdp.algorithms.whole_models.finetune import build_local_only
from tff_pdp.algorithms.whole_models.ifca import build_ifca
from tff_pdp.errors import ConfigError

FEDERATED, ADAPTATION = in_phases(build_fed_avg(), federated_rounds=3, num_clients=4)
SHARED = {"weights": weights(1.0)}
ADAPTING = {
    "adaptation_learning_rate": tf.constant(0.5),
    "adaptation_steps": LocalSteps(tf.constant(1), tf.constant(1)),
}


def adapt(message, state, target=5.0):
    return ADAPTATION.client_update(message, state, NO_DATA, pull_to(target), ADAPTING)


def test_a_round_on_synthetic_data_is_the_methods_own():
    state = FEDERATED.init_client(SHARED)
    result = FEDERATED.client_update(SHARED, state, NO_DATA, pull_to(5.0), hparams(learning_rate=0.5))
    np.testing.assert_array_equal(result.released["update"]["w"], [2.0])
    assert not result.state["is_adapted"]
    np.testing.assert_array_equal(FEDERATED.personalise(SHARED, result.state)["w"], [1.0])


def test_adaptation_starts_from_the_shared_model_and_goes_on_from_the_clients_own():
    first = adapt(SHARED, FEDERATED.init_client({"weights": weights(-7.0)}))
    np.testing.assert_array_equal(first.state["weights"]["w"], [3.0])
    second = adapt(SHARED, first.state)
    np.testing.assert_array_equal(second.state["weights"]["w"], [4.0])
    np.testing.assert_array_equal(ADAPTATION.personalise(SHARED, second.state)["w"], [4.0])
    assert first.released == second.released == {}


def test_without_a_shared_model_adaptation_starts_from_the_clients_model():
    adaptation = in_phases(build_local_only(), federated_rounds=3, num_clients=4).adaptation
    state = {"method": {"weights": weights(3.0)}, "weights": weights(0.0), "is_adapted": tf.constant(False)}
    result = adaptation.client_update(SHARED, state, NO_DATA, pull_to(5.0), ADAPTING)
    np.testing.assert_array_equal(result.state["weights"]["w"], [4.0])


def test_a_method_may_say_where_adaptation_starts():
    method = dataclasses.replace(build_local_only(), adaptation_start=lambda message, state: message["weights"])
    adaptation = in_phases(method, federated_rounds=3, num_clients=4).adaptation
    state = {"method": {"weights": weights(3.0)}, "weights": weights(0.0), "is_adapted": tf.constant(False)}
    result = adaptation.client_update(SHARED, state, NO_DATA, pull_to(5.0), ADAPTING)
    np.testing.assert_array_equal(result.state["weights"]["w"], [3.0])


def test_the_server_keeps_its_state_while_clients_adapt():
    state = {"weights": weights(2.0)}
    assert ADAPTATION.server_update(state, {}) is state


def test_the_shared_model_is_sent_once_after_its_last_update():
    state = {"weights": {"w": np.zeros([5, 2], np.float32)}}
    assert ADAPTATION.traffic is not None
    for round_number, received in ((4, 10.0), (5, 0.0)):
        traffic = ADAPTATION.traffic(state, round_number)
        np.testing.assert_array_equal(traffic.uplink, np.zeros(4))
        np.testing.assert_array_equal(traffic.downlink, np.full(4, received))


def test_methods_that_select_by_records_are_refused():
    with pytest.raises(ConfigError, match="cannot train on synthetic data"):
        in_phases(build_ifca(rounds=4), federated_rounds=3, num_clients=4)
