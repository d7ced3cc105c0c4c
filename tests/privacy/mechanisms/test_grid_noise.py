"""The public grid: its step, what rounding to it may add, and that nothing between its points is ever released."""

import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.privacy.mechanisms.grid_support import public_step
from tests.privacy.mechanisms.test_dp_sgd import LARGE, MODEL, NUM_EXAMPLES, Clients, weights_of
from tff_pdp.algorithms.base import ClientData
from tff_pdp.privacy.accounting.grid_distance import MOST_STEPS
from tff_pdp.privacy.mechanisms.grid_noise import (
    clip_norm_on_grid,
    grid_step,
    noise_in_steps,
    whole_steps,
    whole_steps_within,
)
from tff_pdp.privacy.mechanisms.random_bits import bits_for_gaussians, draw_bits, gaussians
from tff_pdp.privacy.mechanisms.user_queries import SeededGaussianSumQuery

MARGIN = 2.0**-20
SEED = np.array([2**62 + 11, -(2**61)], np.int64)
NORMAL = st.floats(2.0**-100, 2.0**100, width=32)


def round_to_grid(values, step):
    return whole_steps(values, step) * step


def noise_on_grid(gaussians, stddev, step):
    return noise_in_steps(gaussians, stddev, step) * step


def step_of(clip_norm, stddev):
    step = grid_step(tf.constant(clip_norm, tf.float32), tf.constant(stddev, tf.float32))
    assert (step.dtype, step.shape) == (tf.float64, ())
    return float(step)


def exact(values):
    """The floats as fractions, without rounding."""
    return [Fraction(float(value)) for value in np.ravel(values)]


def rounded(values, step):
    """Fractions to whole steps, ties to even ones."""
    return [round(value / step) * step for value in values]


def squared_norm(values):
    return sum(value * value for value in values)


# --- the step


@settings(max_examples=300, deadline=None)
@given(clip_norm=NORMAL, stddev=NORMAL | st.just(0.0), shift=st.integers(-20, 20))
def test_a_step_is_the_largest_power_of_two_up_to_a_share_of_the_public_numbers(clip_norm, stddev, shift):
    step = step_of(clip_norm, stddev)
    assert math.frexp(step)[0] == 0.5
    share = max(clip_norm, stddev) * 2.0**-18
    assert share / 2 < step <= share
    assert step == public_step(clip_norm, stddev)
    # A standard deviation has no more steps than are charged for.
    assert stddev / step < MOST_STEPS
    # In other units nothing else comes out.
    assert step_of(clip_norm * 2.0**shift, stddev * 2.0**shift) == step * 2.0**shift


def test_powers_of_two_are_steps_of_themselves_and_the_next_number_below_has_half_the_step():
    for exponent in (-60, -1, 0, 7):
        clip_norm = np.float32(2.0**exponent)
        assert step_of(clip_norm, 0.0) == 2.0 ** (exponent - 18)
        assert step_of(0.0, clip_norm) == 2.0 ** (exponent - 18)
        assert step_of(np.nextafter(clip_norm, np.float32(0)), 0.0) == 2.0 ** (exponent - 19)


@pytest.mark.parametrize(
    ("clip_norm", "stddev"),
    [(math.nan, 0.0), (math.nan, math.nan), (1.0, math.nan)],
)
def test_numbers_that_are_not_known_give_no_grid(clip_norm, stddev):
    assert step_of(clip_norm, stddev) == math.inf


@pytest.mark.parametrize("stddev", [0.0, 3.0, math.nan])
def test_without_a_clip_norm_steps_are_finer_than_any_float32_number(stddev):
    step, smallest = step_of(math.inf, stddev), np.finfo(np.float32).smallest_subnormal
    assert 0 < step < float(smallest) ** 2
    assert math.frexp(step)[0] == 0.5


def test_numbers_that_are_not_known_make_everything_nan():
    for clip_norm, stddev in ((math.nan, math.nan), (math.nan, 0.0), (1.0, math.nan), (math.inf, math.nan)):
        step = tf.constant(step_of(clip_norm, stddev), tf.float64)
        values = tf.constant([0.3, -2.0], tf.float64)
        clip = clip_norm_on_grid(tf.constant(clip_norm), step, 2, MARGIN)
        noised = round_to_grid(values * clip, step) + noise_on_grid(values, tf.constant(stddev), step)
        assert np.isnan(noised).all()


