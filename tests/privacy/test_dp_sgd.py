import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.algorithms.base import ClientData
from tff_pdp.models.mlp import build_linear, build_mlp
from tff_pdp.privacy.dp_sgd import build_dp_sgd_grad_fn, clip_factors, gaussian, per_example_norms
from tff_pdp.privacy.sampling import poisson_mask

MODEL = build_mlp((3, 3, 1), 4, (5,))
NUM_EXAMPLES = 12


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, 3, 3, 1)).astype(np.float32)
    return ClientData(tf.constant(x), tf.constant(rng.integers(0, 4, NUM_EXAMPLES)))


@pytest.fixture(scope="module")
def weights():
    return collections.OrderedDict((name, tf.constant(array)) for name, array in MODEL.init(0).items())


@tf.function
def private_gradient(weights, data, clip_norm, noise_multiplier, sampling_rate, step, seed):
    grad_fn = build_dp_sgd_grad_fn(
        MODEL,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        expected_batch_size=tf.constant(float(NUM_EXAMPLES)),
        seed=seed,
    )
    return grad_fn(weights, data, step)


def gradient(weights, data, clip_norm=math.inf, noise_multiplier=0.0, sampling_rate=1.0, step=0, seed=(1, 2)):
    scalars = (tf.constant(value, tf.float32) for value in (clip_norm, noise_multiplier, sampling_rate))
    result = private_gradient(weights, data, *scalars, tf.constant(step), tf.constant(seed, tf.int64))
    return {name: tensor.numpy() for name, tensor in result.items()}


@tf.function
def plain_gradient(weights, data):
    with tf.GradientTape() as tape:
        tape.watch(list(weights.values()))
        total = tf.reduce_sum(MODEL.loss(weights, data.x, data.y))
    return [value / float(NUM_EXAMPLES) for value in tape.gradient(total, list(weights.values()))]


def example_gradients(weights, data):
    """Each example's gradient, flattened, by a tape per example: slow and independent of the code under test."""
    rows = []
    for index in range(NUM_EXAMPLES):
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            loss = MODEL.loss(weights, data.x[index : index + 1], data.y[index : index + 1])[0]
        rows.append(np.concatenate([g.numpy().ravel() for g in tape.gradient(loss, list(weights.values()))]))
    return np.stack(rows)


def flat(gradient_by_name):
    return np.concatenate([array.ravel() for array in gradient_by_name.values()])


def test_no_noise_and_no_clip_is_the_plain_gradient_to_the_bit(weights, data):
    for mine, plain in zip(gradient(weights, data).values(), plain_gradient(weights, data), strict=True):
        np.testing.assert_array_equal(mine, plain.numpy())


def test_each_example_is_clipped_over_all_weights_jointly(weights, data):
    rows = example_gradients(weights, data)
    norms = np.linalg.norm(rows, axis=1)
    clip_norm = float(np.median(norms))
    expected = (rows * np.minimum(1.0, clip_norm / norms)[:, np.newaxis]).sum(axis=0) / NUM_EXAMPLES
    np.testing.assert_allclose(flat(gradient(weights, data, clip_norm=clip_norm)), expected, atol=1e-6)


def test_per_example_norms(weights, data):
    expected = np.linalg.norm(example_gradients(weights, data), axis=1)
    np.testing.assert_allclose(per_example_norms(MODEL, weights, data.x, data.y), expected, rtol=1e-5)


def test_clip_factors():
    np.testing.assert_allclose(clip_factors(tf.constant([0.0, 0.5, 2.0]), 1.0), [1.0, 1.0, 0.5])
    np.testing.assert_array_equal(clip_factors(tf.constant([0.0, 3.0]), math.inf), [1.0, 1.0])


def test_noise_has_standard_deviation_z_times_c_on_every_coordinate(weights, data):
    clip_norm, noise_multiplier, draws = 0.5, 3.0, 400
    rows = np.stack(
        [
            flat(gradient(weights, data, clip_norm, noise_multiplier, sampling_rate=0.0, step=step)) * NUM_EXAMPLES
            for step in range(draws)
        ]
    )
    assert (rows.std(axis=0) > 0).all(), "a coordinate is released without noise"
    expected = noise_multiplier * clip_norm
    standard_error = expected / math.sqrt(2 * rows.size)
    assert abs(rows.std() - expected) < 3 * standard_error
    assert abs(rows.mean()) < 3 * expected / math.sqrt(rows.size)
    # Independent between steps and between coordinates: the largest of many sample correlations stays small.
    correlations = np.corrcoef(rows.T)[np.triu_indices(rows.shape[1], 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(draws)


def test_the_gaussian_has_gaussian_tails():
    draws = gaussian(tf.constant([2_000_000]), tf.constant([3, 4], tf.int64)).numpy()
    for threshold in (1.0, 2.0, 3.0, 4.0):
        expected = math.erfc(threshold / math.sqrt(2))
        error = math.sqrt(expected / draws.size)
        assert abs((np.abs(draws) > threshold).mean() - expected) < 4 * error


def test_adding_one_example_moves_the_sum_by_at_most_the_clip(weights, data):
    smaller = ClientData(data.x[1:], data.y[1:])
    difference = flat(gradient(weights, data, clip_norm=0.3)) - flat(gradient(weights, smaller, clip_norm=0.3))
    assert np.linalg.norm(difference) * NUM_EXAMPLES <= 0.3 * (1 + 1e-5)


def test_an_empty_batch_is_noised_like_any_other(weights, data):
    empty = ClientData(data.x[:0], data.y[:0])
    np.testing.assert_array_equal(flat(gradient(weights, empty, clip_norm=1.0)), 0.0)
    assert np.count_nonzero(flat(gradient(weights, empty, clip_norm=1.0, noise_multiplier=1.0)))


def test_same_seed_and_step_repeat_and_others_do_not(weights, data):
    def draw(**changes):
        return flat(gradient(weights, data, clip_norm=1.0, noise_multiplier=1.0, sampling_rate=0.5, **changes))

    np.testing.assert_array_equal(draw(), draw())
    assert not np.allclose(draw(), draw(step=1))
    assert not np.allclose(draw(), draw(seed=(1, 3)))


def test_poisson_sampling_includes_each_example_independently_at_the_rate():
    draws, rate = 4000, 0.3
    masks = np.stack(
        [poisson_mask(tf.constant([7, index], tf.int64), tf.constant(6), tf.constant(rate)) for index in range(draws)]
    )
    error = math.sqrt(rate * (1 - rate) / draws)
    assert (np.abs(masks.mean(axis=0) - rate) < 4 * error).all()
    correlations = np.corrcoef(masks.T)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 4 / math.sqrt(draws)
    # The batch size is binomial, not fixed.
    assert abs(masks.sum(axis=1).var() - 6 * rate * (1 - rate)) < 0.15


def test_rates_of_zero_and_one_take_nothing_and_everything():
    seed = tf.constant([1, 1], tf.int64)
    assert not poisson_mask(seed, tf.constant(1000), tf.constant(0.0)).numpy().any()
    assert poisson_mask(seed, tf.constant(1000), tf.constant(1.0)).numpy().all()


def test_linear_model_has_only_a_head():
    model = build_linear((2, 2, 1), 3)
    assert set(model.head) == set(model.init(0))
    assert model.num_parameters() == 4 * 3 + 3
