import collections
import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests.privacy.mechanisms.grid_support import LARGEST_RADIUS, public_step
from tests.rounding import assert_within, gamma, network_roundings, probable_gamma, standard_errors
from tests.tiers import amount
from tff_pdp.algorithms.base import ClientData
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.accounting import grid_distance
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd, most_examples
from tff_pdp.privacy.mechanisms.parameters import SiloMechanism
from tff_pdp.privacy.mechanisms.random_bits import bits_for_gaussians, draw_bits, gaussians

MODEL = build_mlp((3, 3, 1), 4, (5,))
# Noise of this one is drawn step by step.
LARGE = build_mlp((3, 3, 1), 4, (300,))
NUM_EXAMPLES = 12
# Rows of the data, with padding that no result may depend on.
NUM_ROWS = 15
# Both passes through the model, and the norms' sums of squares; relative to the largest value of a gradient.
ROUNDING = probable_gamma(network_roundings(MODEL.init(0), NUM_EXAMPLES) + MODEL.num_parameters())
# Relative to a result, in each of its values: a factor, which is a float32 quotient, and float32 itself. The sum is on
# a grid, and so is its noise.
OF_RESULT = gamma(2)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3, 3, 1)).astype(np.float32)
    x[NUM_EXAMPLES:] = math.nan
    return ClientData(tf.constant(x), tf.constant(rng.integers(0, 4, NUM_ROWS)), tf.constant(NUM_EXAMPLES))


def weights_of(model):
    return collections.OrderedDict((name, tf.constant(array)) for name, array in model.init(0).items())


@pytest.fixture(scope="module")
def weights():
    return weights_of(MODEL)


class Clients:
    """The estimator's two functions, traced once, for clients that share their data and mechanism."""

    def __init__(self, model):
        self.estimator = build_dp_sgd(model)
        self._draw = tf.function(self.estimator.draw)
        self._gradient = tf.function(self.estimator.gradient)

    def draw(self, seeds, num_steps, num_examples=NUM_EXAMPLES, sampling_rate=1.0, max_examples=NUM_ROWS, **others):
        """What clients with these seeds draw; numbers for all clients or one each."""
        ones = np.ones(len(seeds), np.int32)
        mechanism = mechanism_of(sampling_rate=np.full(len(seeds), sampling_rate), **others)
        return self._draw(
            mechanism,
            tf.constant(num_examples * ones),
            tf.constant(max_examples),
            tf.constant(num_steps * ones),
            tf.constant(seeds, tf.int64),
        )

    def gradient(self, draws, weights, data, step=0, client=0, scale=1.0, **mechanism):
        """The gradient of one client, flat."""
        own = tf.nest.map_structure(lambda leaf: leaf[client], draws)
        # As if drawn with this mechanism, on which batches and Gaussians do not depend.
        scales = self.draw(np.zeros([1, 2]), 1, **mechanism).scales
        own = own._replace(scales=tf.nest.map_structure(lambda leaf: leaf[0], scales))
        result = self._gradient(mechanism_of(**mechanism), own, weights, data, tf.constant(step), tf.constant(scale))
        assert list(result) == list(weights)
        return flat(result.values())


def mechanism_of(clip_norm=math.inf, noise_multiplier=0.0, sampling_rate=1.0):
    values = SiloMechanism(clip_norm, noise_multiplier, sampling_rate, expected_batch_size=float(NUM_EXAMPLES))
    return {name: tf.constant(value, tf.float32) for name, value in dataclasses.asdict(values).items()}


@pytest.fixture(scope="module")
def clients():
    return Clients(MODEL)


@pytest.fixture(scope="module")
def gradient(clients):
    """A function for one gradient of one client, with all that it draws."""

    def compute(weights, data, clip_norm=math.inf, noise_multiplier=0.0, sampling_rate=1.0, step=0, seed=(1, 2)):
        draws = clients.draw([seed], step + 1, data.num_examples, sampling_rate, max_examples=len(data.y))
        return clients.gradient(draws, weights, data, step, clip_norm=clip_norm, noise_multiplier=noise_multiplier)

    return compute


def flat(tensors):
    return np.concatenate([np.ravel(tensor) for tensor in tensors])


@tf.function
def plain_gradient(weights, data, size):
    with tf.GradientTape() as tape:
        tape.watch(list(weights.values()))
        total = tf.reduce_sum(MODEL.loss(weights, data.x[: data.num_examples], data.y[: data.num_examples]))
    return [value * (1.0 / size) for value in tape.gradient(total, list(weights.values()))]