def test_an_infinite_clip_norm_without_noise_leaves_every_bit():
    # Float32's numbers, and products of two.
    largest, smallest = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)
    values = np.array([0.1, -0.0, largest**2, -math.inf, math.nan, smallest**2, smallest])
    step = tf.constant(step_of(math.inf, 0.0), tf.float64)
    assert float(clip_norm_on_grid(tf.constant(math.inf), step, 7, MARGIN)) == math.inf
    np.testing.assert_array_equal(
        round_to_grid(tf.constant(values), step).numpy().view(np.int64), values.view(np.int64)
    )
    np.testing.assert_array_equal(noise_on_grid(tf.constant([1.5, -2.0], tf.float64), tf.constant(0.0), step), 0.0)


def test_nothing_is_told_where_clip_norm_and_noise_are_both_zero():
    """There is no step then; that is no number, rather than a bare sum."""
    step = tf.constant(step_of(0.0, 0.0), tf.float64)
    assert float(step) == 0.0
    assert np.isnan(round_to_grid(tf.constant([0.3, 0.0], tf.float64), step)).all()


# --- the clip norm


SHAPES = [(1, 1.0, 0.0), (2, 0.3, 0.0), (75, 1.0, 3.0), (1000, 0.7, 50.0), (4096, 5.0, 0.01), (3000, 0.01, 7.0)]


@pytest.mark.parametrize(("size", "clip_norm", "stddev"), SHAPES)
def test_sums_at_half_steps_differ_by_at_most_the_clip_norm_once_they_are_rounded(size, clip_norm, stddev):
    """The worst there is: every value of one sum is rounded down by half a step, and of the other up."""
    clip = Fraction(float(np.float32(clip_norm)))
    step = tf.constant(step_of(clip_norm, stddev), tf.float64)
    shorter = Fraction(float(clip_norm_on_grid(tf.constant(clip_norm), step, size, MARGIN)))
    assert 0 < shorter < clip
    width = Fraction(float(step))
    # So many whole steps in every value are no longer than the shorter clip norm, an odd number of them.
    steps = math.isqrt(int(shorter**2 / (size * width**2)))
    steps -= 1 - steps % 2
    assert steps > 0
    assert size * (steps * width) ** 2 <= shorter**2 < size * ((steps + 2) * width) ** 2
    one = [width / 2] * size
    other = [width / 2 + steps * width] * size
    moved = (steps + 1) * width
    assert [b - a for a, b in zip(rounded(one, width), rounded(other, width), strict=True)] == [moved] * size
    assert size * moved**2 <= clip**2
    # The product rounds as the fractions do.
    values = tf.constant([float(one[0]), float(other[0])], tf.float64)
    assert exact(round_to_grid(values, step)) == [Fraction(0), moved]


@pytest.mark.parametrize(("size", "clip_norm", "stddev"), SHAPES)
@pytest.mark.parametrize("error", [0, 1])
def test_whatever_is_rounded_and_lost_before_two_sums_differ_by_at_most_the_clip_norm(size, clip_norm, stddev, error):
    """Each sum is off by half of the margin, in the direction in which they differ, where values cross half a step."""
    clip = Fraction(float(np.float32(clip_norm)))
    step = step_of(clip_norm, stddev)
    shorter = Fraction(float(clip_norm_on_grid(tf.constant(clip_norm), tf.constant(step, tf.float64), size, MARGIN)))
    width, rng = Fraction(step), np.random.default_rng(size)
    for shares in (rng.normal(size=size), np.ones(size), rng.standard_cauchy(size), np.eye(size)[0]):
        direction = exact(np.abs(shares))
        # Just below one over its length, so that what is made of it is no longer than what it is multiplied by.
        scale = Fraction(float(1 / np.sqrt(float(squared_norm(direction)))) * (1 - 1e-14))
        unit = [scale * part for part in direction]
        assert squared_norm(unit) <= 1
        base = [whole * width + width / 2 for whole in 2 * rng.integers(-1000, 1000, size).astype(object)]
        other = [value + shorter * part for value, part in zip(base, unit, strict=True)]
        # Pushed over the next half step where that is nearer than half the margin.
        lost = error * Fraction(MARGIN) * clip / 2
        base = [value - lost * part for value, part in zip(base, unit, strict=True)]
        other = [value + lost * part for value, part in zip(other, unit, strict=True)]
        moved = [b - a for a, b in zip(rounded(base, width), rounded(other, width), strict=True)]
        assert squared_norm(moved) <= clip**2
        assert moved != [Fraction(0)] * size


