"""Training some of a model's weights over fixed ones: what is predicted, and which gradients are clipped."""

import logging

import numpy as np
import tensorflow as tf

from tests.models.float64_support import per_example_norms
from tests.rounding import gamma, network_roundings
from tff_pdp.models.dense import build_mlp
from tff_pdp.models.derived import SCALE, SHIFT, over_fixed_weights, with_scaled_inputs
from tff_pdp.privacy.mechanisms.per_example import clipped_sum


def head_model(model, seed=3):
    weights = {name: tf.constant(array) for name, array in model.init(seed).items()}
    own = {name: weights[name].numpy() for name in model.head}
    return weights, over_fixed_weights(model, own, {n: w for n, w in weights.items() if n not in own})


def examples(number=7):
    rng = np.random.default_rng(0)
    return tf.constant(rng.normal(size=(number, 4)), tf.float32), tf.constant(rng.integers(0, 3, number))


def gradients_by_hand(model, weights, names, x, y):
    """One tape for each example, over the named weights alone."""
    rows = []
    for index in range(len(x)):
        own = {name: weights[name] for name in names}
        with tf.GradientTape() as tape:
            tape.watch(own)
            loss = model.loss({**weights, **own}, x[index : index + 1], y[index : index + 1])
        gradient = tape.gradient(loss, own)
        rows.append(np.concatenate([np.ravel(gradient[name]) for name in names]))
    return np.stack(rows)


def test_it_predicts_the_same_and_begins_with_the_own_weights():
    model = build_mlp((4,), 3)
    weights, head = head_model(model)
    x, _ = examples()
    np.testing.assert_array_equal(head.predict(head.init(0), x), model.predict(weights, x))
    assert sorted(head.init(5)) == sorted(model.head)
    assert head.head == model.head


def test_what_is_clipped_is_the_gradient_by_the_own_weights_alone(caplog):
    model = with_scaled_inputs(build_mlp((4,), 3))
    weights, head = head_model(model)
    weights[SHIFT], weights[SCALE] = tf.fill([4], 0.5), tf.fill([4], 2.0)
    head = over_fixed_weights(
        model, {n: weights[n].numpy() for n in model.head}, {n: w for n, w in weights.items() if n not in model.head}
    )
    x, y = examples()
    in_float64 = {name: tf.cast(weight, tf.float64) for name, weight in weights.items()}
    expected = gradients_by_hand(model, in_float64, model.head, tf.cast(x, tf.float64), y)
    norms = np.linalg.norm(expected, axis=1)
    # The norms also sum the squares of a gradient.
    bound = gamma(network_roundings(weights, len(x)) + expected.shape[1])
    own = {name: weights[name] for name in model.head}
    with caplog.at_level(logging.WARNING):
        np.testing.assert_allclose(per_example_norms(head, own, x, y), norms, rtol=bound)
        clip_norm = float(np.median(norms))
        total = clipped_sum(head, own, x, y, clip_norm=tf.constant(clip_norm, tf.float32), included=tf.ones([len(x)]))
    assert not caplog.records, "norms of a head must not need every example's gradient"
    flat = np.concatenate([np.ravel(total[name]) for name in model.head])
    factors = np.minimum(1, clip_norm / norms)
    clipped = (factors[:, np.newaxis] * expected).sum(axis=0)
    np.testing.assert_allclose(flat, clipped, atol=2 * bound * np.abs(clipped).max())


def test_weights_may_be_made_of_the_own_ones():
    model = build_mlp((4,), 3)
    weights = {name: tf.constant(array) for name, array in model.init(1).items()}

    def make(own):
        return {name: tf.cast(weight, own["factor"].dtype) * own["factor"][0] for name, weight in weights.items()}

    made = over_fixed_weights(model, {"factor": np.array([2.0], np.float32)}, {}, make)
    x, y = examples()
    doubled = {name: 2 * weight for name, weight in weights.items()}
    expected = model.predict(doubled, x).numpy()
    bound = gamma(network_roundings(weights) + model.num_parameters())
    np.testing.assert_allclose(made.predict(made.init(0), x), expected, atol=2 * bound * np.abs(expected).max())
    # By hand in float64, where the factor's derivative sums over all weights.
    own, by_hand = {"factor": tf.constant([2.0], tf.float64)}, []
    for index in range(len(x)):
        with tf.GradientTape() as tape:
            tape.watch(own)
            loss = model.loss(make(own), tf.cast(x[index : index + 1], tf.float64), y[index : index + 1])
        by_hand.append(abs(float(tape.gradient(loss, own)["factor"][0])))
    found = per_example_norms(made, {"factor": tf.constant([2.0])}, x, y)
    np.testing.assert_allclose(found, by_hand, atol=bound * max(by_hand))
