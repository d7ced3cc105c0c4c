"""The generator against its own publication, and the Gaussians against double precision."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.rounding import ELEMENTARY, assert_within, gamma, half_a_digit
from tff_pdp.privacy.mechanisms.random_bits import bits_for_gaussians, draw_bits, draw_bits_of_all, gaussians

LARGEST_WORD = 2**32 - 1
# What 56 zero bits give, as half a unit is added below the last of them: about 8.89.
LARGEST_RADIUS = math.sqrt(2 * 57 * math.log(2))


# Of a uniform number: two sums, a cast, and the last number below one. The reference rounds too, in float64.
UNIFORM = gamma(4)


def rounding(radius):
    """Of a Gaussian, with a radius that is the root of -2 log U and an angle of up to 2 pi.

    An error of U moves the squared radius by as much twice, so that a small radius has a large one.
    """
    angle = 2 * math.pi * gamma(2) + gamma(ELEMENTARY)
    return 2 * UNIFORM / radius + radius * (gamma(ELEMENTARY + 3) + angle)


def seeds_of(*pairs):
    return tf.constant(pairs, tf.int64)


def random_seeds(number, seed=0):
    return np.random.default_rng(seed).integers(-(2**63), 2**63, (number, 2), dtype=np.int64)


def philox(key, counter):
    """Philox 4x32-10 in Python's integers, from the paper: four words from a key of two and a counter of four."""
    key, counter = list(key), list(counter)
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & LARGEST_WORD,
            (low >> 32) ^ counter[3] ^ key[1],
            low & LARGEST_WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & LARGEST_WORD, (key[1] + 0xBB67AE85) & LARGEST_WORD]
    return counter


def words_of(number, count):
    return [(number >> (32 * word)) & LARGEST_WORD for word in range(count)]


def gaussians_in_double_precision(bits, size):
    """And how far those in float32 may be from them."""
    quarter = math.ceil(size / 4)
    high, angle, low = np.split(bits, [2 * quarter, 4 * quarter])
    middle = np.stack([low & 0xFFFF, low >> 16], axis=1).ravel()
    # Exact integers: 56 bits are more than a double holds.
    uniforms = [
        (int(a) * 2**24 + int(b) * 2**8 + int(c) % 256 + 0.5) / 2**56
        for a, b, c in zip(high, middle, angle, strict=True)
    ]
    radius = np.sqrt(-2 * np.log(uniforms))
    turn = (angle >> 8) * (2 * math.pi / 2**24)
    draws = np.concatenate([radius * np.cos(turn), radius * np.sin(turn)])
    return draws[:size], np.concatenate([rounding(radius)] * 2)[:size]


