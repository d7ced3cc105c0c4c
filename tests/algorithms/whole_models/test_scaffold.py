"""SCAFFOLD on quadratic losses `a_m (w - t_m)^2 / 2`, whose mean has its minimum at `sum(a t) / sum(a)`."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, pull_to, weights
from tests.contract.contract_support import assert_close, assert_same, build
from tests.rounding import gamma
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.whole_models.scaffold import build_scaffold
from tff_pdp.errors import ConfigError
from tff_pdp.privacy.plans.user import check_for_users
from tff_pdp.testing.algorithms import run

ALGORITHM = build_scaffold()
CURVATURES, TARGETS, STEPS = np.array([1.0, 0.5, 2.0]), np.array([-1.0, 4.0, 1.0]), np.array([4, 2, 3])
RATE, ROUNDS = 0.25, 6
# Of the four clients of the contract.
STEPS_OF_ALL = (2, 3, 1, 2)


def optimum(places):
    return np.sum(CURVATURES[places] * TARGETS[places]) / np.sum(CURVATURES[places])


@tf.function
def client_round(message, state, curvature, target, steps):
    def grad_fn(current, data, index, scale, pull=None, trainable=None):
        return collections.OrderedDict(w=scale * curvature * (current["w"] - target))

    given = {"learning_rate": tf.constant(RATE), "local_steps": LocalSteps(steps, tf.constant(5))}
    result = ALGORITHM.client_update(message, state, NO_DATA, grad_fn, given)
    return result.state, result.released


def one_round(server, states, places):
    """A round of the clients at `places`; returns the server's state and all clients' states."""
    states, released = list(states), []
    for place in places:
        numbers = (tf.constant(values[place], tf.float32) for values in (CURVATURES, TARGETS))
        steps = tf.constant(STEPS[place], tf.int32)
        state, own = client_round(ALGORITHM.broadcast(server), states[place], *numbers, steps)
        states[place] = state
        released.append(own)
    means = tf.nest.map_structure(lambda *values: tf.reduce_mean(tf.stack(values), 0), *released)
    return ALGORITHM.server_update(server, means), states


def started(weight):
    server = ALGORITHM.init_server(weights(weight))
    return server, [ALGORITHM.init_client(ALGORITHM.broadcast(server))] * len(TARGETS)


def in_numpy(weight, rounds):
    """Algorithm 1 of the paper, option II, with all clients: controls change, and c by the mean change."""
    control, own = 0.0, np.zeros(len(TARGETS))
    for _ in range(rounds):
        moved = np.full(len(TARGETS), weight)
        for step in range(STEPS.max()):
            moved -= np.where(step < STEPS, RATE * (CURVATURES * (moved - TARGETS) - own + control), 0.0)
        new = own - control + (weight - moved) / (STEPS * RATE)
        weight, control, own = weight + np.mean(moved - weight), control + np.mean(new - own), new
        yield weight, control, own


def test_a_step_by_hand():
    # The step is 4 - 3 - 2 + 1 = 0 off: w: 3 - 0.5 * ((3 - 5) - 1 + 2) = 3.5. The control is the gradient, -2.
    message = {"weights": weights(3.0), "control": weights(2.0)}
    given = hparams(learning_rate=0.5, local_steps=1)
    result = ALGORITHM.client_update(message, {"control": weights(1.0)}, NO_DATA, pull_to(5.0), given)
    np.testing.assert_array_equal(result.released["update"]["w"], [0.5])
    np.testing.assert_array_equal(result.released["control"]["w"], [-2.0])
    np.testing.assert_array_equal(result.state["control"]["w"], [-2.0])
    after = build_scaffold(server_rate=0.5).server_update(message, result.released)
    np.testing.assert_array_equal([after["weights"]["w"], after["control"]["w"]], [[3.25], [-2.0]])


def test_rounds_of_clients_with_other_optima_and_numbers_of_steps_are_the_papers():
    server, states = started(8.0)
    # In a round a step has six roundings, and the controls and means another ten; a control divides by 1/2 or more.
    bound = 2 * gamma(2 * ROUNDS * (6 * int(STEPS.max()) + 10)) * 16.0
    for expected in in_numpy(8.0, ROUNDS):
        server, states = one_round(server, states, range(len(TARGETS)))
        found = server["weights"]["w"][0], server["control"]["w"][0], [state["control"]["w"][0] for state in states]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def test_at_the_optimum_the_controls_cancel_the_drift():
    best = optimum(np.arange(3))
    server, states = started(best)
    controls = CURVATURES * (best - TARGETS)
    states = [{"control": weights(control)} for control in controls]
    after, kept = one_round(server, states, range(3))
    bound = gamma(6 * int(STEPS.max()) + 10) * 16.0
    np.testing.assert_allclose(after["weights"]["w"], [best], rtol=0, atol=bound)
    np.testing.assert_allclose([state["control"]["w"][0] for state in kept], controls, rtol=0, atol=bound)
    # Without controls, as in FedAvg, the shared weights leave the optimum.
    drifted, _ = one_round(*started(best), range(3))
    assert abs(float(drifted["weights"]["w"][0]) - best) > 0.1


def test_it_finds_the_optimum_of_all_and_once_a_client_has_left_that_of_the_others():
    server, states = started(8.0)
    for places in ([0, 1, 2], [0, 2]):
        for _ in range(60):
            server, states = one_round(server, states, places)
        np.testing.assert_allclose(server["weights"]["w"], [optimum(places)], rtol=0, atol=gamma(100) * 16.0)


def test_with_one_step_the_corrections_and_their_noise_cancel_in_the_mean(engines):
    with engines["loop"].install():
        (algorithm, process), (fed_avg, shared) = build("scaffold"), build("fed_avg")
        server, clients = run(process, algorithm, local_steps=1)
        assert_close(server["algorithm"]["weights"], run(shared, fed_avg, local_steps=1)[0]["algorithm"]["weights"])
    assert len({client["control"]["dense_0/kernel"].tobytes() for client in clients}) == len(clients)


def test_the_first_round_is_fed_avgs_and_the_servers_control_is_the_mean_of_all_clients(engines):
    with engines["loop"].install():
        (algorithm, process), (fed_avg, shared) = build("scaffold"), build("fed_avg")
        server, clients = run(process, algorithm, 1, local_steps=STEPS_OF_ALL)
        plain, _ = run(shared, fed_avg, 1, local_steps=STEPS_OF_ALL)
        assert_same(server["algorithm"]["weights"], plain["algorithm"]["weights"])
        later, kept = run(process, algorithm, (2, 3), start=(server, list(clients)), local_steps=STEPS_OF_ALL)
        others = run(shared, fed_avg, (2, 3), start=(plain, [{}] * len(clients)), local_steps=STEPS_OF_ALL)[0]
    for after, states in ((server, clients), (later, kept)):
        for name, control in after["algorithm"]["control"].items():
            own = np.stack([state["control"][name] for state in states]).astype(np.float64)
            # A sum of four, and a division.
            np.testing.assert_allclose(control, own.mean(0), rtol=0, atol=gamma(6) * np.abs(own).max())
            assert np.ptp(own, axis=0).max() > 0
    # From the second round on the corrections count.
    assert not np.array_equal(
        later["algorithm"]["weights"]["dense_0/kernel"], others["algorithm"]["weights"]["dense_0/kernel"]
    )


def test_it_is_for_clients_that_always_take_part_with_a_rate_above_zero():
    with pytest.raises(ConfigError, match="scaffold needs every client in every round"):
        check_for_users(ALGORITHM, "uniform")
    with pytest.raises(ConfigError, match="learning_rate must be a number of at least 1e-06, not 0"):
        ALGORITHM.hparams["learning_rate"].check("algorithms.scaffold.learning_rate", 0.0)
