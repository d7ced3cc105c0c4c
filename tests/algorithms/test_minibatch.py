"""Batches worked out by hand, on a regression whose gradients can be."""

import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import gamma
from tff_pdp.algorithms.base import ClientData
from tff_pdp.algorithms.minibatch import build_minibatch
from tff_pdp.engines.running import build_engine
from tff_pdp.experiment.kinds import ALGORITHMS
from tff_pdp.models.dense import build_linear_regression
from tff_pdp.processes.compose import compose

MODEL = build_linear_regression((2,))
NO_SEED = np.zeros(2, np.int64)
# A third, times small integers of one sign, and their sum.
MEAN_OF_THREE = gamma(2 + 3)


def draw(num_examples, num_steps, batch_size):
    """Which rows each client's steps use: a list of lists for each client."""
    estimator = build_minibatch(MODEL, batch_size)
    num_clients = len(num_examples)
    draws = estimator.draw(
        {},
        tf.constant(num_examples),
        tf.constant(max(num_examples)),
        tf.constant(num_steps),
        tf.zeros([num_clients, 2], tf.int64),
    )
    assert draws.indices.shape == draws.filled.shape == (num_clients, max(num_steps), batch_size)
    return [
        [row[filled].tolist() for row, filled in zip(*client, strict=True)]
        for client in zip(draws.indices.numpy(), draws.filled.numpy(), strict=True)
    ]


def named_gradient(weights, data, step, batch_size, scale=1.0, pull=None, trainable=None):
    estimator = build_minibatch(MODEL, batch_size)
    draws = estimator.draw(
        {}, data.num_examples[tf.newaxis], tf.shape(data.y)[0], tf.constant([step + 1]), tf.zeros([1, 2], tf.int64)
    )
    own = tf.nest.map_structure(lambda leaf: leaf[0], draws)
    return estimator.gradient({}, own, weights, data, tf.constant(step), tf.constant(scale), pull, trainable)


def gradient(weights, data, step, batch_size, scale=1.0):
    result = named_gradient(weights, data, step, batch_size, scale)
    assert list(result) == list(weights)
    return np.concatenate([np.ravel(tensor) for tensor in result.values()])


def weights_of(*values):
    kernel, bias = np.array(values[:2], np.float32).reshape(2, 1), np.array(values[2:], np.float32)
    return collections.OrderedDict([("dense_0/kernel", tf.constant(kernel)), ("dense_0/bias", tf.constant(bias))])


def client_data(x, y, num_examples=None):
    size = len(y) if num_examples is None else num_examples
    x = np.reshape(np.array(x, np.float32), [-1, 2])
    return ClientData(tf.constant(x), tf.constant(y, tf.float32), tf.constant(size))


