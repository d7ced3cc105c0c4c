"""Clips and sums of users' updates: the clip to the last bit, noise against its distribution, trees against NumPy."""

import itertools
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_privacy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from scipy import stats
from tensorflow_privacy.privacy.dp_query import restart_query

from tests.privacy.mechanisms.grid_support import on_grid, public_step
from tests.rounding import ELEMENTARY, assert_within, gamma
from tests.tiers import parameters
from tff_pdp.privacy.mechanisms.grid_noise import grid_step
from tff_pdp.privacy.mechanisms.user_queries import (
    LARGEST_CLIP_NORM,
    SMALLEST_CLIP_NORM,
    SeededAdaptiveClipSumQuery,
    SeededGaussianSumQuery,
    TreeSumQuery,
    clip_record,
    record_in_steps,
    records_in_steps,
    sum_in_steps,
)

SEED = np.array([2**62 + 7, -(2**61)], np.int64)
OTHER_SEED = np.array([2**62 + 7, -(2**61) + 1], np.int64)
OTHER_KEY = np.array([2**62 + 8, -(2**61)], np.int64)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
# How far below the clip norm a record may end that is clipped, by a margin of 2^-20: a norm, a factor and a product are
# float64 numbers. On a grid each of its values ends up to a step nearer to zero.
MARGIN = 2.0**-20 + gamma(8, np.float64)
# Of a norm that is computed in float64 and rounded once, with room for the float64.
NORM = gamma(2)
# Of a clip norm that a round multiplies by an exponential.
STEP = gamma(ELEMENTARY + 4)


def clip(record, clip_norm):
    clipped, norm = clip_record(tf.constant(record, tf.float32), tf.constant(clip_norm, tf.float32))
    return clipped.numpy(), float(norm)


def exact_norm(record):
    """Of values whose squares and their sums lose next to nothing in long doubles."""
    return float(np.sqrt(np.sum(np.square(np.asarray(record, np.longdouble)))))


class Run:
    """A query used as a server does, round by round, its result computed by one compiled function."""

    def __init__(self, query, num_values):
        self._query, self._template = query, tf.zeros([num_values])
        self.state = query.initial_global_state()
        self.events = []
        self._noised = tf.function(lambda sample, state: query.get_noised_result(sample, state)[:2])
        self._add = tf.function(query.accumulate_record)

    def round(self, records=()):
        params = self._query.derive_sample_params(self.state)
        sample = self._query.initial_sample_state(self._template)
        for record in records:
            sample = self._add(params, sample, tf.constant(record, tf.float32))
        result, self.state = self._noised(sample, self.state)
        return result.numpy()

    def event(self):
        return self._query.get_noised_result(self._query.initial_sample_state(self._template), self.state)[2]


def noise_of(query, num_values, num_rounds):
    run = Run(query, num_values)
    return np.stack([run.round() for _ in range(num_rounds)])


# --- the clip


@pytest.mark.parametrize("clip_norm", [SMALLEST_CLIP_NORM, 0.01, 0.1, 1.0, 3.3, LARGEST_CLIP_NORM])
@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 1.0000001, 7.0, 1e9])
def test_no_record_is_longer_than_the_clip_norm_after_it(clip_norm, scale):
    bound = float(np.float32(clip_norm))
    rng = np.random.default_rng(0)
    for size in [*range(1, 40), 300, 5000]:
        direction = rng.normal(size=size)
        record = (scale * bound * direction / np.linalg.norm(direction)).astype(np.float32)
        clipped, norm = clip(record, clip_norm)
        assert exact_norm(clipped) <= bound
        assert norm == pytest.approx(exact_norm(record), rel=NORM)
        if exact_norm(record) < (1 - MARGIN) * bound:
            np.testing.assert_array_equal(clipped, record)
        else:
            assert exact_norm(clipped) >= (1 - MARGIN) * min(exact_norm(record), bound)


