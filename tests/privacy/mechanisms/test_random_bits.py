"""The generator against its own publication, and the Gaussians against many digits."""

import itertools
import math
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import tensorflow as tf

from tests.privacy.mechanisms.grid_support import LARGEST_RADIUS, ONES, exact_pair, pairs_of_words, words_of_pairs
from tests.rounding import assert_within, half_a_digit
from tff_pdp.privacy.accounting.grid_distance import ROUNDING
from tff_pdp.privacy.mechanisms import random_bits
from tff_pdp.privacy.mechanisms.random_bits import (
    bits_for_gaussians,
    check_pairs,
    draw_bits,
    draw_bits_of_all,
    gaussians,
)

LARGEST_WORD = 2**32 - 1


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


def exact_gaussians(bits, size):
    """In more than double precision, rounded; and how far those of the product may be from them."""
    pairs = [exact_pair(*words) for words in pairs_of_words(bits)]
    bounds = [ROUNDING * float(mpmath.hypot(*pair)) for pair in pairs]
    draws = [float(pair[part]) for part in (0, 1) for pair in pairs]
    return np.array(draws[:size]), np.array([*bounds, *bounds][:size])


def test_the_reference_gives_the_published_answers():
    # kat_vectors of Random123, the paper's own implementation.
    assert philox([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([LARGEST_WORD] * 2, [LARGEST_WORD] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.fixture(params=[False, True], ids=["for CPUs", "for GPUs"])
def form(request, monkeypatch):
    """Both forms of the generator: TensorFlow's own operation, and elementwise operations."""
    monkeypatch.setattr(random_bits, "gpu_is_visible", lambda: request.param)


@pytest.mark.usefixtures("form")
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


@pytest.mark.usefixtures("form")
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


@pytest.mark.parametrize("place", [0, 5])
def test_both_forms_of_a_stack_have_the_same_bits_and_only_one_has_a_loop(place, monkeypatch):
    seeds = tf.constant(random_seeds(3))

    def drawn(is_for_gpus):
        monkeypatch.setattr(random_bits, "gpu_is_visible", lambda: is_for_gpus)
        draw = tf.function(lambda seeds: tf.vectorized_map(lambda seed: draw_bits(seed, 1023, place), seeds))
        graph = draw.get_concrete_function(seeds).graph
        return draw(seeds), {operation.type for operation in graph.get_operations()}

    (expected, with_loop), (found, without_loop) = drawn(False), drawn(True)
    np.testing.assert_array_equal(found, expected)
    assert {"StatelessWhile", "While"} & with_loop
    assert not {"StatelessWhile", "While"} & without_loop


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_gaussians_are_box_mullers_in_many_digits(size):
    bits = draw_bits_of_all(tf.constant(random_seeds(50)), bits_for_gaussians(size))
    expected, bounds = np.stack([exact_gaussians(row, size) for row in bits.numpy()], axis=1)
    together = gaussians(bits, size)
    assert (together.dtype, together.shape) == (tf.float64, (50, size))
    assert_within(together, expected, bounds)
    # Whatever the leading axes are; up to products and sums that are rounded together in some registers.
    assert_within(gaussians(tf.reshape(bits, [5, 10, -1]), size)[2, 3], together[23], 2 * bounds[23])
    assert_within(gaussians(bits[7], size), together[7], 2 * bounds[7])


# The angle of zero, in the middle of a quarter.
AHEAD = 2**61


FAST = "--xla_cpu_enable_fast_math=true"
CHECK = "from tff_pdp.privacy.mechanisms.random_bits import check_pairs; check_pairs({compiled})"


@pytest.mark.parametrize(
    ("compiled", "in_a_file", "auto_jit"),
    [
        (True, True, False),
        pytest.param(True, False, False, marks=pytest.mark.all),
        pytest.param(False, False, True, marks=pytest.mark.all),
    ],
)
def test_flags_that_make_sums_inexact_are_noticed_wherever_they_stand(tmp_path, compiled, in_a_file, auto_jit):
    flags = FAST
    if in_a_file:
        (tmp_path / "flags").write_text(FAST)
        flags = str(tmp_path / "flags")
    jit = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"} if auto_jit else {}
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(compiled=compiled)],
        env={**os.environ, "XLA_FLAGS": flags, **jit},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "EngineError: TensorFlow's float64 functions are too inexact for noise here" in done.stderr


@pytest.mark.parametrize("compiled", [True, False])
def test_pairs_are_checked_in_this_process_while_a_graph_is_built(compiled):
    check_pairs.cache_clear()
    with tf.Graph().as_default():
        check_pairs(compiled)


def test_the_pair_that_is_checked_against_is_exact():
    for words in np.random.default_rng(3).integers(0, 2**32, (100, 6), dtype=np.uint64).tolist():
        in_pairs = [words[place] * 2**32 + words[place + 1] for place in (0, 2, 4)]
        for one, other in zip(random_bits.exact_pair(words), exact_pair(*in_pairs), strict=True):
            assert abs(mpmath.mpf(str(one)) - other) < mpmath.mpf(10) ** -30


def pair_of(*words):
    """The two Gaussians of one pair, from three words of 64 bits."""
    return gaussians(tf.constant(words_of_pairs([words])), 2).numpy()


def test_crafted_bits_reach_beyond_what_tensorflows_own_draws_can():
    assert pytest.approx(13.37, abs=half_a_digit("13.37")) == LARGEST_RADIUS
    bound = ROUNDING * LARGEST_RADIUS
    np.testing.assert_allclose(pair_of(0, 0, AHEAD), [LARGEST_RADIUS, 0.0], atol=bound)
    # A quarter of a turn, half of one, and three quarters.
    np.testing.assert_allclose(pair_of(0, 0, AHEAD + 2**62), [0.0, LARGEST_RADIUS], atol=bound)
    np.testing.assert_allclose(pair_of(0, 0, AHEAD + 2**63), [-LARGEST_RADIUS, 0.0], atol=bound)
    np.testing.assert_allclose(pair_of(0, 0, AHEAD + 3 * 2**62), [0.0, -LARGEST_RADIUS], atol=bound)
    # Where 64 bits stop, and those of the second word; half of the last of 128 bits is added.
    for words, radius_bits in (((1, 0), 64), ((0, 2**63), 65), ((0, 2**30), 98), ((0, 1), 128)):
        expected = math.sqrt(2 * (radius_bits * math.log(2) - math.log1p(2.0 ** (radius_bits - 129))))
        np.testing.assert_allclose(pair_of(*words, AHEAD)[0], expected, rtol=ROUNDING)
    # The other end: little noise, but never none.
    for words, radius_bits in (((ONES, 0), 129), ((ONES, 2**63), 65), ((ONES - 1, 0), 64), ((ONES - 2**40, 0), 24)):
        expected = math.sqrt(-2 * math.log1p(-(2.0**-radius_bits)))
        np.testing.assert_allclose(pair_of(*words, AHEAD)[0], expected, rtol=ROUNDING)
    for high in (2**63 - 1, 2**63):
        np.testing.assert_allclose(pair_of(high, ONES, AHEAD)[0], math.sqrt(2 * math.log(2)), rtol=ROUNDING)


def test_no_bits_give_anything_but_a_finite_number_within_the_bound():
    ends = (0, 1, 2, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 3 * 2**62, ONES - 2**53, ONES - 1, ONES)
    crafted = list(itertools.product(ends, ends, ends))
    draws = gaussians(tf.constant(words_of_pairs(crafted)), 2 * len(crafted)).numpy().reshape(2, -1)
    lengths = np.linalg.norm(draws, axis=0)
    assert (lengths > 0).all() and (lengths <= (1 + ROUNDING) * LARGEST_RADIUS).all()
    for words, draw in zip(crafted, draws.T, strict=True):
        exact = exact_pair(*words)
        assert mpmath.hypot(draw[0] - exact[0], draw[1] - exact[1]) <= ROUNDING * mpmath.hypot(*exact)


def test_every_bit_is_one_pairs_alone():
    """Flipping any bit moves one pair, where numbers are so small that all their bits count."""
    words = draw_bits(seeds_of((7, 8))[0], bits_for_gaussians(16)).numpy()
    words[:16] = 0
    words[16:24] = 1
    words[32:40] = AHEAD >> 32
    before = np.reshape(gaussians(tf.constant(words), 16), [2, 8])
    places = list(itertools.product(range(len(words)), (0, 1, 7, 16, 31)))
    flipped = np.repeat(words[np.newaxis], len(places), axis=0)
    for row, (word, bit) in zip(flipped, places, strict=True):
        row[word] ^= np.uint32(1 << bit)
    moved = (np.reshape(gaussians(tf.constant(flipped), 16), [-1, 2, 8]) != before).any(axis=1)
    owners = [word % 8 for word, _ in places]
    np.testing.assert_array_equal(moved, np.eye(8, dtype=bool)[owners])


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
