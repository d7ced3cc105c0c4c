"""Federated reconstruction through tff.learning: noised sums, no client state, no metrics beside them."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import gamma, network_roundings
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.accounting.accountants import Adjacency
from tff_pdp.privacy.mechanisms.parameters import UserMechanism
from tff_pdp.privacy.plans.user import UserPlan
from tff_pdp.processes.learning_process import build_reconstruction, client_batches

MODEL = build_mlp((3,), 2, (4,))
BODY = [name for name in MODEL.init(0) if name not in MODEL.head]
SIZE = sum(MODEL.init(0)[name].size for name in BODY)
SEEDS = np.array([[1, 2], [3, 4]])


def plan(clip_norm, noise_multiplier, cohort=2.0):
    return UserPlan(
        unit="user",
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        claim="none",
        claim_reason="a test",
        budgets={},
        rounds=3,
        batch_size=2,
        mechanism=UserMechanism(clip_norm, noise_multiplier, 0.5, cohort),
        num_users=4,
        is_constant=False,
        num_released=SIZE,
        num_noised=SIZE,
    )


def clients(number=2):
    rng = np.random.default_rng(0)
    return [client_batches(MODEL, rng.normal(size=(5, 3)), rng.integers(0, 2, 5), batch_size=2) for _ in range(number)]


def body(process, state):
    return [np.asarray(value) for value in process.get_model_weights(state).trainable]


def one_round(process, data):
    first = process.initialize()
    output = process.next(first, data)
    moved = [new - old for old, new in zip(body(process, first), body(process, output.state), strict=True)]
    return moved, output.metrics


def by_hand(batches, rate=0.1):
    """The body's movement in float64: an epoch for the head alone, then one for the body alone."""
    weights = {name: tf.constant(value, tf.float64) for name, value in MODEL.init(0).items()}
    for names in (list(MODEL.head), BODY):
        for batch in batches:
            with tf.GradientTape() as tape:
                tape.watch([weights[name] for name in names])
                loss = tf.reduce_mean(MODEL.loss(weights, tf.cast(batch["x"], tf.float64), batch["y"]))
            gradients = tape.gradient(loss, [weights[name] for name in names])
            weights |= {name: weights[name] - rate * g for name, g in zip(names, gradients, strict=True)}
    return [weights[name].numpy() - MODEL.init(0)[name] for name in BODY]


@pytest.mark.parametrize("private", [False, True])
def test_a_round_without_noise_moves_the_body_by_the_mean_movement(engines, private):
    unclipped = plan(math.inf, 0.0) if private else None
    process = build_reconstruction(MODEL, plan=unclipped, seeds=SEEDS)
    data = clients()
    with engines["loop"].install():
        moved, _ = one_round(process, data)
    expected = [np.mean(one, axis=0) for one in zip(*map(by_hand, data), strict=True)]
    # Two epochs of three batches each, which move weights by a rate of a tenth; differences of weights that are below
    # one by Glorot's limits are rounded in each step.
    steps = 2 * 3
    bound = gamma(steps * network_roundings(MODEL.init(0), 2)) * 0.1 * steps + gamma(steps + 3)
    for one, other in zip(moved, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=bound)


def test_the_noise_is_the_plans_and_the_same_for_the_same_seeds(engines):
    process = build_reconstruction(MODEL, plan=plan(0.5, 3.0), seeds=SEEDS, learning_rate=0.0)
    with engines["loop"].install():
        moved, _ = one_round(process, clients())
        again, _ = one_round(process, clients())
    draws = np.concatenate([one.ravel() for one in moved])
    expected = 3.0 * 0.5 / 2.0
    assert abs(draws.std() / expected - 1) < 4 / math.sqrt(2 * SIZE)
    for one, other in zip(moved, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_with_a_plan_no_exact_metric_of_clients_leaves_the_process(engines):
    with engines["loop"].install():
        _, metrics = one_round(build_reconstruction(MODEL, plan=plan(0.5, 3.0), seeds=SEEDS), clients())
        _, exact = one_round(build_reconstruction(MODEL), clients())
    # What is left describes the aggregation, of which TFF and tensorflow-privacy report nothing exact.
    assert not tf.nest.flatten(metrics["client_work"])
    assert tf.nest.flatten(exact["client_work"]), "this test needs metrics to leave out"
    assert not tf.nest.flatten(metrics["aggregator"])


def test_one_more_client_moves_the_sum_by_at_most_the_clip_norm(engines):
    process = build_reconstruction(MODEL, plan=plan(0.01, 0.0), seeds=SEEDS, learning_rate=5.0)
    with engines["loop"].install():
        both, _ = one_round(process, clients(2))
        alone, _ = one_round(process, clients(2)[:1])
    difference = np.concatenate([(one - other).ravel() for one, other in zip(both, alone, strict=True)])
    # Both are over the constant of two clients. Movements are differences of weights, below one by Glorot's limits, of
    # which each round rounds every value once.
    rounded = 2 * 2 * gamma(1) * math.sqrt(SIZE)
    assert 0.009 < 2 * np.linalg.norm(difference) <= 0.01 + rounded


def test_noise_needs_secret_seeds():
    with pytest.raises(ValueError, match="secret seeds"):
        build_reconstruction(MODEL, plan=dataclasses.replace(plan(1.0, 1.0)))
