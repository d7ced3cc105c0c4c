import math

import numpy as np
import pytest
import tensorflow as tf

from tff_pdp.privacy.mechanisms import sampling
from tff_pdp.privacy.mechanisms.random_bits import draw_bits_of_all
from tff_pdp.privacy.mechanisms.sampling import RATE_BITS, poisson_batches


def random_bits(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


@pytest.fixture(params=[False, True], ids=["for CPUs", "for GPUs"], autouse=True)
def form(request, monkeypatch):
    """Both forms of the sampler: by a list of places, and by sorting."""
    monkeypatch.setattr(sampling, "gpu_is_visible", lambda: request.param)


def sample(bits, num_examples, rates, num_steps):
    batches = poisson_batches(
        tf.constant(bits), tf.constant(num_examples), tf.constant(rates, tf.float32), tf.constant(num_steps)
    )
    return batches.indices.numpy(), batches.sizes.numpy()


def masks_of(indices, sizes, num_examples):
    """Who is in each step's batch, bool `[..., steps, examples]`; nobody may be in it twice."""
    filled = np.arange(indices.shape[-1]) < sizes[..., np.newaxis]
    counts = (np.eye(num_examples, dtype=int)[indices] * filled[..., np.newaxis]).sum(axis=-2)
    assert counts.max(initial=0) <= 1
    return counts.astype(bool)


def test_batches_are_all_that_the_bits_sample_and_never_truncated():
    clients, steps, examples = 5, 7, 23
    bits = random_bits(clients, steps, examples)
    num_examples, num_steps = [23, 1, 0, 17, 23], [7, 7, 5, 3, 0]
    rates = np.array([0.9, 0.5, 1.0, 0.25, 1.0])
    indices, sizes = sample(bits, num_examples, rates, num_steps)
    assert indices.dtype == sizes.dtype == np.int32
    sampled = (bits >> 9) < rates[:, np.newaxis, np.newaxis] * 2**23
    for client, step in np.ndindex(clients, steps):
        expected = np.flatnonzero(sampled[client, step, : num_examples[client]]) if step < num_steps[client] else []
        assert sizes[client, step] == len(expected)
        np.testing.assert_array_equal(indices[client, step, : len(expected)], expected)
        assert not indices[client, step, len(expected) :].any()
    assert indices.shape == (clients, steps, sizes.max())


def test_one_batch_of_everything_among_empty_ones():
    bits = np.full([1, 3, 50], 2**32 - 1, np.uint32)
    bits[0, 1] = 0
    indices, sizes = sample(bits, [50], [0.5], [3])
    np.testing.assert_array_equal(sizes, [[0, 50, 0]])
    np.testing.assert_array_equal(indices[0, 1], np.arange(50))


def test_sampling_includes_each_example_independently_at_the_rate():
    draws, examples, rate = 4000, 6, 0.3
    bits = tf.reshape(draw_bits_of_all(tf.constant([[7, 0]], tf.int64), draws * examples), [1, draws, examples])
    masks = masks_of(*sample(bits.numpy(), [examples], [rate], [draws]), examples)[0]
    error = math.sqrt(rate * (1 - rate) / draws)
    assert (np.abs(masks.mean(axis=0) - rate) < 4 * error).all()
    correlations = np.corrcoef(masks.T)[np.triu_indices(examples, 1)]
    assert np.abs(correlations).max() < 4 / math.sqrt(draws)
    # From one step to the next, too.
    flat = masks.ravel()
    for distance in (1, examples):
        assert abs(np.corrcoef(flat[:-distance], flat[distance:])[0, 1]) < 4 / math.sqrt(flat.size)
    # The batch size is binomial, not fixed.
    sizes = masks.sum(axis=1)
    assert abs(sizes.var() - examples * rate * (1 - rate)) < 0.15
    for size in range(examples + 1):
        expected = math.comb(examples, size) * rate**size * (1 - rate) ** (examples - size)
        assert abs((sizes == size).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_clients_of_different_rates_are_sampled_each_at_its_own():
    rates, steps, examples = np.array([0.1, 0.8, 0.5]), 400, 20
    seeds = tf.constant([[1, 2], [3, 4], [5, 6]], tf.int64)
    bits = tf.reshape(draw_bits_of_all(seeds, steps * examples), [3, steps, examples])
    _, sizes = sample(bits.numpy(), [examples] * 3, rates, [steps] * 3)
    errors = np.sqrt(rates * (1 - rates) / (steps * examples))
    assert (np.abs(sizes.mean(axis=1) / examples - rates) < 4 * errors).all()
    assert np.abs(np.corrcoef(sizes)[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(steps)


def test_rates_of_zero_and_one_take_nothing_and_everything():
    bits = random_bits(2, 4, 1000)
    # The bits closest to being taken at 0, and to being left out at 1.
    bits[:, :, :2] = 0, 2**32 - 1
    indices, sizes = sample(bits, [1000, 1000], [0.0, 1.0], [4, 4])
    np.testing.assert_array_equal(sizes, [[0] * 4, [1000] * 4])
    np.testing.assert_array_equal(indices[1], np.tile(np.arange(1000), [4, 1]))


@pytest.mark.parametrize("level", [1, 2, 3, 2**22 + 1, 2**23 - 1])
def test_a_rate_is_honoured_to_its_last_bit(level):
    bits = np.array([(level << 32 - RATE_BITS) - 1, level << 32 - RATE_BITS], np.uint32)
    indices, sizes = sample(bits.reshape([1, 1, 2]), [2], [level / 2**RATE_BITS], [1])
    assert sizes.tolist() == [[1]]
    assert indices[0, 0].tolist() == [0]


@pytest.mark.parametrize("shape", [(2, 3, 0), (2, 0, 4)])
def test_no_examples_and_no_steps(shape):
    indices, sizes = sample(np.zeros(shape, np.uint32), [shape[2]] * 2, [1.0] * 2, [shape[1]] * 2)
    assert indices.shape == (*shape[:2], 0)
    assert sizes.shape == shape[:2] and not sizes.any()
