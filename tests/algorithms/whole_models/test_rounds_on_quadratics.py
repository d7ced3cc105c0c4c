"""Rounds of FedProx and FedNova on quadratic losses `a_m (w - t_m)^2 / 2`, against the papers' steps in NumPy."""

import collections

import numpy as np
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, weights
from tests.rounding import gamma
from tff_pdp.algorithms.whole_models.fed_nova import build_fed_nova
from tff_pdp.algorithms.whole_models.fed_prox import build_fed_prox

CURVATURES, TARGETS, STEPS = np.array([1.0, 0.5, 2.0]), np.array([-1.0, 4.0, 1.0]), np.array([4, 2, 3])
START, RATE, PULL, ROUNDS = 8.0, 0.25, 0.75, 6
# In a round a step has eight roundings, and means and differences another ten; no number is above 16.
BOUND = 2 * gamma(ROUNDS * (8 * int(STEPS.max()) + 10)) * 16.0


def rounds_of(algorithm, **values):
    """Yields the shared weight after each round of all clients."""
    server = algorithm.init_server(weights(START))
    for _ in range(ROUNDS):
        released, public = [], []
        for curvature, target, steps in zip(CURVATURES, TARGETS, STEPS, strict=True):

            def grad_fn(current, data, index, scale, pull=None, trainable=None, a=curvature, t=target):
                return collections.OrderedDict(w=scale * np.float32(a) * (current["w"] - np.float32(t)))

            given, message = hparams(int(steps), 5, learning_rate=RATE, **values), algorithm.broadcast(server)
            result = algorithm.client_update(message, algorithm.init_client(message), NO_DATA, grad_fn, given)
            released.append(result.released)
            public.append(algorithm.public_values(given) if algorithm.public_values else {})
        means = [
            tf.nest.map_structure(lambda *one: tf.reduce_mean(tf.stack(one), 0), *each) for each in (released, public)
        ]
        server = algorithm.server_update(server, {**means[0], **means[1]})
        yield float(server["weights"]["w"][0])


def local_steps(shared, pull=0.0):
    """All clients' weights after their steps."""
    moved = np.full(len(TARGETS), shared)
    for step in range(STEPS.max()):
        gradients = CURVATURES * (moved - TARGETS) + pull * (moved - shared)
        moved = moved - np.where(step < STEPS, RATE * gradients, 0.0)
    return moved


def test_fed_prox_is_the_mean_of_pulled_steps():
    expected, shared = [], START
    for _ in range(ROUNDS):
        shared = local_steps(shared, PULL).mean()
        expected.append(shared)
    np.testing.assert_allclose(list(rounds_of(build_fed_prox(), prox_weight=PULL)), expected, rtol=0, atol=BOUND)


def test_fed_nova_moves_by_the_mean_direction_times_the_mean_number_of_steps():
    expected, shared = [], START
    for _ in range(ROUNDS):
        # d_m = (w - w_m) / (eta tau_m), and w <- w - eta (sum p_m tau_m) sum p_m d_m.
        directions = (shared - local_steps(shared)) / (RATE * STEPS)
        shared = shared - RATE * STEPS.mean() * directions.mean()
        expected.append(shared)
    np.testing.assert_allclose(list(rounds_of(build_fed_nova())), expected, rtol=0, atol=BOUND)
    # The mean of the clients' weights would be another point.
    assert abs(expected[0] - local_steps(START).mean()) > 0.1
