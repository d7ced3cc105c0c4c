"""Gradients through local steps, against a network written out in NumPy, in float64, and its central differences."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.algorithms.algorithm_support import NO_DATA, hparams, weights
from tff_pdp.algorithms.base import ClientData, map_weights
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.algorithms.meta_learning.meta_gradient import adapt_and_query
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.models.convolutional import build_cnn
from tff_pdp.models.dense import build_mlp

MODEL = build_mlp((3,), 3, (4,))
ONCE = LocalSteps(tf.constant(1), tf.constant(1))
BATCH, RATE, STEPS, QUERIES = 2, 0.3, 3, 2
_RNG = np.random.default_rng(2)
X, Y = _RNG.normal(size=(6, 3)).astype(np.float32), _RNG.integers(0, 3, 6)
# Batches follow each other, from the first one; the queries are after the three of the steps.
BATCHES = [slice(BATCH * (index % 3), BATCH * (index % 3) + BATCH) for index in range(STEPS + QUERIES)]


def estimated(model=MODEL, x=X, y=Y, batch_size=BATCH, num_steps=8):
    """The gradient function of a client without privacy."""
    estimator = build_minibatch(model, batch_size)
    sizes = tf.constant([len(y)])
    draws = estimator.draw({}, sizes, sizes[0], tf.constant([num_steps]), tf.zeros([1, 2], tf.int64))
    own = tf.nest.map_structure(lambda leaf: leaf[0], draws)
    data = ClientData(tf.constant(x), tf.constant(y), sizes[0])

    def grad_fn(current, examples, index, scale, pull=None, trainable=None):
        return estimator.gradient({}, own, current, examples, index, scale, pull, trainable)

    return data, grad_fn


def tensors(arrays):
    return collections.OrderedDict((name, tf.constant(value, tf.float32)) for name, value in arrays.items())


def given(rate=RATE, count=STEPS, bound=STEPS):
    query = LocalSteps(tf.constant(QUERIES), tf.constant(QUERIES))
    return {**hparams(count, bound, learning_rate=rate), "query_steps": query}


def update_of(order, start, **options):
    data, grad_fn = estimated()
    return adapt_and_query(order, start, start, data, grad_fn, given(**options))


def loss_and_gradient(current, batch):
    """Computes loss and gradient of the network with one hidden layer, in NumPy."""
    x, y = X[batch].astype(np.float64), Y[batch]
    kernel, bias, last_kernel, last_bias = current.values()
    before = x @ kernel + bias
    hidden = np.maximum(before, 0)
    scores = hidden @ last_kernel + last_bias
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    loss = -np.mean(np.log(shares[np.arange(len(y)), y]))
    errors = (shares - np.eye(3)[y]) / len(y)
    back = errors @ last_kernel.T * (before > 0)
    return loss, [x.T @ back, back.sum(0), hidden.T @ errors, errors.sum(0)]


def meta_objective(start):
    current = {name: value.copy() for name, value in start.items()}
    for batch in BATCHES[:STEPS]:
        moves = loss_and_gradient(current, batch)[1]
        current = {name: value - RATE * move for (name, value), move in zip(current.items(), moves, strict=True)}
    return np.mean([loss_and_gradient(current, batch)[0] for batch in BATCHES[STEPS:]])


def started():
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=value.shape) * 0.7 for name, value in MODEL.init(0).items()}


def test_it_is_the_derivative_of_the_loss_after_the_steps():
    start = {name: value.astype(np.float32).astype(np.float64) for name, value in started().items()}
    _, update = update_of("second", tensors(start))
    width = 1e-5
    for name, value in start.items():
        expected = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            shift = np.zeros_like(value)
            shift[place] = width
            above, below = (meta_objective({**start, name: value + sign * shift}) for sign in (1, -1))
            expected[place] = (above - below) / (2 * width)
        # Of the largest: a coordinate near zero is a difference of larger terms.
        np.testing.assert_allclose(-update[name], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    # The steps do bend it: without the Hessians it is another one.
    first = update_of("first", tensors(start))[1]
    apart = [np.abs(update[name] - first[name]).max() / np.abs(first[name]).max() for name in start]
    assert min(apart) > 0.02


def test_an_inner_rate_of_zero_leaves_the_gradient_of_the_query():
    start = tensors(started())
    adapted, update = update_of("second", start, rate=0.0)
    first = update_of("first", start, rate=0.0)[1]
    for name, value in start.items():
        np.testing.assert_array_equal(adapted[name], value)
        np.testing.assert_array_equal(update[name], first[name])
    assert all(np.any(value) for value in first.values())


def curved(current, data, index, scale, pull=None, trainable=None):
    """Gradients of `a (w - t)^2 / 2`, a batch's own a and t; the last is for steps after a client's own."""
    curvature, target = (tf.gather(values, index) for values in ((1.0, 0.5, 2.0, 4.0, 64.0), (4.0, 2.0, 1.0, 3.0, 9.0)))
    return collections.OrderedDict(w=scale * curvature * (current["w"] - target))


@pytest.mark.parametrize("bound", [2, 4])
def test_quadratic_losses_by_hand(bound):
    # w: 0 -> 2 -> 2. The gradients there are 2 (2 - 1) and 4 (2 - 3), and their mean is -1.
    # The steps shrink a shift of the start by 1 - 0.5 and by 1 - 0.25.
    values = given(rate=0.5, count=2, bound=bound)
    adapted, update = adapt_and_query("second", weights(0.0), weights(0.0), NO_DATA, curved, values)
    np.testing.assert_array_equal(adapted["w"], [2.0])
    np.testing.assert_array_equal(update["w"], [1.0 * 0.5 * 0.75])
    first = adapt_and_query("first", weights(0.0), weights(0.0), NO_DATA, curved, values)[1]
    np.testing.assert_array_equal(first["w"], [1.0])


def test_a_stack_of_clients_each_with_its_own_number_of_steps():
    def of_one(count):
        steps = {"local_steps": LocalSteps(count, tf.constant(3)), "query_steps": ONCE}
        values = {**given(rate=0.25), **steps}
        return adapt_and_query("second", weights(0.0), weights(0.0), NO_DATA, curved, values)[1]["w"]

    # w: 0 -> 1 -> 1.125 -> 1.0625, and the query is the next batch.
    shrunk = np.cumprod([1 - 0.25 * 1.0, 1 - 0.25 * 0.5, 1 - 0.25 * 2.0])
    expected = -shrunk * [0.5 * (1 - 2), 2.0 * (1.125 - 1), 4.0 * (1.0625 - 3)]
    np.testing.assert_array_equal(tf.vectorized_map(of_one, tf.constant([1, 2, 3]))[:, 0], expected)


def test_reptile_measures_the_movement_from_the_shared_weights():
    values = given(rate=0.5, count=1, bound=1)
    adapted, update = adapt_and_query("reptile", weights(2.0), weights(1.0), NO_DATA, curved, values)
    np.testing.assert_array_equal([adapted["w"], update["w"]], [[3.0], [2.0]])


@pytest.mark.all
def test_pooled_convolutions_have_second_derivatives_in_stacks_too():
    model = build_cnn((8, 8, 1), 3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 8, 8, 1)).astype(np.float32), rng.integers(0, 3, 4)
    data, grad_fn = estimated(model, x, y, batch_size=4, num_steps=4)
    start = tensors(model.init(0))
    values = {**given(rate=0.5, count=1, bound=1), "query_steps": ONCE}

    def of_one(size):
        scaled = map_weights(lambda value: size * value, start)
        return adapt_and_query("second", scaled, scaled, data, grad_fn, values)[1]

    def loss_after_a_step(current):
        moved = map_weights(tf.subtract, current, grad_fn(current, data, tf.constant(0), tf.constant(0.5)))
        return tf.reduce_mean(model.loss(moved, data.x, data.y))

    sizes = tf.constant([1.0, 1.5])
    stacked = tf.function(lambda: tf.vectorized_map(of_one, sizes))()
    for place, size in enumerate(sizes):
        current = map_weights(lambda value, size=size: size * value, start)
        with tf.GradientTape() as tape:
            tape.watch(list(current.values()))
            loss = loss_after_a_step(current)
        for name, gradient in zip(current, tape.gradient(loss, list(current.values())), strict=True):
            largest = np.abs(gradient).max()
            np.testing.assert_allclose(stacked[name][place], -gradient, rtol=0, atol=1e-4 * largest)