def test_epoch_after_epoch_with_a_smaller_last_batch():
    assert draw([5], [7], 2) == [[[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]]]
    assert draw([4], [5], 2) == [[[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]]
    assert draw([3], [2], 8) == [[[0, 1, 2], [0, 1, 2]]]
    assert draw([3], [4], 1) == [[[0], [1], [2], [0]]]


def test_clients_of_different_sizes_have_epochs_of_their_own():
    batches = draw([5, 2, 1, 0, 4], [4, 4, 1, 4, 2], 2)
    assert batches[0] == [[0, 1], [2, 3], [4], [0, 1]]
    assert batches[1] == [[0, 1], [0, 1], [0, 1], [0, 1]]
    assert batches[2][:1] == [[0]]
    assert batches[3] == [[], [], [], []]
    assert batches[4][:2] == [[0, 1], [2, 3]]


def test_it_takes_no_mechanism():
    assert build_minibatch(MODEL, 2).mechanism == ()


def test_the_seed_decides_which_batch_is_the_first_and_nothing_else():
    # Five examples make three batches.
    given = ({}, tf.constant([5]), tf.constant(9), tf.constant([4]))
    draws = build_minibatch(MODEL, 2).draw
    from_zero = draws(*given, tf.constant([[3, 8]], tf.int64))
    np.testing.assert_array_equal(from_zero.indices, [[[0, 1], [2, 3], [4, 4], [0, 1]]])
    np.testing.assert_array_equal(from_zero.filled[0], [[True, True], [True, True], [True, False], [True, True]])
    for seed in (1, -2, 2**62 + 3 - 2**62 % 3 - 2):
        from_one = draws(*given, tf.constant([[seed, 0]], tf.int64))
        np.testing.assert_array_equal(from_one.indices, [[[2, 3], [4, 4], [0, 1], [2, 3]]])


def test_the_mean_gradient_by_hand():
    # Off by r = 1 * x1 + 2 * x2 + 3 - y, an example's gradient is r * (x1, x2, 1).
    data = client_data([[1, 0], [0, 1], [2, 2]], [3, 1, 8])
    weights = weights_of(1, 2, 3)
    # r = 1 and 4: gradients (1, 0, 1) and (0, 4, 4).
    np.testing.assert_array_equal(gradient(weights, data, 0, batch_size=2), [0.5, 2.0, 2.5])
    # r = 1, alone in the last batch of the epoch: its whole gradient, not half of it.
    np.testing.assert_array_equal(gradient(weights, data, 1, batch_size=2), [2.0, 2.0, 1.0])
    np.testing.assert_array_equal(gradient(weights, data, 2, batch_size=2), [0.5, 2.0, 2.5])
    np.testing.assert_allclose(gradient(weights, data, 0, batch_size=10), np.array([3, 6, 6]) / 3, rtol=MEAN_OF_THREE)
    np.testing.assert_array_equal(gradient(weights, data, 0, batch_size=2, scale=0.5), [0.25, 1.0, 1.25])


def test_padding_counts_for_nothing():
    data = client_data([[1, 0], [0, 1], [2, 2], [math.nan, 0], [5, 5]], [3, 1, 8, 0, math.inf], num_examples=3)
    weights = weights_of(1, 2, 3)
    np.testing.assert_array_equal(gradient(weights, data, 1, batch_size=2), [2.0, 2.0, 1.0])
    np.testing.assert_allclose(gradient(weights, data, 0, batch_size=10), np.array([3, 6, 6]) / 3, rtol=MEAN_OF_THREE)


def test_a_client_without_examples_has_no_gradient():
    data = client_data([[0, 0]] * 2, [0] * 2, num_examples=0)
    np.testing.assert_array_equal(gradient(weights_of(1, 2, 3), data, 0, batch_size=2), [0.0, 0.0, 0.0])


def test_an_example_shows_in_its_own_batch_alone():
    # Places of a smaller batch that are not filled hold none of another batch.
    data = client_data([[math.inf, 0], [0, 1], [2, 2]], [3, 1, 8])
    assert not np.isfinite(gradient(weights_of(1, 2, 3), data, 0, batch_size=2)).all()
    np.testing.assert_array_equal(gradient(weights_of(1, 2, 3), data, 1, batch_size=2), [2.0, 2.0, 1.0])


def test_the_mean_does_not_depend_on_how_often_all_examples_are_repeated():
    once = client_data([[1, 0], [0, 1], [2, 2]], [3, 1, 8])
    twice = client_data([[1, 0], [0, 1], [2, 2]] * 2, [3, 1, 8] * 2)
    results = [gradient(weights_of(1, 2, 3), data, 0, batch_size=6) for data in (once, twice)]
    # A third or a sixth, times small integers of one sign, and their sums.
    np.testing.assert_allclose(*results, rtol=gamma(2 + 3) + gamma(2 + 6))


# r = 1 and 4, as above: by the kernel (0.5, 2), by the bias 2.5.
DATA = client_data([[1, 0], [0, 1], [2, 2]], [3, 1, 8])
BY_NAME = {"dense_0/kernel": [[0.5], [2.0]], "dense_0/bias": [2.5]}


@pytest.mark.parametrize("names", [["dense_0/bias"], ["dense_0/kernel"], ["dense_0/bias", "dense_0/kernel"]])
def test_the_gradient_of_trainable_weights_is_that_part_of_the_whole(names):
    result = named_gradient(weights_of(1, 2, 3), DATA, 0, batch_size=2, trainable=names)
    assert list(result) == names
    for name in names:
        np.testing.assert_array_equal(result[name], BY_NAME[name])


def test_of_no_trainable_weights_there_is_no_gradient():
    assert not named_gradient(weights_of(1, 2, 3), DATA, 0, batch_size=2, trainable=())


def test_a_pull_is_of_the_trainable_weights_and_scaled_with_them():
    pull = {"dense_0/bias": tf.constant([10.0])}
    result = named_gradient(
        weights_of(1, 2, 3), DATA, 0, batch_size=2, scale=0.5, pull=pull, trainable=["dense_0/bias"]
    )
    assert list(result) == ["dense_0/bias"]
    np.testing.assert_array_equal(result["dense_0/bias"], [0.5 * (2.5 + 10)])


def test_a_weight_that_the_loss_does_not_reach_has_zeros():
    weights = collections.OrderedDict([("elsewhere", tf.ones([2, 3])), *weights_of(1, 2, 3).items()])
    for names in (None, ["elsewhere", "dense_0/bias"]):
        result = named_gradient(weights, DATA, 0, batch_size=2, trainable=names)
        np.testing.assert_array_equal(result["elsewhere"], np.zeros([2, 3]))
        np.testing.assert_array_equal(result["dense_0/bias"], [2.5])


@pytest.mark.parametrize("parallelism", ["loop", "vectorized"])
def test_rounds_of_clients_of_different_sizes_against_numpy(parallelism):
    rng = np.random.default_rng(0)
    sizes, rows, batch_size, num_steps, rounds = (5, 3, 1, 4), (5, 5, 5, 4), 2, (4, 3, 2, 5), 2
    x = [rng.normal(size=(padded, 2)).astype(np.float32) for padded in rows]
    y = [rng.normal(size=padded).astype(np.float32) for padded in rows]
    data = [
        collections.OrderedDict(x=one, y=other, num_examples=np.int32(size))
        for one, other, size in zip(x, y, sizes, strict=True)
    ]
    params = [
        collections.OrderedDict(
            mechanism=collections.OrderedDict(),
            hparams=collections.OrderedDict(learning_rate=np.float32(0.1), local_steps=np.int32(steps)),
            seed=NO_SEED,
        )
        for steps in num_steps
    ]
    expected = np.zeros(3)
    for _ in range(rounds):
        updates = []
        for client, (size, steps) in enumerate(zip(sizes, num_steps, strict=True)):
            own = expected.copy()
            starts = list(range(0, size, batch_size))
            for step in range(steps):
                start = starts[step % len(starts)]
                batch = np.c_[x[client], np.ones(rows[client])][start : min(start + batch_size, size)]
                errors = batch @ own - y[client][start : min(start + batch_size, size)]
                own -= 0.1 * batch.T @ errors / len(batch)
            updates.append(own - expected)
        expected = expected + np.mean(updates, axis=0)

    process = compose(ALGORITHMS.find("fed_avg")(), MODEL, estimator=build_minibatch(MODEL, batch_size))
    engine = build_engine("inprocess", client_parallelism=parallelism)
    with engine.install():
        server = process.initialize()
        clients = [process.init_client(server)] * len(sizes)
        for _ in range(rounds):
            server, clients, _ = process.next(server, clients, data, params)
    engine.close()
    trained = server["algorithm"]["weights"]
    # Sums over a batch and three weights, and four operations with error, mean and rate; then the mean of clients. Of
    # the weights, which no sum of a step exceeds by much.
    bound = gamma(rounds * (max(num_steps) * (3 + batch_size + 4) + len(sizes) + 1)) * np.abs(expected).max()
    np.testing.assert_allclose(
        np.r_[np.ravel(trained["dense_0/kernel"]), trained["dense_0/bias"]], expected, atol=bound
    )