@settings(max_examples=300, deadline=None)
@given(
    record=numpy_strategies.arrays(
        np.float32,
        numpy_strategies.array_shapes(max_dims=1, max_side=50),
        elements=st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True),
    ),
    clip_norm=st.floats(float(np.float32(1e-20)), float(np.float32(1e20)), width=32),
)
def test_whatever_a_record_holds_it_is_short_and_points_where_it_did(record, clip_norm):
    clipped, _ = clip(record, clip_norm)
    length = exact_norm(clipped)
    assert length <= clip_norm
    before = exact_norm(record)
    # Numbers below float32's smallest normal one may count as zero.
    if before > 1e10 * SMALLEST_NORMAL and length > 1e10 * SMALLEST_NORMAL:
        assert length >= (1 - MARGIN) * min(before, clip_norm)
        # Every value is rounded once, and so the length; what counts as zero is beyond ten digits.
        np.testing.assert_allclose(clipped / length, record.astype(np.float64) / before, atol=gamma(3))


@pytest.mark.parametrize(
    "record",
    [
        [LARGEST] * 1000,
        [LARGEST, -LARGEST, 1.0],
        [3.0, 4.0],
        [5.0],
        [SMALLEST_NORMAL] * 3,
        [1e-42, LARGEST],
        [0.0, 0.0],
    ],
)
@pytest.mark.parametrize("clip_norm", [SMALLEST_CLIP_NORM, 5.0, np.float32(4.9999995), LARGEST_CLIP_NORM])
def test_extremes_are_clipped_as_anything_else(record, clip_norm):
    clipped, norm = clip(record, clip_norm)
    bound, before = float(np.float32(clip_norm)), exact_norm(np.float32(record))
    assert exact_norm(clipped) <= bound
    # Three numbers below the smallest normal one may count as zero.
    lost = math.sqrt(3) * SMALLEST_NORMAL
    assert exact_norm(clipped) == pytest.approx(min(bound, before), rel=MARGIN, abs=lost)
    assert norm == pytest.approx(before if before <= LARGEST else math.inf, rel=NORM, abs=lost)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2])
def test_a_record_that_is_not_finite_counts_nothing(bad, place):
    record = np.array([1.0, 2.0, 3.0], np.float32)
    record[place] = bad
    clipped, norm = clip(record, 10.0)
    np.testing.assert_array_equal(clipped, 0.0)
    assert norm == math.inf


def test_an_infinite_clip_norm_leaves_every_bit():
    record = np.array([1.5, -0.0, math.nan, -math.inf, LARGEST, SMALLEST_NORMAL], np.float32)
    clipped, _ = clip(record, math.inf)
    np.testing.assert_array_equal(clipped.view(np.int64), record.astype(np.float64).view(np.int64))


# --- noise on a sum


def test_noise_is_gaussian_of_the_given_standard_deviation_and_independent_from_draw_to_draw():
    stddev, num_rounds, size = 3.0 * 0.7, 60, 2003
    rows = noise_of(SeededGaussianSumQuery(0.7, stddev, SEED), size, num_rounds)
    assert abs(rows.std() - stddev) < 3 * stddev / math.sqrt(2 * rows.size)
    assert abs(rows.mean()) < 3 * stddev / math.sqrt(rows.size)
    assert stats.kstest(rows.ravel() / stddev, "norm").pvalue > 1e-3
    assert np.abs(rows.std(axis=0) - stddev).max() < 6 * stddev / math.sqrt(2 * num_rounds)
    for values in (rows, np.abs(rows)):
        correlations = np.corrcoef(values)[np.triu_indices(num_rounds, 1)]
        assert np.abs(correlations).max() < 5 / math.sqrt(size)


