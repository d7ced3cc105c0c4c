"""ChaCha20 in TensorFlow against a library's, its publications and Python's integers, on every engine."""

import numpy as np
import pytest
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from tff_pdp import _tff
from tff_pdp.algorithms.base import ClientData
from tff_pdp.generators.chacha20 import block_words, keystreams
from tff_pdp.models.dense import build_mlp
from tff_pdp.privacy.mechanisms.dp_sgd import build_dp_sgd
from tff_pdp.privacy.mechanisms.grid_noise import grid_step, noise_in_steps
from tff_pdp.privacy.mechanisms.random_bits import bits_for_gaussians, draw_bits, draw_bits_of_all, gaussians
from tff_pdp.processes.vectorizable import map_stack, vectorizable

LARGEST_WORD = 2**32 - 1
RNG = np.random.default_rng(0)


def random_seeds(number):
    return RNG.integers(-(2**63), 2**63, (number, 2), dtype=np.int64)


def words_of(content):
    return np.frombuffer(content, "<u4").astype(np.uint32)


def stream_of(key, place, num_blocks):
    """The key stream by the code under test, of a key of 256 bits and the 16 bytes of its first counter and nonce."""
    last = np.repeat(words_of(place)[:, np.newaxis], num_blocks, axis=1)
    last[0] += np.arange(num_blocks, dtype=np.uint32)
    rows = [words_of(part)[:, np.newaxis] for part in (b"expand 32-byte k", key[:16], key[16:])]
    return block_words([tf.constant(row) for row in (*rows, last)]).numpy().T.reshape(-1)


def block_of_short_key(key, counter, nonce):
    """One block with a key of 128 bits in Python's integers, from Bernstein's paper."""

    def numbers(content):
        return [int.from_bytes(content[place : place + 4], "little") for place in range(0, len(content), 4)]

    place = counter.to_bytes(8, "little") + nonce.to_bytes(8, "little")
    start = numbers(b"expand 16-byte k" + key + key + place)
    state = list(start)
    columns = [(column, column + 4, column + 8, column + 12) for column in range(4)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for _ in range(10):
        for a, b, c, d in columns + diagonals:
            for to, other, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                state[to] = (state[to] + state[other]) & LARGEST_WORD
                mixed = state[turned] ^ state[to]
                state[turned] = (mixed << bits | mixed >> (32 - bits)) & LARGEST_WORD
    return [(before + after) & LARGEST_WORD for before, after in zip(start, state, strict=True)]


# RFC 8439, section 2.3.2 and appendix A.1: key, the first counter with the nonce, and the beginning of the block.
ORDINAL = bytes(range(32))
VECTORS = {
    "2.3.2": (ORDINAL, "01000000000000090000004a00000000", "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c06803"),
    "A.1 1": (bytes(32), "00000000000000000000000000000000", "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1a"),
    "A.1 2": (bytes(32), "01000000000000000000000000000000", "9f07e7be5551387a98ba977c732d080dcb0f29a048e36569"),
    "A.1 3": (
        bytes(31) + b"\1",
        "01000000000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160",
    ),
    "A.1 5": (bytes(32), "00000000000000000000000000000002", "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa496"),
}


@pytest.mark.parametrize(("key", "place", "expected"), VECTORS.values(), ids=VECTORS)
def test_blocks_are_those_of_rfc_8439(key, place, expected):
    found = stream_of(key, bytes.fromhex(place), 1).astype("<u4").tobytes()
    assert found.hex().startswith(expected)


@pytest.mark.parametrize("num_blocks", [1, 2, 1000])
def test_streams_are_those_of_the_library(num_blocks):
    for _ in range(5):
        # The library's counter has 32 bits or 64, as its version has it: none overflows here.
        key, place = RNG.bytes(32), RNG.integers(2**31).item().to_bytes(4, "little") + RNG.bytes(12)
        stream = Cipher(algorithms.ChaCha20(key, place), mode=None).encryptor().update(bytes(64 * num_blocks))
        np.testing.assert_array_equal(stream_of(key, place, num_blocks), words_of(stream))


@pytest.mark.parametrize("place", [0, 1, 2**23 - 1, 2**40 + 3])
def test_draws_are_blocks_of_the_seed_as_a_short_key(place):
    for seed in [*random_seeds(3), np.array([-1, 0]), np.array([2**32, -(2**63)])]:
        key = seed.astype("<i8").tobytes()
        expected = [word for block in range(3) for word in block_of_short_key(key, block, place)]
        for given in (place, tf.constant(place, tf.int64)):
            np.testing.assert_array_equal(draw_bits(tf.constant(seed), 43, given, "chacha20"), expected[:43])


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 10_000])
def test_a_longer_draw_begins_with_the_shorter_one(size):
    seed = tf.constant([3, 4], tf.int64)
    longer = draw_bits(seed, 20_001, generator="chacha20")
    np.testing.assert_array_equal(draw_bits(seed, size, generator="chacha20"), longer[:size])