def test_the_reference_gives_the_published_answers():
    # kat_vectors of Random123, the paper's own implementation.
    assert philox([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([LARGEST_WORD] * 2, [LARGEST_WORD] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("place", [0, 1, 2**23 - 1])
def test_draws_are_philox_with_the_seed_as_key_and_upper_counter(place):
    for seed in random_seeds(3):
        key, upper = (int(word) % 2**64 for word in seed)
        expected = [
            word
            for block in range(3)
            for word in philox(words_of(key, 2), words_of((upper << 64) + place * 2**40 + block, 4))
        ]
        np.testing.assert_array_equal(draw_bits(tf.constant(seed), 11, place), expected[:11])
        np.testing.assert_array_equal(draw_bits(tf.constant(seed), 11, tf.constant(place)), expected[:11])


@pytest.mark.parametrize("size", [0, 1, 5, 1023, 100_000])
def test_a_longer_draw_begins_with_the_shorter_one(size):
    longer = draw_bits(seeds_of((3, 4))[0], 200_001)
    np.testing.assert_array_equal(draw_bits(seeds_of((3, 4))[0], size), longer[:size])


def test_other_seeds_and_places_share_no_block():
    draws = [draw_bits(seed, 4000) for seed in seeds_of((1, 2), (1, 3), (2, 2), (2, 1))]
    draws += [draw_bits(seeds_of((1, 2))[0], 4000, place) for place in (1, 2)]
    blocks = np.concatenate([np.reshape(draw, [-1, 4]) for draw in draws])
    assert len(np.unique(blocks, axis=0)) == len(blocks)


@pytest.mark.parametrize("num_clients", [1, 31, 32, 33])
def test_what_all_draw_is_what_each_draws(num_clients):
    seeds = tf.constant(random_seeds(num_clients))
    expected = np.stack([draw_bits(seed, 37) for seed in seeds])
    np.testing.assert_array_equal(draw_bits_of_all(seeds, 37), expected)
    traced = tf.function(
        draw_bits_of_all, input_signature=[tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([], tf.int32)]
    )
    np.testing.assert_array_equal(traced(seeds, 37), expected)
    assert traced(seeds, 0).shape == (num_clients, 0)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_gaussians_are_box_mullers_in_double_precision(size):
    bits = draw_bits_of_all(tf.constant(random_seeds(50)), bits_for_gaussians(size))
    expected, bounds = np.stack([gaussians_in_double_precision(row, size) for row in bits.numpy()], axis=1)
    together = gaussians(bits, size)
    assert_within(together, expected, bounds)
    assert_within(gaussians(bits, size, 1e-30) * 1e30, together, 2 * bounds)
    assert not gaussians(bits, size, 0.0).numpy().any()
    # Whatever the leading axes are; the last bit of a cosine depends on its place in a vector register.
    assert_within(gaussians(tf.reshape(bits, [5, 10, -1]), size)[2, 3], together[23], 2 * bounds[23])
    assert_within(gaussians(bits[7], size), together[7], 2 * bounds[7])


def pair_of(high, middle, last, angle):
    """The two Gaussians of one pair, from the 32, 16 and 8 bits of its radius and the 24 of its angle."""
    words = np.array([high, high, angle << 8 | last, angle << 8 | last, middle << 16 | middle], np.uint32)
    draws = gaussians(tf.constant(words), 4).numpy()
    # Both pairs are the same.
    np.testing.assert_array_equal(draws[::2], draws[1::2])
    return draws[::2]


def test_crafted_bits_reach_beyond_what_tensorflows_own_draws_can():
    assert pytest.approx(8.89, abs=half_a_digit("8.89")) == LARGEST_RADIUS
    bound = rounding(LARGEST_RADIUS)
    np.testing.assert_allclose(pair_of(0, 0, 0, 0), [LARGEST_RADIUS, 0.0], rtol=bound / LARGEST_RADIUS)
    # A quarter of a turn, half of one, and three quarters.
    np.testing.assert_allclose(pair_of(0, 0, 0, 2**22), [0.0, LARGEST_RADIUS], atol=bound)
    np.testing.assert_allclose(pair_of(0, 0, 0, 2**23), [-LARGEST_RADIUS, 0.0], atol=bound)
    np.testing.assert_allclose(pair_of(0, 0, 0, 3 * 2**22), [0.0, -LARGEST_RADIUS], atol=bound)
    # Where 48 bits stop, and 32; and the lower bits below that.
    for bits, radius_bits in (((0, 1, 0), 48), ((1, 0, 0), 32), ((0, 2**15, 0), 33), ((0, 0, 128), 49)):
        # Half of the last of 56 bits is added.
        expected = math.sqrt(2 * (radius_bits * math.log(2) - math.log1p(2.0 ** (radius_bits - 57))))
        np.testing.assert_allclose(pair_of(*bits, 0)[0], expected, atol=rounding(expected))
    # The other end, where float32 itself is too coarse to hold the uniform number: little noise, but never none.
    # These are exact in float32, so that only the logarithm, its root and a product round.
    bound = gamma(ELEMENTARY + 3)
    least = math.sqrt(-2 * math.log1p(-(2.0**-24)))
    for high, middle, last in ((LARGEST_WORD, 0, 0), (LARGEST_WORD, 2**16 - 1, 255), (LARGEST_WORD - 100, 2**15, 0)):
        np.testing.assert_allclose(pair_of(high, middle, last, 0)[0], least, rtol=bound)
    of_few = math.sqrt(-2 * math.log1p(-(2.0**-20)))
    np.testing.assert_allclose(pair_of(2**32 - 2**12, 0, 0, 0)[0], of_few, rtol=bound)
    np.testing.assert_allclose(pair_of(2**31, 0, 0, 0)[0], math.sqrt(2 * math.log(2)), rtol=bound)


def test_no_bits_give_anything_but_a_finite_number_within_the_bound():
    highs = (0, 1, 2, 2**24, 2**31 - 1, 2**31, 3 * 2**30, LARGEST_WORD - 1, LARGEST_WORD)
    for crafted in itertools.product(highs, (0, 1, 2**16 - 1), (0, 255), (0, 1, 2**22, 2**24 - 1)):
        draws = pair_of(*crafted).astype(np.float64)
        assert np.isfinite(draws).all()
        assert 0 < np.linalg.norm(draws) <= LARGEST_RADIUS + math.sqrt(2) * rounding(LARGEST_RADIUS)


def test_every_bit_is_one_pairs_alone():
    """Flipping a bit moves one pair, but for the halves of the last words, which are one pair's each."""
    words = draw_bits(seeds_of((7, 8))[0], bits_for_gaussians(16)).numpy()
    # Radii so far out that all their bits count.
    words[:8] = np.arange(8)
    before = np.reshape(gaussians(tf.constant(words), 16), [2, 8])
    owners = []
    for word, bit in itertools.product(range(len(words)), (0, 7, 8, 15, 16, 31)):
        flipped = words.copy()
        flipped[word] ^= np.uint32(1 << bit)
        moved = (np.reshape(gaussians(tf.constant(flipped), 16), [2, 8]) != before).any(axis=0)
        owners.append(np.flatnonzero(moved))
    assert all(len(moved) <= 1 for moved in owners)
    assert {int(moved[0]) for moved in owners if len(moved)} == set(range(8))


def test_the_gaussian_has_gaussian_tails():
    size = 2_000_000
    draws = gaussians(draw_bits(seeds_of((3, 4))[0], bits_for_gaussians(size)), size).numpy()
    for threshold in (1.0, 2.0, 3.0, 4.0):
        expected = math.erfc(threshold / math.sqrt(2))
        error = math.sqrt(expected / draws.size)
        assert abs((np.abs(draws) > threshold).mean() - expected) < 4 * error
    assert abs(draws.mean()) < 4 / math.sqrt(size)
    assert abs(draws.std() - 1) < 4 / math.sqrt(2 * size)
    # Cosine and sine of the same angle are neighbours at a distance of half the size.
    first, second = np.split(draws, 2)
    for one, other in ((first, second), (np.abs(first), np.abs(second)), (draws[:-1], draws[1:])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(len(one))