def test_other_seeds_draw_other_noise_and_the_same_seed_the_same_bits():
    def draws(seed):
        return noise_of(SeededGaussianSumQuery(1.0, 1.0, np.asarray(seed, np.int64)), 4000, 3)

    np.testing.assert_array_equal(draws(SEED), draws(SEED))
    kinds = np.concatenate([draws(SEED), draws(OTHER_SEED), draws(OTHER_KEY), draws(SEED[::-1])])
    correlations = np.corrcoef(kinds)[np.triu_indices(len(kinds), 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(4000)


def test_the_noise_does_not_depend_on_the_records():
    query = SeededGaussianSumQuery(1.0, 2.0, SEED)
    records = [[0.3, 0.4, 0.0], [3.0, 0.0, 4.0]]
    with_records = Run(query, 3).round(records)
    clipped = np.array([0.3, 0.4, 0.0]) + np.array([0.6, 0.0, 0.8])
    without = Run(query, 3).round()
    # Both results are float32.
    bound = on_grid(1.0, 2.0, records=2) + gamma(1) * (np.abs(with_records).max() + np.abs(without).max())
    np.testing.assert_allclose(with_records.astype(np.float64) - without, clipped, rtol=0, atol=bound)


def test_no_noise_adds_nothing_and_no_clip_changes_nothing():
    run = Run(SeededGaussianSumQuery(math.inf, 0.0, SEED), 3)
    for _ in range(3):
        np.testing.assert_array_equal(run.round([[1.5, -2.0, 2.0**99], [0.25, 4.0, 0.0]]), [1.75, 2.0, 2.0**99])
        np.testing.assert_array_equal(run.round(), 0.0)


def test_the_event_of_a_sum_is_its_gaussian_mechanism():
    event = Run(SeededGaussianSumQuery(0.25, 0.75, SEED), 3).event()
    assert isinstance(event, dp_accounting.GaussianDpEvent)
    assert float(event.noise_multiplier) == 3.0


# --- a clip norm that adapts


def adaptive(sum_noise_multiplier=0.0, count_stddev=0.0, clip_norm=1.0, quantile=0.5, rate=0.2, users=10.0):
    return SeededAdaptiveClipSumQuery(
        clip_norm, sum_noise_multiplier, quantile, rate, count_stddev, users, (SEED, OTHER_SEED)
    )


@pytest.mark.parametrize("quantile", parameters([0.3, 0.5, 0.85], test=[0.3, 0.85]))
@pytest.mark.parametrize("clip_norm", parameters([0.1, 40.0], test=[40.0]))
def test_without_noise_the_clip_norm_goes_to_the_quantile_by_geometric_steps(quantile, clip_norm):
    norms = np.arange(1.0, 11.0)
    records = np.outer(norms, [0.6, 0.0, -0.8])
    run = Run(adaptive(clip_norm=clip_norm, quantile=quantile), 3)
    by_hand = clip_norm
    for number in range(100):
        drifted = (number + 1) * STEP
        assert float(run.state.sum_state.l2_norm_clip) == pytest.approx(by_hand, rel=drifted)
        total = run.round(records)
        expected = np.minimum(norms, by_hand).sum() * np.array([0.6, 0.0, -0.8])
        relative = drifted + MARGIN + gamma(4)
        assert_within(total, expected, relative * np.abs(expected) + len(norms) * public_step(by_hand, 0.0))
        by_hand *= math.exp(-0.2 * ((norms <= by_hand).mean() - quantile))
    below, above = math.floor(10 * quantile - 1e-9), math.ceil(10 * quantile + 1e-9)
    assert 0.85 * below <= by_hand <= 1.15 * above


def test_the_next_rounds_noise_has_the_next_clip_norm():
    run = Run(adaptive(sum_noise_multiplier=2.0, count_stddev=3.0), 4)
    for number in range(5):
        state = run.state.sum_state
        assert float(state.stddev) == 2.0 * float(state.l2_norm_clip)
        assert float(run.state.quantile_estimator_state.current_estimate) == float(state.l2_norm_clip)
        assert int(state.draws) == number
        assert int(run.state.quantile_estimator_state.below_estimate_state.numerator_state.draws) == number
        run.round([[1.0, 0, 0, 0]])
    assert float(run.state.sum_state.l2_norm_clip) != 1.0


def test_the_count_is_noised_and_not_with_the_noise_of_the_sum():
    """Of empty cohorts: the clip norm then moves by half the users less a quantile, and by noise."""
    users, rate, count_stddev, num_rounds = 100.0, 0.01, 5.0, 1500
    run = Run(adaptive(1.0, count_stddev, quantile=0.5, rate=rate, users=users), 4)
    clip_norms, sums = [1.0], []
    for _ in range(num_rounds):
        sums.append(run.round() / clip_norms[-1])
        clip_norms.append(float(run.state.sum_state.l2_norm_clip))
    noise = -np.diff(np.log(clip_norms)) / rate * users
    # What is rounded of the clip norm's steps.
    tolerance = STEP / rate * users
    assert abs(noise.std() - count_stddev) < 3 * count_stddev / math.sqrt(2 * num_rounds) + tolerance
    assert abs(noise.mean()) < 3 * count_stddev / math.sqrt(num_rounds) + tolerance
    columns = np.column_stack([noise, *np.transpose(sums)])
    # Of the same round, of the next, and of the one before.
    for shift in (-1, 0, 1):
        shifted = np.roll(columns[:, 1:], shift, axis=0)
        for values in (np.column_stack([noise, shifted]), np.abs(np.column_stack([noise, shifted]))):
            assert np.abs(np.corrcoef(values.T)[0, 1:]).max() < 4 / math.sqrt(num_rounds)
    assert np.std(np.transpose(sums)) == pytest.approx(1.0, abs=3 / math.sqrt(2 * num_rounds * 4))


def test_one_record_moves_sum_and_count_by_what_the_event_says():
    run, empty = Run(adaptive(3.0, 2.0), 2), Run(adaptive(3.0, 2.0), 2)
    noised, noise = (one.astype(np.float64) for one in (run.round([[30.0, 40.0]]), empty.round()))
    # Both results are float32. The record itself is no longer than the clip norm.
    rounded = gamma(1) * (np.linalg.norm(noised) + np.linalg.norm(noise))
    short = MARGIN + math.sqrt(2) * public_step(1.0, 3.0)
    assert 1.0 - short - rounded <= exact_norm(noised - noise) <= 1.0 + rounded
    # As a count: a record above the clip norm is minus one half, over 10 users.
    difference = np.log(float(run.state.sum_state.l2_norm_clip) / float(empty.state.sum_state.l2_norm_clip))
    assert difference == pytest.approx(0.2 * 0.5 / 10, abs=2 * STEP)
    # So both together are one Gaussian of precision (1/3)^2 + (0.5/2)^2.
    event = adaptive(3.0, 2.0).get_noised_result(
        adaptive(3.0, 2.0).initial_sample_state(tf.zeros([2])), adaptive(3.0, 2.0).initial_global_state()
    )[2]
    precision = sum(float(part.noise_multiplier) ** -2 for part in event.events)
    assert precision == pytest.approx(1 / 9 + 1 / 16)


@pytest.mark.parametrize(("record", "end"), [([0.0, 0.0], SMALLEST_CLIP_NORM), ([1e30, 1e30], LARGEST_CLIP_NORM)])
def test_a_clip_norm_never_leaves_float32_and_its_noise_never_ends(record, end):
    run = Run(adaptive(2.0, 0.001, rate=20.0), 2)
    for _ in range(40):
        result = run.round([record] * 10)
    assert float(run.state.sum_state.l2_norm_clip) == np.float32(end)
    assert np.isfinite(result).all() and result.all()
    assert float(run.state.sum_state.stddev) == 2 * np.float32(end)


# --- trees


def rounds_of(tree, num_values, num_rounds, records=()):
    run = Run(tree, num_values)
    return np.stack([run.round(records) for _ in range(num_rounds)])


def own_weight(height):
    """Of a node in the estimate of its block's sum; the other estimate is the sum of both halves'."""
    return {1: 0.625, 2: 0.5625}.get(height, 0.5)


def estimates_by_numpy(length):
    """Every running sum's noise as weights of nodes: Honaker's estimate with `own_weight`, from the leaves up."""
    # By first leaf and height: weights of a block's estimate, by node.
    blocks: dict[tuple[int, int], dict[int, float]] = {}
    nodes = itertools.count()

    def build(start, height):
        """Enters a block and all blocks inside it."""
        own = next(nodes)
        if height == 0:
            blocks[start, 0] = {own: 1.0}
            return
        middle = start + 2 ** (height - 1)
        build(start, height - 1)
        build(middle, height - 1)
        share, children = own_weight(height), blocks[start, height - 1] | blocks[middle, height - 1]
        blocks[start, height] = {own: share, **{node: (1 - share) * weight for node, weight in children.items()}}

    def parts(count):
        """The largest blocks that make up the first leaves."""
        start = 0
        for height in reversed(range(count.bit_length())):
            if count >> height & 1:
                yield start, height
                start += 2**height

    for start, height in parts(length):
        build(start, height)
    matrix = np.zeros([length, next(nodes)])
    for count in range(1, length + 1):
        for part in parts(count):
            matrix[count - 1, list(blocks[part])] = list(blocks[part].values())
    return matrix


def test_running_sums_carry_the_noise_of_a_tree():
    """Variances and covariances of all running sums of two trees, against estimates worked out anew."""
    length, num_values, stddev = 13, 6000, 1.5
    noise = rounds_of(TreeSumQuery(num_values, 1.0, stddev, SEED, length), num_values, 2 * length) / stddev
    matrix = estimates_by_numpy(length)
    covariance = matrix @ matrix.T
    heights = [[height for height in range(4) if count >> height & 1] for count in range(1, length + 1)]
    variances = [1.0]
    for height in range(1, 4):
        own = own_weight(height)
        variances.append(own**2 + 2 * (1 - own) ** 2 * variances[-1])
    # Hardly more than with the best weights.
    assert_within(variances, [1 / (2 - 0.5**height) for height in range(4)], np.full(4, 0.006))
    np.testing.assert_allclose(np.diag(covariance), [sum(variances[height] for height in hs) for hs in heights])
    sums = np.concatenate([noise[:length].cumsum(axis=0), noise[length:].cumsum(axis=0)])
    expected = np.kron(np.eye(2), covariance)
    # Of products of two Gaussians.
    errors = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / num_values)
    assert (np.abs(sums @ sums.T / num_values - expected) / errors).max() < 4.5
    assert np.abs(sums.mean(axis=1) / np.sqrt(np.diag(expected))).max() < 4.5 / math.sqrt(num_values)


@pytest.mark.parametrize("length", [1, 2, 5, 13, 16])
def test_a_tree_protects_as_well_as_its_event_says(length):
    """A record in round i moves all running sums from i on; how well that is hidden follows from their covariance."""
    matrix = estimates_by_numpy(length)
    covariance = matrix @ matrix.T
    precision = np.linalg.inv(covariance)
    depth = math.ceil(math.log2(length + 1))
    # An inverse by elimination (Higham 2002, section 14.2), and two products with it.
    rounded = gamma(length**2 + 2 * length, np.float64) * np.linalg.cond(covariance)
    for place in range(length):
        moved = (np.arange(length) >= place).astype(float)
        assert moved @ precision @ moved <= depth * (1 + rounded)


def test_a_tree_starts_anew_and_repeats_for_the_same_seed():
    def noise(seed):
        return rounds_of(TreeSumQuery(500, 1.0, 1.0, np.asarray(seed, np.int64), 4), 500, 9)

    same, other = noise(SEED), noise(OTHER_SEED)
    np.testing.assert_array_equal(same, noise(SEED))
    # Rounds 1, 5 and 9 begin a tree.
    rows = np.concatenate([same[[0, 4, 8]], other[[0, 4, 8]]])
    assert np.abs(np.corrcoef(rows)[np.triu_indices(6, 1)]).max() < 4.5 / math.sqrt(500)


def test_without_noise_a_tree_is_the_librarys_own():
    records = [[3.0, 4.0, 0.0], [0.1, 0.0, -0.2], [-1.0, 0.5, 2.0]]
    ours = TreeSumQuery(3, 1.0, 0.0, SEED, 3)
    theirs = tensorflow_privacy.RestartQuery(
        tensorflow_privacy.TreeResidualSumQuery.build_l2_gaussian_query(1.0, 0.0, tf.TensorSpec([3]), noise_seed=1),
        restart_query.PeriodicRoundRestartIndicator(3),
    )
    runs = Run(ours, 3), Run(theirs, 3)
    # Up to three records a round, of norms up to the clip norm of one. One of the two takes differences of running sums
    # of three rounds, in float32, and rounds a norm and a factor.
    bound = on_grid(1.0, 0.0, records=3) + 3 * gamma(3 + 2) + 2 * gamma(3 * 3 + 1) * 3 * 3
    for number in range(7):
        cohort = records[: number % 4]
        mine, library = (run.round(cohort) for run in runs)
        np.testing.assert_allclose(mine, library, atol=bound)
        norms = [max(1.0, exact_norm(record)) for record in cohort]
        by_hand = sum((np.array(r) / n for r, n in zip(cohort, norms, strict=True)), np.zeros(3))
        own = on_grid(1.0, 0.0, records=len(cohort)) + 3 * gamma(1)
        np.testing.assert_allclose(mine, by_hand, rtol=0, atol=own)


def fractions(values):
    return [Fraction(float(value)) for value in np.ravel(values)]


@pytest.mark.parametrize(("length", "stddev"), [(1, 2.5), (6, 2.5), (6, 0.01), (8, 300.0)])
def test_what_a_tree_releases_is_exactly_a_combination_of_noised_sums_of_nodes(length, stddev):
    """In fractions, from the records as they are clipped and the noise as it is drawn, node by node."""
    query = TreeSumQuery(3, 1.0, stddev, SEED, length)
    run, rng, drawn = Run(query, 3), np.random.default_rng(5), itertools.count()
    params = query.derive_sample_params(run.state)
    step = Fraction(public_step(1.0, np.float32(stddev)))
    assert Fraction(float(params.step)) == step

    def node_noise():
        noise = fractions(query.noise(run.state, next(drawn), tf.TensorShape([3])))
        assert all(value.denominator == 1 for value in noise)
        return noise

    def add(first, second):
        return [one + other for one, other in zip(first, second, strict=True)]

    # Estimates of complete blocks, sums of records and noise, by height; largest first in `blocks`.
    for _ in range(2):
        blocks, before = [], [Fraction(0)] * 3
        for _ in range(length):
            records = rng.normal(size=(4, 3)).astype(np.float32)
            total = [Fraction(0)] * 3
            for record in records:
                total = add(total, fractions(query.preprocess_record_impl(params, tf.constant(record))[0]))
            block = (0, total, add(total, node_noise()))
            while blocks and blocks[-1][0] == block[0]:
                height, left_total, left = blocks.pop()
                own, whole = Fraction(own_weight(height + 1)), add(left_total, block[1])
                halves = [(1 - own) * value for value in add(left, block[2])]
                block = (height + 1, whole, add([own * value for value in add(whole, node_noise())], halves))
            blocks.append(block)
            running = [sum(estimates) for estimates in zip(*(estimate for _, _, estimate in blocks), strict=True)]
            expected = [(now - then) * step for now, then in zip(running, before, strict=True)]
            # Float64 holds them in full.
            assert expected == fractions([float(value) for value in expected])
            np.testing.assert_array_equal(run.round(records), np.float32([float(value) for value in expected]))
            before = running


def test_a_trees_records_are_clipped_as_any():
    record = np.random.default_rng(3).normal(size=300)
    run = Run(TreeSumQuery(300, 0.1, 0.0, SEED, 2), 300)
    assert exact_norm(run.round([record])) <= float(np.float32(0.1))
    assert not run.round([[math.nan] * 300]).any()


def test_adaptive_noise_repeats_for_the_same_seeds():
    first, second = (Run(adaptive(2.0, 1.0), 5) for _ in range(2))
    for _ in range(4):
        np.testing.assert_array_equal(first.round([[1.0] * 5]), second.round([[1.0] * 5]))


# The shorter ones are computed by TensorFlow's operations, the longer ones by a loop that XLA compiles.
@pytest.mark.parametrize("size", [10, 5000])
def test_several_records_are_clipped_and_rounded_each_by_itself(size):
    draws = np.random.default_rng(0).normal(size=(6, size)).astype(np.float32)
    lengths = np.linalg.norm(draws.astype(np.float64), axis=1)
    # Clipped, left as it is, without any length, and with values that are not finite.
    records = (
        draws * np.array([0.3, 3.0, 0.99, 0.0, 1.0, 1.0], np.float32)[:, np.newaxis] / np.float32(lengths)[:, None]
    )
    records[4, 1], records[5, 2] = math.nan, math.inf
    clip_norm, step = tf.constant(1.0), tf.constant(2.0**-20, tf.float64)
    stacked = tf.function(records_in_steps, autograph=False).get_concrete_function(
        clip_norm, step, tf.TensorSpec([None, size])
    )
    in_steps, norms = stacked(clip_norm, step, tf.constant(records))
    for record, found, norm in zip(records, in_steps.numpy(), norms.numpy(), strict=True):
        expected, expected_norm = record_in_steps(clip_norm, step, tf.constant(record))
        np.testing.assert_allclose(norm, expected_norm, rtol=2.0**-22)
        # A last digit of a factor moves few values to another step.
        assert np.abs(found - expected).max() <= 1
        assert np.count_nonzero(found - expected) <= 2
        assert sum(int(value) ** 2 for value in found) <= 2**40
    np.testing.assert_array_equal(in_steps[0], np.trunc(records[0].astype(np.float64) * 2**20))
    assert not in_steps[3:].numpy().any()
    assert norms[4:].numpy().tolist() == [math.inf] * 2


@pytest.mark.parametrize("size", [10, 5000])
@pytest.mark.parametrize("num_records", [1, 4, 6])
def test_the_sum_of_several_records_is_exact(size, num_records):
    records = np.random.default_rng(num_records).normal(size=(num_records, size)).astype(np.float32)
    records[-1, 1] = math.nan if num_records == 6 else 0.5
    clip_norm, step = tf.constant(30.0), tf.constant(2.0**-20, tf.float64)
    in_steps, norms = records_in_steps(clip_norm, step, tf.constant(records))
    summed = tf.function(sum_in_steps, autograph=False).get_concrete_function(
        clip_norm, step, tf.TensorSpec([None, size])
    )
    total, sum_of_norms = summed(clip_norm, step, tf.constant(records))
    np.testing.assert_array_equal(total, in_steps.numpy().sum(axis=0))
    np.testing.assert_allclose(sum_of_norms, norms.numpy().sum(), rtol=1e-6)


@pytest.mark.parametrize("size", [10, 5000])
def test_several_records_of_an_infinite_clip_norm_stay_as_they_are(size):
    records = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    step = grid_step(tf.constant(math.inf), tf.constant(0.0))
    in_steps, _ = records_in_steps(tf.constant(math.inf), step, tf.constant(records))
    np.testing.assert_array_equal(np.float32(in_steps * step), records)