@pytest.mark.parametrize("num_clients", [1, 2, 33])
def test_what_all_draw_is_what_each_draws(num_clients):
    seeds = tf.constant(random_seeds(num_clients))
    expected = np.stack([draw_bits(seed, 37, generator="chacha20") for seed in seeds])
    np.testing.assert_array_equal(draw_bits_of_all(seeds, 37, "chacha20"), expected)
    traced = tf.function(
        lambda seeds, size: draw_bits_of_all(seeds, size, "chacha20"),
        input_signature=[tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([], tf.int32)],
    )
    np.testing.assert_array_equal(traced(seeds, 37), expected)
    assert traced(seeds, 0).shape == (num_clients, 0)


def test_other_seeds_and_places_share_no_block():
    seeds = tf.constant([(1, 2), (1, 3), (2, 2), (2, 1), (1 + 2**32, 2)], tf.int64)
    draws = [keystreams(seeds, 4000, place) for place in (0, 1, 2**22, 2**32)]
    blocks = np.concatenate([np.reshape(draw, [-1, 16]) for draw in draws])
    assert len(np.unique(blocks, axis=0)) == len(blocks)


def draw_one(seed, place):
    return tf.cast(draw_bits(seed, 37, place, "chacha20"), tf.int64)


def draw_stack(seeds, places):
    return map_stack(lambda own: draw_one(*own), (seeds, places))


@_tff.tensorflow_computation(_tff.TensorType(np.int64, [2]), np.int32)
def bits_of_a_client(seed, place):
    return vectorizable(draw_one, draw_stack, num_shared=0)(seed, place)


@_tff.federated_computation(_tff.at_clients(_tff.TensorType(np.int64, [2])), _tff.at_clients(np.int32))
def bits_of_clients(seeds, places):
    return _tff.federated_map(bits_of_a_client, (seeds, places))


def test_every_engine_draws_the_same_bits(engine, caplog):
    seeds, places = random_seeds(5), np.array([0, 1, 7, 2**22, 3], np.int32)
    with engine.install():
        found = bits_of_clients(list(seeds), list(places))
    expected = [draw_one(tf.constant(seed), place) for seed, place in zip(seeds, places, strict=True)]
    np.testing.assert_array_equal(np.stack(list(found)), np.stack(expected))
    # Neither was it computed client by client, nor an operation of it.
    assert not caplog.records


@pytest.mark.parametrize("hidden", [5, 500], ids=["all steps at once", "step by step"])
def test_the_noise_of_dp_sgd_is_made_of_these_bits(hidden):
    model = build_mlp((3, 3, 1), 4, (hidden,))
    num_parameters, words = model.num_parameters(), bits_for_gaussians(model.num_parameters())
    estimator = build_dp_sgd(model, generator="chacha20")
    # Of two steps with empty batches, so that a gradient is noise alone.
    mechanism = {"clip_norm": 1.0, "noise_multiplier": 2.0, "sampling_rate": 0.0, "expected_batch_size": 1.0}
    mechanism = {name: tf.constant(value) for name, value in mechanism.items()}
    seeds, steps = tf.constant(random_seeds(2)), 2
    of_all = tf.nest.map_structure(lambda value: tf.repeat(value, 2), mechanism)
    num_examples = tf.constant([3, 3])
    draws = estimator.draw(of_all, num_examples, tf.constant(3), tf.constant([steps, steps]), seeds)
    data = ClientData(tf.zeros([3, 3, 3, 1]), tf.zeros([3], tf.int64), tf.constant(3))
    weights = {name: tf.constant(value) for name, value in model.init(0).items()}

    @tf.function(autograph=False)
    def gradients_of_all(index):
        return map_stack(
            lambda own: estimator.gradient(mechanism, own, weights, data, index, tf.constant(1.0), None, None), draws
        )

    stddev = tf.constant(2.0, tf.float64)
    step = grid_step(tf.constant(1.0, tf.float64), stddev)
    for index in range(steps):
        found = gradients_of_all(tf.constant(index))
        for client, seed in enumerate(seeds):
            if hidden == 5:
                bits = draw_bits(seed, steps * (3 + words), 0, "chacha20")[index * (3 + words) + 3 :][:words]
            else:
                bits = draw_bits(seed, words, index + 1, "chacha20")
            expected = noise_in_steps(gaussians(bits, num_parameters), stddev, step) * step
            flat = np.concatenate([np.ravel(value[client]) for value in found.values()])
            np.testing.assert_array_equal(flat, tf.cast(expected, tf.float32))