def example_gradients(weights, data):
    """Each example's gradient in float64, by a tape for each: slow and independent of the code under test."""
    weights = {name: tf.cast(value, tf.float64) for name, value in weights.items()}
    rows = []
    for index in range(NUM_EXAMPLES):
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            x = tf.cast(data.x[index : index + 1], tf.float64)
            loss = MODEL.loss(weights, x, data.y[index : index + 1])[0]
        rows.append(flat(tape.gradient(loss, list(weights.values()))))
    return np.stack(rows)


def fewer(data, num_examples):
    return data._replace(num_examples=tf.constant(num_examples))


def test_its_mechanism_is_the_plans():
    fields = tuple(field.name for field in dataclasses.fields(SiloMechanism))
    assert build_dp_sgd(MODEL).mechanism == build_dp_sgd(LARGE).mechanism == fields


def test_no_noise_and_no_clip_is_the_plain_gradient(weights, data, gradient):
    plain = flat(plain_gradient(weights, data, tf.constant(float(NUM_EXAMPLES))))
    np.testing.assert_allclose(gradient(weights, data), plain, atol=2 * ROUNDING * np.abs(plain).max())


def test_each_example_is_clipped_over_all_weights_jointly(weights, data, gradient):
    rows = example_gradients(weights, data)
    norms = np.linalg.norm(rows, axis=1)
    clip_norm = float(np.median(norms))
    clipped = rows * np.minimum(1.0, clip_norm / norms)[:, np.newaxis]
    expected = clipped.sum(axis=0) / NUM_EXAMPLES
    found = gradient(weights, data, clip_norm=clip_norm)
    step = public_step(clip_norm, 0.0)
    # Each example ends short by a share of itself, for floating point and for the sum, which is rounded once.
    short = 2.0**-16 + math.sqrt(MODEL.num_parameters()) * step / clip_norm
    bounds = short * np.abs(clipped).sum(axis=0) / NUM_EXAMPLES + step / 2 / NUM_EXAMPLES
    assert_within(found, expected, bounds + ROUNDING * np.abs(expected).max())


def test_a_step_uses_its_own_batch(weights, data, clients):
    rows = example_gradients(weights, data)
    draws = clients.draw([(1, 2)], 8, sampling_rate=0.5)
    for step in range(8):
        size = int(draws.batches.sizes[0, step])
        expected = rows[draws.batches.indices[0, step, :size]].sum(axis=0) / NUM_EXAMPLES
        found = clients.gradient(draws, weights, data, step)
        np.testing.assert_allclose(found, expected, atol=ROUNDING * np.abs(expected).max())
    assert len(set(draws.batches.sizes[0].numpy())) > 1


