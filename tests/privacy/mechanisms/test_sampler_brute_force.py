"""The sampler against the distribution that the accountants assume: every example, at every step, by itself."""

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests.privacy.mechanisms.test_sampling import sample
from tff_pdp.privacy.mechanisms.random_bits import draw_bits_of_all
from tff_pdp.privacy.mechanisms.sampling import RATE_BITS

# Chance of failing by bad luck, were the seeds not fixed: 6e-7 for one figure of this many standard errors.
STANDARD_ERRORS = 5


def draw_masks(seeds, rates, num_examples, num_steps):
    """Who is in which batch, bool `[silos, steps, examples]`, drawn as training draws it."""
    bits = draw_bits_of_all(tf.constant(seeds, tf.int64), num_steps * num_examples)
    bits = tf.reshape(bits, [len(seeds), num_steps, num_examples]).numpy()
    indices, sizes = sample(bits, [num_examples] * len(seeds), rates, [num_steps] * len(seeds))
    # Nobody was left out to make batches shorter, and nobody is in one twice.
    limits = np.floor(np.float32(rates) * 2**RATE_BITS)[:, np.newaxis, np.newaxis]
    np.testing.assert_array_equal(sizes, (bits >> 32 - RATE_BITS < limits).sum(axis=2))
    masks = np.zeros(bits.shape, bool)
    silos, steps, places = np.nonzero(np.arange(indices.shape[2]) < sizes[..., np.newaxis])
    masks[silos, steps, indices[silos, steps, places]] = True
    np.testing.assert_array_equal(masks.sum(axis=2), sizes)
    return masks


def draw_silo(seed, rate, num_examples, num_steps):
    return draw_masks([seed], [rate], num_examples, num_steps)[0]


@pytest.mark.parametrize("rate", [0.001, 0.03, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("num_examples, num_steps", [(1, 20_000), (15, 8000), (175, 1500), (1933, 150)])
def test_inclusion_and_batch_sizes(rate, num_examples, num_steps):
    masks = draw_silo((num_examples, int(rate * 1000)), rate, num_examples, num_steps)
    spread = rate * (1 - rate)
    assert abs(masks.mean() - rate) <= STANDARD_ERRORS * math.sqrt(spread / masks.size)
    expected = num_steps * rate
    if expected > 20 and num_steps - expected > 20:
        each = np.abs(masks.mean(axis=0) - rate)
        assert each.max() <= STANDARD_ERRORS * math.sqrt(spread / num_steps)
    assert batch_size_pvalue(masks.sum(axis=1), num_examples, rate) > 1e-4


def batch_size_pvalue(sizes, num_examples, rate):
    """Of the chi-square test against the binomial; sizes too rare for it are put together with their neighbours."""
    expected = len(sizes) * stats.binom.pmf(np.arange(num_examples + 1), num_examples, rate)
    observed = np.bincount(sizes, minlength=num_examples + 1)
    bins = [[0.0, 0]]
    for wanted, found in zip(expected, observed, strict=True):
        if bins[-1][0] >= 10:
            bins.append([0.0, 0])
        bins[-1][0] += wanted
        bins[-1][1] += found
    if bins[-1][0] < 10:
        rare = bins.pop()
        bins[-1] = [sum(pair) for pair in zip(bins[-1], rare, strict=True)]
    wanted, found = np.array(bins).T
    assert len(bins) >= 2
    return stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.8])
def test_examples_and_steps_are_independent(rate):
    num_examples, num_steps = 40, 6000
    masks = draw_silo((3, int(rate * 100)), rate, num_examples, num_steps) - rate
    spread = rate * (1 - rate)
    error = STANDARD_ERRORS * spread / math.sqrt(num_steps)
    # Pairs of examples within a step, then of any two examples, or one with itself, some steps apart.
    assert np.abs((masks.T @ masks / num_steps)[np.triu_indices(num_examples, 1)]).max() <= error
    for apart in (1, 2, 7, 100):
        assert np.abs(masks[:-apart].T @ masks[apart:] / num_steps).max() <= error
    # All pairs of steps of a shorter run, over the examples.
    few = draw_silo((5, int(rate * 100)), rate, 3000, 50) - rate
    covariances = (few @ few.T / few.shape[1])[np.triu_indices(50, 1)]
    assert np.abs(covariances).max() <= STANDARD_ERRORS * spread / math.sqrt(few.shape[1])


def test_triples_of_examples_are_independent():
    """Pairs can look independent where triples are not: two sampled bits and their parity, for instance."""
    masks = draw_silo((9, 9), 0.5, 24, 10_000) - 0.5
    products = np.einsum("si,sj,sk->ijk", masks, masks, masks, optimize=True) / len(masks)
    first, second, third = np.indices(products.shape)
    different = products[(first < second) & (second < third)]
    assert np.abs(different).max() <= STANDARD_ERRORS * 0.5**3 / math.sqrt(len(masks))


def test_silos_are_independent():
    num_examples, num_steps, rates = 60, 2000, np.array([0.3, 0.3, 0.7])
    masks = draw_masks([[1, 1], [1, 2], [2, 1]], rates, num_examples, num_steps)
    centred = masks.reshape(3, -1) - rates[:, np.newaxis]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        error = math.sqrt(np.prod(rates[[first, second]] * (1 - rates[[first, second]])) / centred.shape[1])
        assert abs((centred[first] * centred[second]).mean()) <= STANDARD_ERRORS * error