@settings(max_examples=200, deadline=None)
@given(clip_norm=NORMAL, noise_multiplier=st.floats(0, 2.0**10, width=32), size=st.integers(1, 10**9))
def test_a_clip_norm_is_shorter_by_no_more_than_it_has_to_be(clip_norm, noise_multiplier, size):
    step = grid_step(tf.constant(clip_norm), tf.constant(clip_norm * noise_multiplier, tf.float64))
    shorter = Fraction(float(clip_norm_on_grid(tf.constant(clip_norm), step, size, MARGIN)))
    least = Fraction(clip_norm) * (1 - Fraction(MARGIN)) - Fraction(math.sqrt(size)) * Fraction(float(step))
    assert max(least - Fraction(clip_norm) * Fraction(2) ** -49, 0) <= shorter
    # As long as anything is left, the rest and what rounding adds stay below the clip norm, by fractions.
    if shorter > 0:
        room = Fraction(clip_norm) * (1 - Fraction(MARGIN)) - shorter
        # Floating point may be on the wrong side of the margin by 2^-50, as it says.
        assert (room + Fraction(clip_norm) * Fraction(2) ** -50) ** 2 >= size * Fraction(float(step)) ** 2
    assert (shorter == 0) == (least <= 0) or abs(least) < Fraction(clip_norm) * Fraction(2) ** -49


def test_where_rounding_takes_more_than_the_clip_norm_nothing_is_released():
    step = tf.constant(step_of(1e-4, 30.0), tf.float64)
    assert float(clip_norm_on_grid(tf.constant(1e-4), step, 3000, MARGIN)) == 0.0


# --- rounding, and noise


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**30), 2.0**30), min_size=1, max_size=20),
    exponent=st.integers(-20, 3),
)
def test_rounding_gives_the_nearest_whole_steps(values, exponent):
    step = 2.0**exponent
    found = exact(round_to_grid(tf.constant(values, tf.float64), tf.constant(step, tf.float64)))
    assert found == rounded(exact(values), Fraction(step))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**30), 2.0**30), min_size=1, max_size=20),
    exponent=st.integers(-20, 3),
)
def test_rounding_of_a_record_is_toward_zero_and_no_value_grows(values, exponent):
    step = 2.0**exponent
    found = exact(whole_steps_within(tf.constant(values, tf.float64), tf.constant(step, tf.float64)) * step)
    assert found == [math.trunc(value / Fraction(step)) * Fraction(step) for value in exact(values)]
    assert squared_norm(found) <= squared_norm(exact(values))


@pytest.mark.parametrize(("clip_norm", "stddev"), [(1.0, 1.0), (0.3, 7.7), (5.0, 0.011), (2e-20, 3e-20), (1e20, 3e19)])
def test_noise_is_the_nearest_whole_steps_and_adds_to_a_sum_without_rounding(clip_norm, stddev):
    size, step = 2000, tf.constant(step_of(clip_norm, stddev), tf.float64)
    draws = gaussians(draw_bits(tf.constant(SEED), bits_for_gaussians(size)), size)
    noise = noise_on_grid(draws, tf.constant(stddev), step)
    assert noise.dtype == tf.float64
    width, exact_stddev = Fraction(float(step)), Fraction(float(np.float32(stddev)))
    for drawn, found in zip(exact(draws), exact(noise), strict=True):
        assert (found / width).denominator == 1
        # Of the product of two float64 numbers.
        assert abs(found - drawn * exact_stddev) <= width / 2 + abs(drawn) * exact_stddev / 2**53
    # A sum of a billion of the longest records.
    sums = round_to_grid(tf.constant(1e9 * clip_norm * np.random.default_rng(0).uniform(-1, 1, size), tf.float64), step)
    added = exact(sums + noise)
    assert added == [one + other for one, other in zip(exact(sums), exact(noise), strict=True)]


def test_no_noise_is_zero_on_any_grid():
    draws = tf.constant([1.5, -2.0], tf.float64)
    for clip_norm in (1e-20, 1.0, 1e20):
        step = tf.constant(step_of(clip_norm, 0.0), tf.float64)
        np.testing.assert_array_equal(noise_on_grid(draws, tf.constant(0.0), step), 0.0)


# --- what is released