def test_noise_has_standard_deviation_z_times_c_on_every_coordinate(weights, data, clients):
    clip_norm, noise_multiplier, num_steps = 0.5, 3.0, 400
    draws = clients.draw([(1, 2)], num_steps, sampling_rate=0.0)
    rows = np.stack(
        [
            clients.gradient(draws, weights, data, step, clip_norm=clip_norm, noise_multiplier=noise_multiplier)
            for step in range(num_steps)
        ]
    )
    rows *= NUM_EXAMPLES
    assert (rows.std(axis=0) > 0).all(), "a coordinate is released without noise"
    expected = noise_multiplier * clip_norm
    standard_error = expected / math.sqrt(2 * rows.size)
    assert abs(rows.std() - expected) < 3 * standard_error
    assert abs(rows.mean()) < 3 * expected / math.sqrt(rows.size)
    assert np.abs(rows.std(axis=0) - expected).max() < 5 * expected / math.sqrt(2 * num_steps)
    # Independent between steps and between coordinates: the largest of many sample correlations stays small.
    correlations = np.corrcoef(rows.T)[np.triu_indices(rows.shape[1], 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(num_steps)
    assert abs(np.corrcoef(rows[1:].ravel(), rows[:-1].ravel())[0, 1]) < 4 / math.sqrt(rows.size)


def test_noise_is_independent_of_the_batches_and_of_other_clients_noise(clients):
    num_steps = 400
    draws = clients.draw([(1, 2), (1, 3)], num_steps, sampling_rate=0.5)
    filled = np.arange(draws.batches.indices.shape[2]) < draws.batches.sizes.numpy()[:, :, np.newaxis]
    masks = (np.eye(NUM_EXAMPLES)[draws.batches.indices.numpy()] * filled[..., np.newaxis]).sum(axis=2)
    noise = draws.noise.numpy()
    # Sizes, too: a radius made from a word that has also sampled would not show in signs.
    drawn = np.concatenate([noise[0], noise[1]], axis=1)
    for values in (drawn, np.abs(drawn)):
        columns = np.concatenate([masks[0], masks[1], values], axis=1)
        correlations = np.corrcoef(columns.T)[np.triu_indices(columns.shape[1], 1)]
        assert np.abs(correlations).max() < 5 / math.sqrt(num_steps)


def test_the_scale_applies_to_signal_and_noise_alike(weights, data, clients):
    draws = clients.draw([(1, 2)], 1, sampling_rate=0.5)
    given = {"clip_norm": 0.3, "noise_multiplier": 1.5}
    whole = clients.gradient(draws, weights, data, **given)
    # To the bit, by a power of two.
    np.testing.assert_array_equal(clients.gradient(draws, weights, data, scale=0.25, **given), whole / 4)
    assert not clients.gradient(draws, weights, data, scale=0.0, **given).any()


CLIP = float(np.float32(0.3))


def rounded(*results):
    """The length of what is rounded of results after noise has been added, times their number."""
    return OF_RESULT * sum(np.linalg.norm(result) * NUM_EXAMPLES for result in results)


def test_adding_one_example_moves_the_sum_by_at_most_the_clip(weights, data, gradient):
    smaller = ClientData(data.x[1:], data.y[1:], data.num_examples - 1)
    more, less = gradient(weights, data, clip_norm=0.3), gradient(weights, smaller, clip_norm=0.3)
    assert 0 < np.linalg.norm(more - less) * NUM_EXAMPLES <= CLIP + rounded(more, less)


def test_one_example_more_changes_neither_the_noise_nor_who_else_is_sampled(weights, data, gradient):
    mechanism = {"clip_norm": 0.3, "noise_multiplier": 1.0, "sampling_rate": 0.5}
    takes_part, steps = [], amount(test=6, all=20)
    for step in range(steps):
        more = gradient(weights, data, **mechanism, step=step)
        less = gradient(weights, fewer(data, NUM_EXAMPLES - 1), **mechanism, step=step)
        moved = np.linalg.norm(more - less) * NUM_EXAMPLES
        assert moved <= CLIP + rounded(more, less)
        takes_part.append(moved > rounded(more, less))
    # In some steps, and in others it does not.
    assert 0 < np.count_nonzero(takes_part) < steps


@pytest.mark.parametrize("expected", [0.01, 1.0, 64.0, 1000.0, 1e5])
def test_a_poisson_batch_is_larger_than_is_taken_into_account_with_next_to_no_probability(expected):
    most = most_examples(expected)
    for rate in (0.999, 0.5, 0.1, 1e-6):
        size = math.ceil(expected / rate)
        assert stats.binom(size, expected / size).logsf(most) <= -80
    assert most < 2 * expected + 150


def test_an_empty_batch_is_noised_like_any_other(weights, data, gradient):
    no_rows = ClientData(data.x[:0], data.y[:0], tf.constant(0))
    unpadded = ClientData(data.x[:NUM_EXAMPLES], data.y[:NUM_EXAMPLES], data.num_examples)
    noise = gradient(weights, unpadded, clip_norm=1.0, noise_multiplier=1.0, sampling_rate=0.0)
    for empty, rate in ((no_rows, 1.0), (fewer(data, 0), 1.0), (unpadded, 0.0)):
        np.testing.assert_array_equal(gradient(weights, empty, clip_norm=1.0, sampling_rate=rate), 0.0)
        noised = gradient(weights, empty, clip_norm=1.0, noise_multiplier=1.0, sampling_rate=rate)
        assert np.count_nonzero(noised) == noised.size
        assert np.isfinite(noised).all()
    # The length of a Gaussian vector has a variance of one half.
    expected = pytest.approx(math.sqrt(noise.size), abs=standard_errors() * math.sqrt(0.5))
    assert np.linalg.norm(noise) * NUM_EXAMPLES == expected


def test_same_seed_and_step_repeat_and_others_do_not(weights, data, gradient):
    def draw(**changes):
        return gradient(weights, data, clip_norm=1.0, noise_multiplier=1.0, sampling_rate=0.5, **changes)

    np.testing.assert_array_equal(draw(), draw())
    assert not np.allclose(draw(), draw(step=1))
    assert not np.allclose(draw(), draw(seed=(1, 3)))
    assert not np.allclose(draw(), draw(seed=(2, 2)))


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=["small", "large"])
def test_what_a_client_draws_depends_on_no_other_client_and_not_on_others_steps(model, data):
    clients = Clients(model)
    weights = weights_of(model)
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, (35, 2), dtype=np.int64)
    num_steps = np.arange(35, dtype=np.int32) % 4
    num_examples = np.arange(35, dtype=np.int32) % (NUM_ROWS + 1)
    rates = np.linspace(0.0, 1.0, 35)
    together = clients.draw(seeds, num_steps, num_examples, rates)
    for client in (0, 3, 17, 31, 32, 34):
        own = slice(client, client + 1)
        alone = clients.draw(seeds[own], num_steps[own], num_examples[own], rates[own])
        steps = num_steps[client]
        np.testing.assert_array_equal(together.batches.sizes[client, :steps], alone.batches.sizes[0])
        assert not together.batches.sizes[client, steps:].numpy().any()
        capacity = alone.batches.indices.shape[2]
        np.testing.assert_array_equal(together.batches.indices[client, :steps, :capacity], alone.batches.indices[0])
        if model is MODEL:
            # Logarithms, sines and cosines, whose last bit depends on their place.
            bound = 2 * grid_distance.ROUNDING * LARGEST_RADIUS
            np.testing.assert_allclose(together.noise[client, :steps], alone.noise[0], rtol=0, atol=bound)
        else:
            np.testing.assert_array_equal(together.noise[client], seeds[client])
        for step in range(steps):
            mine = data._replace(
                num_examples=tf.constant(num_examples[client]), x=tf.where(data.x == data.x, data.x, 1)
            )
            given = {"clip_norm": 0.5, "noise_multiplier": 1.0}
            one, other = (
                clients.gradient(together, weights, mine, step, client, **given),
                clients.gradient(alone, weights, mine, step, **given),
            )
            np.testing.assert_allclose(one, other, atol=2 * ROUNDING * np.abs(other).max())


