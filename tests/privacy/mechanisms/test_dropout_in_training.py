"""Dropout under DP-SGD and in plain batches: masks by client, step and example, whatever else is computed beside."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.base import ClientData
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.models.dense import build_linear_regression
from tff_pdp.models.dropout import RowDraws, dropout
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.per_example import clipped_sum
from tff_pdp.processes.vectorizable import map_stack

FEATURES, ROWS, STEPS = 32, 10, 2
PLAIN = build_linear_regression((FEATURES,))


def _predict(weights, x, draws):
    return PLAIN.predict(weights, dropout(x, 0.5, draws, 0))


MODEL = dataclasses.replace(PLAIN, training_predict=_predict)
# The same, with weights that no layer reads: each example's gradient is computed by itself.
BY_NAME = dataclasses.replace(
    MODEL,
    training_predict=lambda weights, x, draws: (
        tf.linalg.matvec(dropout(x, 0.5, draws, 0), weights["dense_0/kernel"][:, 0]) + weights["dense_0/bias"]
    ),
)
WEIGHTS = collections.OrderedDict((name, tf.constant(array)) for name, array in PLAIN.init(0).items())
MECHANISM = {"clip_norm": np.inf, "noise_multiplier": 0.0, "sampling_rate": 1.0, "expected_batch_size": 1.0}
# Weights are zero: with labels of -1, an example's gradient w.r.t. the kernel is its features after dropout.
DATA = ClientData(tf.ones([ROWS, FEATURES]), -tf.ones([ROWS]), tf.constant(ROWS))
SEEDS = np.array([[1, 2], [3, 4]])


ESTIMATORS = {
    "philox": build_dp_sgd(MODEL),
    "chacha20": build_dp_sgd(MODEL, generator="chacha20"),
    "by name": build_dp_sgd(BY_NAME),
    "plain": build_minibatch(MODEL, ROWS),
}


@functools.cache
def gradients_of(name):
    """A function, traced once, of clients' seeds: all gradients of a stack of clients."""
    estimator = ESTIMATORS[name]

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 2], tf.int64)])
    def gradients(seeds):
        ones = tf.ones(tf.shape(seeds)[:1], tf.int32)
        mechanism = {one: tf.fill(tf.shape(ones), np.float32(MECHANISM[one])) for one in estimator.mechanism}
        draws = estimator.draw(mechanism, ones * DATA.num_examples, tf.constant(ROWS), ones * STEPS, seeds)

        def of_client(own):
            parameters, own_draws = own

            def of_step(step):
                found = estimator.gradient(parameters, own_draws, WEIGHTS, DATA, tf.constant(step), tf.constant(1.0))
                return found["dense_0/kernel"][:, 0]

            return tf.stack([of_step(step) for step in range(STEPS)])

        return map_stack(of_client, (mechanism, draws))

    return gradients


def masks_of(name, seeds=SEEDS):
    """The sums of all examples' masks: `[clients, steps, FEATURES]`, of a stack of all clients."""
    return gradients_of(name)(tf.constant(seeds, tf.int64)).numpy()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_masks_differ_by_client_and_step_and_are_drawn_again_alike(name):
    masks = masks_of(name)
    unit = ROWS if name == "plain" else 1
    # Each value is kept, and doubled, or dropped: sums over examples are even numbers up to twice their number.
    counts = masks * unit / 2
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-4)
    assert 0.35 < counts.mean() / ROWS < 0.65
    flat = np.round(counts).reshape(4, FEATURES)
    assert all((flat[one] != flat[other]).sum() > 8 for one in range(4) for other in range(one))
    np.testing.assert_array_equal(masks_of(name), masks)
    # Alone, a client has the masks that it has in a stack; so it has on every engine, and after a stopped run.
    for client in range(2):
        np.testing.assert_allclose(masks_of(name, seeds=SEEDS[client : client + 1])[0], masks[client], atol=1e-5)


def test_closed_forms_and_gradients_one_by_one_have_the_same_masks():
    np.testing.assert_allclose(masks_of("by name"), masks_of("philox"), atol=1e-4)


@pytest.mark.parametrize("model", [MODEL, BY_NAME])
def test_an_example_changes_its_own_part_alone(model):
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(ROWS, FEATURES)))
    changed = x.copy()
    changed[3] = 50.0
    draws = RowDraws(tf.constant([1, 2], tf.int64), tf.range(ROWS, dtype=tf.int64))
    included = np.ones(ROWS, np.float32)
    included[3] = 0.0
    sums = [
        clipped_sum(
            model,
            WEIGHTS,
            tf.constant(own),
            DATA.y,
            clip_norm=tf.constant(1.0),
            included=tf.constant(included),
            draws=draws,
        )["dense_0/kernel"].numpy()
        for own in (x, changed)
    ]
    np.testing.assert_array_equal(*sums)
    # And no example's place among the others matters: in another order, the sum is of the same numbers.
    order = rng.permutation(ROWS)
    moved = clipped_sum(
        model,
        WEIGHTS,
        tf.constant(x[order]),
        DATA.y,
        clip_norm=tf.constant(1.0),
        included=tf.constant(included[order]),
        draws=dataclasses.replace(draws, rows=tf.constant(order, tf.int64)),
    )["dense_0/kernel"].numpy()
    np.testing.assert_allclose(moved, sums[0], atol=1e-12)


def test_models_without_dropout_draw_the_bits_that_they_always_drew():
    draws = [
        build_dp_sgd(model).draw(
            {name: tf.constant([value], tf.float32) for name, value in {**MECHANISM, "clip_norm": 1.0}.items()},
            tf.constant([ROWS]),
            tf.constant(ROWS),
            tf.constant([STEPS]),
            tf.constant(SEEDS[:1]),
        )
        for model in (PLAIN, MODEL)
    ]
    assert draws[0].keys == ()
    assert draws[1].keys.shape == (1, STEPS, 2)
