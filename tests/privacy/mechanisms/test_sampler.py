"""Noise on the grid against the ideal law: all of a narrow sampler, single pairs in many digits, and many draws."""

import math
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

from tests.privacy.mechanisms.grid_support import ONES, public_step, turn_of, words_of_pairs
from tests.privacy.mechanisms.test_random_bits import LARGEST_WORD, philox, words_of
from tests.rounding import standard_errors
from tests.tiers import amount
from tff_pdp.privacy.accounting import grid_distance
from tff_pdp.privacy.mechanisms import random_bits
from tff_pdp.privacy.mechanisms.grid_noise import noise_in_steps
from tff_pdp.privacy.mechanisms.random_bits import bits_for_gaussians, draw_bits, draw_bits_of_all, gaussians

U = 2.0**-53
# Longer pairs are charged by their mass.
LONGEST = 10.6


def pairs_by_numpy(distance, is_upper, turn):
    """Box and Muller's pairs, from how far a uniform number is from its nearer end, which end, and an angle."""
    log = np.where(is_upper, np.log1p(-distance), np.log(distance))
    radius = np.sqrt(-2 * log)
    return radius * np.cos(turn), radius * np.sin(turn)


# --- all of a narrow sampler


class Narrow(NamedTuple):
    """The sampler with words of a few bits, and a grid as coarse as goes with them.

    Attributes:
      radius_bits: of the radius, the one that says which end is nearer included.
      angle_bits: of the angle.
      steps: in a standard deviation.
    """

    radius_bits: int
    angle_bits: int
    steps: int

    def counts(self, most):
        """How many of all pairs of words fall into each cell of `[-most, most]` squared, and into none of them."""
        near = np.arange(2 ** (self.radius_bits - 1)) + 0.5
        angles = np.arange(-(2 ** (self.angle_bits - 1)), 2 ** (self.angle_bits - 1)) * (
            math.pi * 2.0 ** (1 - self.angle_bits)
        )
        width = 2 * most + 1
        counts = np.zeros(width * width, np.int64)
        for is_upper in (False, True):
            for part in np.array_split(near, max(1, len(near) * len(angles) // 2**20)):
                pairs = pairs_by_numpy(part[:, np.newaxis] * 2.0**-self.radius_bits, is_upper, angles)
                first, second = (np.round(pair * self.steps).astype(np.int64) + most for pair in pairs)
                inside = (np.minimum(first, second) >= 0) & (np.maximum(first, second) < width)
                counts += np.bincount((first * width + second)[inside], minlength=width * width)
        outside = 2 ** (self.radius_bits + self.angle_bits) - int(counts.sum())
        return counts.reshape(width, width), outside

    def displacement(self, shortest, longest):
        """How far the pair that is made may be from the ideal pair, whose digits go on, if its length is in between.

        Half a digit of the radius's uniform number, at either end, and a digit of the angle.
        """
        half = 2.0 ** -(self.radius_bits + 1)
        # From exp(-length^2 / 2) half a digit down, which matters most where that is small.
        left = np.exp(-(longest**2) / 2) - half
        outwards = np.where(left > 0, np.sqrt(-2 * np.log(np.where(left > 0, left, 1.0))) - longest, np.inf)

        # And from one: lengths near zero are roots of what is left.
        def length_of(distance):
            return np.sqrt(-2 * np.log1p(-distance))

        distance = np.maximum(-np.expm1(-(shortest**2) / 2), half)
        inwards = length_of(distance) - length_of(distance - half)
        return np.maximum(outwards, inwards) + longest * math.pi * 2.0 ** (1 - self.angle_bits)


def masses(steps, most, widened):
    """Ideal masses of all cells, each made wider by so much on all sides, as products of both values'."""
    centres = np.abs(np.arange(-most, most + 1)) / steps
    half = 0.5 / steps + widened

    def along(centres):
        # Tails above, where the difference of those below would be rounded away.
        return special.ndtr(half - centres) - special.ndtr(-half - centres)

    return along(centres[:, np.newaxis]) * along(centres[np.newaxis, :])


@pytest.mark.parametrize(
    # Up to which length the bound is at most a half.
    ("narrow", "reach"),
    [(Narrow(10, 9, 2), 0.9), (Narrow(12, 10, 4), 2.7), (Narrow(12, 12, 4), 3.0), (Narrow(14, 11, 8), 3.0)],
)
def test_all_pairs_of_a_narrow_sampler_are_as_likely_as_the_bound_has_it(narrow, reach):
    """Exact probabilities of every cell; digits that are not drawn displace pairs in place of rounding."""
    most, steps = 6 * narrow.steps, narrow.steps
    counts, outside = narrow.counts(most)
    made = counts / 2.0 ** (narrow.radius_bits + narrow.angle_bits)
    ideal = masses(steps, most, 0.0)
    lengths = np.hypot(*np.meshgrid(*[np.arange(-most, most + 1) / steps] * 2))
    moved = narrow.displacement(np.maximum(lengths - 2 / steps, 0.0), lengths + 2 / steps)
    # A pair that falls into a cell comes from an ideal one in the cell made wider; ideal ones in the smaller cell fall
    # into it.
    wider = masses(steps, most, np.minimum(moved, 10.0))
    smaller = masses(steps, most, -np.minimum(moved, 0.5 / steps))
    assert (smaller * (1 - 1e-9) <= made).all()
    assert (made <= wider * (1 + 1e-9)).all()
    # As logarithms of ratios, they are what the distance is worked out from.
    covered = lengths <= reach
    bounds = np.maximum(np.log(wider / ideal), np.log(ideal / np.maximum(smaller, 1e-300)))
    ratios = np.abs(np.log(np.where(covered, made, ideal) / ideal))
    assert bounds[covered].max() <= 0.5
    assert (ratios <= bounds).all()
    # The constant of the bound is for densities that hardly change over a cell, and for either side.
    assert (ratios <= 4.2 * moved * steps)[covered].all()
    # All cells beyond together: pairs there are from ideal ones that are hardly nearer.
    shortest = reach - math.sqrt(0.5) / steps
    nearest = shortest - narrow.displacement(shortest - 1 / steps, shortest + 1 / steps)
    rest = np.array([1 - made[covered].sum(), 1 - ideal[covered].sum()])
    assert (rest > 0).all() and (rest <= math.exp(-(nearest**2) / 2)).all()
    assert rest[0] * 2.0 ** (narrow.radius_bits + narrow.angle_bits) == counts[~covered].sum() + outside
    assert abs(math.log(rest[0] / rest[1])) <= bounds[covered].max()


# --- the same integers by another program


def bits_by_numpy(seed, size):
    """What `draw_bits` draws, from the publication."""
    key, upper = (int(word) % 2**64 for word in seed)
    blocks = np.arange(math.ceil(size / 4), dtype=np.uint64)
    upper_words = [np.full_like(blocks, word) for word in words_of(upper, 2)]
    counter = [blocks & LARGEST_WORD, blocks >> np.uint64(32), *upper_words]
    return np.stack(np.broadcast_arrays(*philox(words_of(key, 2), counter)), axis=1).ravel()[:size]


@pytest.mark.parametrize(("clip_norm", "stddev"), [(1.0, 1.0), (0.3, 5.9), (1.0, 0.011)])
def test_another_program_draws_the_same_whole_numbers_of_steps(clip_norm, stddev):
    size, seed = 1_000_000, np.array([-(2**62) - 5, 2**60 + 3], np.int64)
    bits = draw_bits(tf.constant(seed), bits_for_gaussians(size))
    words = bits_by_numpy(seed, bits_for_gaussians(size))
    np.testing.assert_array_equal(bits, words)
    columns = words.reshape(3, 2, -1).astype(np.uint64)
    high, low, angle = columns[:, 0] << np.uint64(32) | columns[:, 1]
    is_upper = high >= 2**63
    near = np.where(is_upper, ~high, high)
    distance = near.astype(np.float64) * 2.0**-64 + (low.astype(np.float64) + 0.5) * 2.0**-128
    pairs = pairs_by_numpy(distance, is_upper, (angle.astype(np.float64) - 2.0**61) * (math.pi * 2.0**-63))
    exact_steps = np.concatenate(pairs) * float(np.float32(stddev)) / public_step(clip_norm, np.float32(stddev))
    step = tf.constant(public_step(clip_norm, np.float32(stddev)), tf.float64)
    found = noise_in_steps(gaussians(bits, size), tf.constant(stddev), step).numpy()
    differ = np.flatnonzero(found != np.round(exact_steps))
    # Two libraries' logarithms may lie on both sides of half a step, once in ten million draws; nowhere else.
    assert len(differ) <= 2
    fraction = np.abs(exact_steps[differ] % 1 - 0.5)
    assert (fraction <= 2 * grid_distance.ROUNDING * np.tile(np.hypot(*pairs), 2)[differ] * 2**19).all()
    assert (np.abs(found[differ] - np.round(exact_steps[differ])) <= 1).all()


# --- single functions and pairs, in many digits


def arguments_of(name, size, rng):
    """Random ones, of all magnitudes that the sampler has, and edges."""
    if name in ("sin", "cos"):
        quarter = math.pi / 4
        ends = [side * end for side in (-1, 1) for end in (quarter, np.nextafter(quarter, 0), math.pi * 2.0**-63, 0.5)]
        small = rng.choice([-1, 1], size // 4) * np.exp2(-rng.uniform(1, 62, size // 4))
        return np.concatenate([rng.uniform(-quarter, quarter, size - len(small) - len(ends)), ends, quarter * small])
    ends = [0.5 * 2.0**-128, 1.5 * 2.0**-128, 2.0**-127, 2.0**-64, 0.5, math.exp(-56), 0.25, 1 - 2.0**-53, 1 - 2.0**-52]
    root = math.sqrt(0.5)
    ends += [np.nextafter(end, side) for end in (0.5, root, root / 2, 0.25) for side in (0, 1)] + [root, root / 2]
    few = np.exp2(-rng.uniform(0, 129, size // 2))
    return np.concatenate([rng.uniform(0, 1, size // 4), 1 - np.exp2(-rng.uniform(1, 53, size // 4)), few, ends])


@pytest.mark.parametrize("form", ["tensorflow", "series", "compiled series"])
@pytest.mark.parametrize("name", ["log", "sin", "cos"])
def test_functions_are_as_exact_as_the_proof_assumes(name, form):
    rng = np.random.default_rng(0)
    arguments = arguments_of(name, amount(test=10_000, all=100_000), rng)
    function = getattr(tf.math, name) if form == "tensorflow" else getattr(random_bits, f"_{name}")
    found = tf.function(function, jit_compile=form.startswith("compiled"))(tf.constant(arguments)).numpy()
    for value, argument in zip(found, arguments, strict=True):
        exact = getattr(mpmath, name)(mpmath.mpf(float(argument)))
        # The cosine's error is a share of one rather than of itself.
        bound = {"log": 2.5 * abs(exact), "sin": 1.6 * abs(exact), "cos": 1.4}[name]
        assert abs(mpmath.mpf(float(value)) - exact) <= bound * U


def test_what_series_leave_out_is_far_below_a_digit():
    """Terms shrink most slowly at the largest arguments there are: half of a quarter turn, and the root of two."""
    quarter, ratio = mpmath.pi / 4, (mpmath.sqrt(2) - 1) / (mpmath.sqrt(2) + 1)
    # Of the sine, the cosine and the logarithm in terms of (1 + x) / (1 - x), their first terms left out as well.
    sine = sum((-1) ** k * quarter ** (2 * k + 1) / mpmath.factorial(2 * k + 1) for k in range(9))
    cosine = sum((-1) ** k * quarter ** (2 * k) / mpmath.factorial(2 * k) for k in range(9))
    logarithm = sum(2 * ratio ** (2 * k + 1) / (2 * k + 1) for k in range(11))
    for found, exact in ((sine, mpmath.sin(quarter)), (cosine, mpmath.cos(quarter)), (logarithm, mpmath.log(2) / 2)):
        assert abs(found - exact) < U / 30 * exact
    # Coefficients are the nearest float64 numbers.
    factorial = mpmath.factorial
    assert [float((-1) ** k / factorial(2 * k + 1)) for k in range(1, 9)] == random_bits._SINE
    assert [float((-1) ** k / factorial(2 * k)) for k in range(2, 9)] == random_bits._COSINE
    assert [float(mpmath.mpf(2) / (2 * k + 1)) for k in range(1, 11)] == random_bits._LOGARITHM
    high, low = (mpmath.mpf(part) for part in random_bits._LOG_2)
    assert abs(high + low - mpmath.log(2)) < mpmath.mpf(2) ** -98
    assert high * 2**45 == int(high * 2**45)


def displacement(words, drawn, below=0, beside=0):
    """Of a drawn pair from the ideal one, as a share of its length: in the middle of its digits, or at an end of them.

    Args:
      words: high, low, angle.
      drawn: the pair.
      below: half digits of the radius from the middle.
      beside: digits of the angle.
    """
    high, low, angle = words
    near = ONES - high if high >> 63 else high
    distance = (mpmath.mpf(2 * (near * 2**64 + low) + 1 + below) / 2) / mpmath.mpf(2) ** 128
    log = mpmath.log1p(-distance) if high >> 63 else mpmath.log(distance)
    radius, turn = mpmath.sqrt(-2 * log), turn_of(angle + beside)
    return float(mpmath.hypot(drawn[0] - radius * mpmath.cos(turn), drawn[1] - radius * mpmath.sin(turn)) / radius)


def random_words(size, rng):
    words = rng.integers(0, 2**64, (size, 3), dtype=np.uint64)
    return [tuple(int(word) for word in row) for row in words]


def far_words(size, rng, longest):
    """Of pairs whose lengths are spread evenly up to the longest, that no run would see otherwise."""
    found = []
    for length, (_, _, angle) in zip(rng.uniform(8, longest, size), random_words(size, rng), strict=True):
        digits = int(mpmath.exp(-(mpmath.mpf(float(length)) ** 2) / 2) * 2**128)
        found.append((digits >> 64, digits & ONES, angle))
    return found


def near_words(size, rng):
    """Of pairs near the end of no length at all, and with angles near axes."""
    return [
        (ONES - (high >> int(shift)), low, (int(quarter) * 2**62 + 2**61 + (angle >> int(other))) & ONES)
        for (high, low, angle), shift, other, quarter in zip(
            random_words(size, rng),
            rng.integers(1, 64, size),
            rng.integers(2, 64, size),
            rng.integers(0, 4, size),
            strict=True,
        )
    ]


def test_pairs_are_as_near_to_ideal_ones_as_is_charged_for():
    rng, size = np.random.default_rng(1), amount(test=2000, all=20_000)
    words = [*random_words(size, rng), *far_words(size, rng, LONGEST), *near_words(size, rng)]
    drawn = gaussians(tf.constant(words_of_pairs(words)), 2 * len(words)).numpy().reshape(2, -1).T
    in_the_middle = [displacement(*pair) for pair in zip(words, drawn, strict=True)]
    # Less than 7.7 u, and 1.3 for what is not drawn and for the product with a standard deviation.
    assert max(in_the_middle) <= 7.7 * U
    # Whatever digits follow those that are drawn.
    far = slice(size, 2 * size)
    for below, beside in ((-1, 0), (1, 1)):
        ends = [displacement(*pair, below, beside) for pair in zip(words[far], drawn[far], strict=True)]
        assert max(ends) <= grid_distance.ROUNDING - U


def test_beyond_the_longest_pairs_the_cost_of_one_is_as_charged():
    """There the digits of the radius end: up to a length of 12, half of the last one moves a pair by ever more."""
    rng, size = np.random.default_rng(2), amount(test=500, all=5000)
    words = far_words(size, rng, 12.0)
    drawn = gaussians(tf.constant(words_of_pairs(words)), 2 * size).numpy().reshape(2, -1).T
    for below, beside in ((-1, 0), (1, 1)):
        for pair in zip(words, drawn, strict=True):
            length = np.hypot(*pair[1])
            digit = 2.0**-129 * math.exp(length**2 / 2) / length
            assert displacement(*pair, below, beside) * length <= grid_distance.ROUNDING * length + digit * (1 + 1e-6)


# --- many draws at full width


CLIENTS, PLACES, STEPS, DRAWS = 20, 5, 4, 5000
# Not a power of two, so that cells and words have no common borders.
STEPS_OF_DEVIATION = 1.3 * 2.0**18
BINS, LOW_BITS = 4096, 8
# Of a Gaussian's powers, and of its size: mean and variance.
MOMENTS = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}
SIZE = math.sqrt(2 / math.pi), 1 - 2 / math.pi
TAILS = (1.0, 2.0, 3.0, 4.0, 4.5, 5.0)


@tf.function
def draw_chunk(seeds):
    """Float64 `[clients and places, steps, draws]`: of many seeds at once, and of one seed at places of its own."""
    words = STEPS * bits_for_gaussians(DRAWS)
    at_places = tf.stack([draw_bits(seeds[0], words, 7 + place) for place in range(PLACES)])
    bits = tf.concat([draw_bits_of_all(seeds, words), at_places], axis=0)
    return gaussians(tf.reshape(bits, [CLIENTS + PLACES, STEPS, -1]), DRAWS)


@pytest.fixture(scope="module")
def many():
    """Sums over draws, taken chunk by chunk: no more than one is held."""
    rng = np.random.default_rng(0)
    chunk = (CLIENTS + PLACES) * STEPS * DRAWS
    sums = {"size": 0, "above": np.zeros(len(TAILS)), "below": np.zeros(len(TAILS))}
    sums |= {"moments": np.zeros(len(MOMENTS)), "bins": np.zeros(BINS, np.int64)}
    sums |= {"low": np.zeros(2**LOW_BITS, np.int64), "products": {}}
    for _ in range(amount(test=2_000_000, all=100_000_000) // chunk):
        draws = draw_chunk(tf.constant(rng.integers(-(2**63), 2**63, (CLIENTS, 2), dtype=np.int64))).numpy()
        flat = draws.ravel()
        sums["size"] += flat.size
        square = flat * flat
        sums["moments"] += [flat.sum(), square.sum(), (square * flat).sum(), (square * square).sum()]
        sums["above"] += [np.count_nonzero(flat > tail) for tail in TAILS]
        sums["below"] += [np.count_nonzero(flat < -tail) for tail in TAILS]
        sums["bins"] += np.bincount((special.ndtr(flat) * BINS).astype(np.int64), minlength=BINS)[:BINS]
        wholes = np.round(flat * STEPS_OF_DEVIATION).astype(np.int64)
        sums["low"] += np.bincount(wholes & 2**LOW_BITS - 1, minlength=2**LOW_BITS)
        for kind, values in {"signed": draws, "sizes": (np.abs(draws) - SIZE[0]) / math.sqrt(SIZE[1])}.items():
            neighbours = {
                "halves of a pair": (values[..., : DRAWS // 2], values[..., DRAWS // 2 :]),
                "next to each other": (values[..., :-1], values[..., 1:]),
                "two apart": (values[..., :-2], values[..., 2:]),
                "steps": (values[:, :-1], values[:, 1:]),
                "clients": (values[: CLIENTS - 1], values[1:CLIENTS]),
                "places": (values[CLIENTS:-1], values[CLIENTS + 1 :]),
                "a client and its places": (values[:1], values[CLIENTS : CLIENTS + 1]),
            }
            for name, (one, other) in neighbours.items():
                total, count = sums["products"].get((kind, name), (0.0, 0))
                sums["products"][kind, name] = total + np.vdot(one, other), count + one.size
    return sums


def test_moments_are_those_of_a_gaussian(many):
    size = many["size"]
    for total, (mean, variance) in zip(many["moments"], MOMENTS.values(), strict=True):
        assert abs(total / size - mean) < standard_errors(len(MOMENTS)) * math.sqrt(variance / size)


def test_tails_are_as_likely_as_of_a_gaussian(many):
    for side in ("above", "below"):
        for tail, count in zip(TAILS, many[side], strict=True):
            law, alarm = stats.binom(many["size"], stats.norm.sf(tail)), 1e-6 / len(TAILS) / 4
            assert law.ppf(alarm) <= count <= law.isf(alarm)


def test_the_distribution_is_a_gaussians(many):
    """Kolmogorov's test at the borders of thousands of bins, where the largest distance is no larger than anywhere."""
    cumulated = np.cumsum(many["bins"]) / many["size"]
    distance = np.abs(cumulated - np.arange(1, BINS + 1) / BINS).max()
    assert distance * math.sqrt(many["size"]) < special.kolmogi(1e-6)
    expected = many["size"] / BINS
    statistic = ((many["bins"] - expected) ** 2 / expected).sum()
    assert statistic < stats.chi2(BINS - 1).isf(1e-6)


def test_draws_are_independent_over_pairs_places_steps_rounds_and_clients(many):
    for _, (total, count) in many["products"].items():
        # Products of two of variance one each.
        assert abs(total) < standard_errors(len(many["products"])) * math.sqrt(count)


@pytest.mark.parametrize("bits", range(1, LOW_BITS + 1))
def test_low_bits_of_whole_steps_are_uniform(many, bits):
    counts = many["low"].reshape(-1, 2**bits).sum(axis=0)
    expected = many["size"] / 2**bits
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2(2**bits - 1).isf(1e-6)