def test_noise_of_a_large_model_is_drawn_step_by_step_and_never_from_the_bits_of_the_batches(data):
    size = LARGE.num_parameters()
    assert size > 4096
    clients, weights = Clients(LARGE), weights_of(LARGE)
    clip_norm, noise_multiplier, num_steps = 0.5, 3.0, 30
    draws = clients.draw([(1, 2)], num_steps, sampling_rate=0.0)
    rows = np.stack(
        [
            clients.gradient(draws, weights, data, step, clip_norm=clip_norm, noise_multiplier=noise_multiplier)
            for step in range(num_steps)
        ]
    )
    rows *= NUM_EXAMPLES / (clip_norm * noise_multiplier)
    assert abs(rows.std() - 1) < 3 / math.sqrt(2 * rows.size)
    assert abs(rows.mean()) < 3 / math.sqrt(rows.size)
    assert np.abs(rows.std(axis=0) - 1).max() < 6 / math.sqrt(2 * num_steps)
    assert np.abs(np.corrcoef(rows)[np.triu_indices(num_steps, 1)]).max() < 5 / math.sqrt(size)
    # The batches' bits made into noise: it is nobody's, at any step.
    batch_bits = draw_bits(tf.constant([1, 2], tf.int64), bits_for_gaussians(size))
    from_batches = gaussians(batch_bits, size).numpy()
    assert max(abs(np.corrcoef(from_batches, row)[0, 1]) for row in rows) < 5 / math.sqrt(size)


def test_small_and_large_models_sample_alike_and_differ_in_noise_alone(data):
    """The batches of a large model come from a plain matrix of bits: its client's first, steps after steps."""
    draws = Clients(LARGE).draw([(5, 6)], 9, sampling_rate=0.5)
    bits = np.reshape(draw_bits(tf.constant([5, 6], tf.int64), 9 * NUM_ROWS), [9, NUM_ROWS])
    sampled = bits[:, :NUM_EXAMPLES] < 2**31
    np.testing.assert_array_equal(draws.batches.sizes[0], sampled.sum(axis=1))
    for step in range(9):
        size = int(draws.batches.sizes[0, step])
        np.testing.assert_array_equal(draws.batches.indices[0, step, :size], np.flatnonzero(sampled[step]))