def are_whole_steps(released, step, factor=1.0):
    """Whether each float32 is what a whole number of steps times the factor is rounded to."""
    wholes = np.round(released.astype(np.float64) / factor / step)
    return np.stack([np.float32((wholes + place) * step * factor) == released for place in (-1, 0, 1)]).any(axis=0)


def test_the_check_itself_finds_numbers_between_steps():
    """Float32 numbers near one are 2^-24 apart, a sixteenth of the steps."""
    released = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert are_whole_steps(released, 2.0**-20).mean() < 0.2
    assert are_whole_steps(np.float32(np.round(released * 2.0**20) * 2.0**-20 / 12), 2.0**-20, 1 / 12).all()


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, 3, 3, 1)).astype(np.float32)
    return ClientData(tf.constant(x), tf.constant(rng.integers(0, 4, NUM_EXAMPLES)), tf.constant(NUM_EXAMPLES))


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=["small", "large"])
def test_gradients_are_whole_steps_times_a_public_factor(model, examples):
    clients, weights, rng = Clients(model), weights_of(model), np.random.default_rng(1)
    draws = clients.draw([(5, 6)], 8, sampling_rate=0.5, max_examples=NUM_EXAMPLES)
    for index in range(8):
        clip_norm = np.float32(np.exp(rng.uniform(-5, 3)))
        noise_multiplier = np.float32([0.0, 0.02, 0.5, 1.1, 3.0, 0.9, 10.0, 0.3][index])
        scale = np.float32([1.0, 0.25, 0.37][index % 3])
        released = clients.gradient(
            draws, weights, examples, index, scale=float(scale), clip_norm=clip_norm, noise_multiplier=noise_multiplier
        )
        step = public_step(clip_norm, float(clip_norm) * float(noise_multiplier))
        assert are_whole_steps(released, step, float(scale / np.float32(NUM_EXAMPLES))).all()
        assert released.any()


@pytest.mark.parametrize(
    ("clip_norm", "z"), [(1.0, 0.0), (0.3, 0.02), (1.7, 1.0), (2.5e-9, 0.8), (40.0, 3.1), (1.0, 90)]
)
def test_sums_of_users_are_whole_steps(clip_norm, z):
    query = SeededGaussianSumQuery(clip_norm, z * clip_norm, SEED)
    state = query.initial_global_state()
    params, sample = query.derive_sample_params(state), query.initial_sample_state(tf.zeros([500]))
    step = public_step(np.float32(clip_norm), np.float32(z * clip_norm))
    rng = np.random.default_rng(0)
    for _ in range(20):
        record = tf.constant(clip_norm * rng.normal(size=500), tf.float32)
        prepared = query.preprocess_record(params, record)
        wholes = exact(prepared)
        assert all(whole.denominator == 1 for whole in wholes)
        assert squared_norm(wholes) * Fraction(step) ** 2 <= Fraction(float(np.float32(clip_norm))) ** 2
        sample = query.accumulate_preprocessed_record(sample, prepared)
    for _ in range(3):
        released, state, _ = query.get_noised_result(sample, state)
        assert are_whole_steps(released.numpy(), step).all()


def test_sums_do_not_depend_on_the_order_of_users_to_the_last_bit():
    query = SeededGaussianSumQuery(1.0, 0.9, SEED)
    state = query.initial_global_state()
    params, rng = query.derive_sample_params(state), np.random.default_rng(0)
    records = [
        query.preprocess_record(params, tf.constant(scale * rng.normal(size=300), tf.float32))
        for scale in np.exp(rng.uniform(-12, 3, 50))
    ]

    def one_by_one(order):
        sample = query.initial_sample_state(tf.zeros([300]))
        for place in order:
            sample = query.accumulate_preprocessed_record(sample, records[place])
        return sample

    def stacked(order):
        return tf.reduce_sum(tf.stack([records[place] for place in order]), axis=0)

    def in_two_parts(order):
        return query.merge_sample_states(one_by_one(order[:17]), stacked(order[17:]))

    expected = [sum(column) for column in zip(*(exact(record) for record in records), strict=True)]
    released = query.get_noised_result(one_by_one(range(50)), state)[0].numpy()
    for _ in range(5):
        order = rng.permutation(50)
        for add in (one_by_one, stacked, in_two_parts):
            total = add(order)
            assert exact(total) == expected
            found = query.get_noised_result(total, state)[0].numpy()
            np.testing.assert_array_equal(found.view(np.int32), released.view(np.int32))
