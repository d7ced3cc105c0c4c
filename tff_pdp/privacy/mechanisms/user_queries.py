"""Adds up users' updates at a server: tensorflow-privacy's queries, with noise drawn from a secret seed.

In the library itself, Gaussian draws come from TensorFlow's global generator, and the seeds of trees from the clock.
Runs then cannot be repeated, and a seed that is a time can be guessed. Here every draw is a function of a seed in the
query's state. The draws come from `tff_pdp.privacy.mechanisms.random_bits`, whose Gaussians also have longer tails.

A record is one flat tensor, float32 `[values]`: all that one user releases in a round. The state of a query holds every
number that decides privacy, so one compiled computation serves any clip norm and noise.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
import tensorflow as tf
import tensorflow_privacy

from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms.grid_noise import grid_step, noise_in_steps, whole_steps_within
from tff_pdp.privacy.mechanisms.parameters import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM, UserMechanism
from tff_pdp.privacy.mechanisms.random_bits import are_compiled, check_pairs, draw_gaussians
from tff_pdp.privacy.mechanisms.user_noise import FixedClip, TreeNoise, UserNoise, rounds_per_epoch

# Above what float64 may add to a record's norm when the record is scaled, and above what float32 takes from a noise
# multiplier.
_ROUNDING = 2.0**-20
# Records that are added up at a time, and pieces of a record whose squares are added up first.
_BLOCK, _PIECES = 4, 32


# From a clip norm, the grid's step and a record to the record in whole steps and its norm; see `record_in_steps`.
RecordInSteps = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


def clip_record(record: tf.Tensor, clip_norm: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Scales a record down to the clip norm if it is longer.

    Guarantee: the result's L2 norm is at most `clip_norm`, rounding included. A record with a value that is not finite
      becomes zero, unless the clip norm is infinite.

    Args:
      record: float32 `[values]`, or `[records, values]` for several records, each of which is clipped by itself.
      clip_norm: scalar, positive or zero; infinite leaves every record as it is.

    Returns:
      The clipped record, float64, and its norm before the clip: float32 scalar, or `[records]`, infinite if a value was
      not finite.
    """
    # Squares of float32 values fit into float64.
    exact = tf.cast(record, tf.float64)
    norm = tf.sqrt(tf.reduce_sum(tf.square(exact), axis=-1))
    # Zero times a value that is not finite is zero here.
    return tf.math.multiply_no_nan(exact, tf.expand_dims(_clip_factor(norm, clip_norm), -1)), _reported(norm)


def record_in_steps(clip_norm: tf.Tensor, step: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Clips a record, and rounds the result toward zero to whole steps of the grid, so that it becomes no longer.

    Args:
      clip_norm: float32 scalar.
      step: step of the grid, float64 scalar.
      record: float32 `[values]`, or `[records, values]`.

    Returns:
      The record in steps, float64 of the shape of `record`, and the norms that `clip_record` returns.
    """
    clipped, norm = clip_record(record, clip_norm)
    return whole_steps_within(clipped, step), norm


def records_in_steps(clip_norm: tf.Tensor, step: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes `record_in_steps` of several records, `[records, values]`: a half of the time for long records.

    A record fits into a processor's cache, while several do not. So records are computed one after the other, and XLA
    makes loops of the operations. Norms are added up in another order than in `record_in_steps`, so that a factor may
    differ in its last digit.
    """
    if not _are_long(records):
        return record_in_steps(clip_norm, step, records)

    def one(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        in_steps, norms = _compiled_steps(record[tf.newaxis], clip_norm, step)
        return in_steps[0], norms[0]

    signature = tf.TensorSpec([records.shape[1]], tf.float64), tf.TensorSpec([], tf.float32)
    return tf.map_fn(one, records, fn_output_signature=signature, parallel_iterations=4)


def sum_in_steps(clip_norm: tf.Tensor, step: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds up the results of `records_in_steps`, for long records in a quarter of the time: no record is written.

    Whole steps add up without rounding, so that the sum of the records has the same bits.

    Args:
      clip_norm: float32 scalar.
      step: step of the grid, float64 scalar.
      records: float32 `[records, values]`.

    Returns:
      The sum of the records in steps, float64 `[values]`, and the sum of the norms, float32 scalar.
    """
    if not _are_long(records):
        in_steps, norms = record_in_steps(clip_norm, step, records)
        return tf.reduce_sum(in_steps, axis=0), tf.reduce_sum(norms)
    num_records: Any = tf.shape(records)[0]

    def add_block(first: tf.Tensor, total: tf.Tensor, norms: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        places = first + tf.range(_BLOCK)
        # Places beyond the last record are filled with the last record, and count for nothing.
        rows = tf.gather(records, tf.minimum(places, num_records - 1))
        added, added_norms = _compiled_sum(total, rows, places < num_records, clip_norm, step)
        return first + _BLOCK, added, norms + added_norms

    start = tf.constant(0), tf.zeros([records.shape[1]], tf.float64), tf.constant(0.0)
    _, total, norms = tf.while_loop(lambda first, *_: first < num_records, add_block, start, parallel_iterations=1)
    return total, norms


def _are_long(records: tf.Tensor) -> bool:
    size: Any = records.shape[1]
    if size is None or not are_compiled(size):
        return False
    # XLA must round as IEEE 754 demands.
    check_pairs(True)
    return True


@tf.function(jit_compile=True, autograph=False)
def _compiled_steps(records: tf.Tensor, clip_norm: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    norms = _norms(records)
    return _scaled_to_steps(records, _clip_factor(norms, clip_norm)[:, tf.newaxis], step), _reported(norms)


@tf.function(jit_compile=True, autograph=False)
def _compiled_sum(
    total: tf.Tensor, records: tf.Tensor, are_counted: tf.Tensor, clip_norm: tf.Tensor, step: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    norms = _norms(records)
    factors = tf.where(are_counted, _clip_factor(norms, clip_norm), tf.zeros_like(norms))
    # Record by record: XLA's own sum over records is three times as slow.
    for record, factor in zip(tf.unstack(records), tf.unstack(factors), strict=True):
        total += _scaled_to_steps(record, factor, step)
    return total, tf.reduce_sum(tf.where(are_counted, _reported(norms), tf.zeros_like(norms, tf.float32)))


def _norms(records: tf.Tensor) -> tf.Tensor:
    """Returns the norms of records `[records, values]`, float64; XLA makes vector operations of sums over pieces."""
    exact = tf.cast(records, tf.float64)
    width: Any = records.shape[1]
    size = width // _PIECES
    pieces = [exact[:, number * size : (number + 1) * size] for number in range(_PIECES)]
    squares = functools.reduce(tf.add, map(tf.square, pieces))
    rest = tf.square(exact[:, _PIECES * size :])
    return tf.sqrt(tf.reduce_sum(squares, axis=1) + tf.reduce_sum(rest, axis=1))


def _scaled_to_steps(record: tf.Tensor, factor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    return whole_steps_within(tf.math.multiply_no_nan(tf.cast(record, tf.float64), factor), step)


def _clip_factor(norm: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
    """Returns the factor that clips a record of this norm: float64, zero for a norm that is not finite."""
    clip = tf.cast(clip_norm, tf.float64)
    bound = (1.0 - _ROUNDING) * clip
    factor = tf.where(norm > bound, bound / norm, tf.ones_like(norm))
    return tf.where(tf.math.is_finite(norm) | tf.math.is_inf(clip), factor, tf.zeros_like(factor))


def _reported(norm: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.math.is_finite(norm), tf.cast(norm, tf.float32), math.inf)


class SeededGaussianState(NamedTuple):
    """State of a `SeededGaussianSumQuery`.

    Attributes:
      l2_norm_clip: float32 scalar, L2 bound on a record.
      stddev: float32 scalar, standard deviation of the noise on every value of the sum.
      seed: int64 `[2]`, secret.
      draws: int32 scalar, number of draws of noise from the seed so far.
    """

    l2_norm_clip: Any
    stddev: Any
    seed: Any
    draws: Any


class SumParams(NamedTuple):
    """Parameters for clipping and rounding a record.

    Attributes:
      l2_norm_clip: float32 scalar, L2 bound on a record.
      step: float64 scalar, step of the grid.
    """

    l2_norm_clip: Any
    step: Any


class SeededGaussianSumQuery(tensorflow_privacy.GaussianSumQuery):
    """The sum of clipped records and Gaussian noise, all on one grid.

    Guarantee: the sum is a function of one Gaussian mechanism with noise multiplier `stddev / l2_norm_clip`, under
      adding or removing one record. A record is clipped and rounded to the grid, after which its norm is at most
      `l2_norm_clip`; whole steps add up without rounding, whatever the order, and the noise is a Gaussian rounded to
      the grid.
    Assumes: the seed is secret and new in each run; the generator's bits are indistinguishable from random bits; for
      the noise, as in `grid_noise`. A sum has fewer than 2**53 steps, which is enough for some billions of users.
    """

    def __init__(
        self,
        l2_norm_clip: Any,
        stddev: Any,
        seed: Any,
        generator: Generator = "philox",
        in_steps: RecordInSteps = record_in_steps,
    ):
        """Makes a query from the values of its first state, the noise's generator and a form of `record_in_steps`."""
        super().__init__(l2_norm_clip, stddev)
        self._seed = seed
        self._generator: Generator = generator
        self._in_steps = in_steps

    def initial_global_state(self) -> SeededGaussianState:
        """Returns the state before the first sum."""
        return SeededGaussianState(
            tf.cast(self._l2_norm_clip, tf.float32),
            tf.cast(self._stddev, tf.float32),
            tf.cast(self._seed, tf.int64),
            tf.constant(0),
        )

    def derive_sample_params(self, global_state: Any) -> SumParams:
        """Returns the clip norm and the step of the grid."""
        return SumParams(global_state.l2_norm_clip, grid_step(global_state.l2_norm_clip, global_state.stddev))

    def initial_sample_state(self, template: Any = None) -> tf.Tensor:
        """Returns a sum of no records: float64 zeros."""
        return tf.zeros(template.shape, tf.float64)

    def preprocess_record_impl(self, params: SumParams, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the record, clipped and rounded toward zero to whole steps, float64, and its norm before the clip."""
        return self._in_steps(params.l2_norm_clip, params.step, record)

    def get_noised_result(self, sample_state: tf.Tensor, global_state: SeededGaussianState) -> tuple[Any, Any, Any]:
        """Returns the noised sum, float32, the state after it, and the event of the release."""
        event = dp_accounting.GaussianDpEvent(global_state.stddev / global_state.l2_norm_clip)
        step = self.derive_sample_params(global_state).step
        noise = self.noise(global_state, global_state.draws, sample_state.shape)
        noised = tf.cast((sample_state + noise) * step, tf.float32)
        return noised, global_state._replace(draws=global_state.draws + 1), event

    def noise(self, global_state: Any, place: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
        """Draws noise in whole steps, float64, from stream `place` of the seed; zeros if the noise is zero."""
        size = max(shape.num_elements() or 1, 1)
        draws = draw_gaussians(global_state.seed, size, place, self._generator)
        step = self.derive_sample_params(global_state).step
        return tf.reshape(noise_in_steps(draws, global_state.stddev, step), shape)


class SeededQuantileEstimatorQuery(tensorflow_privacy.QuantileEstimatorQuery):
    """tensorflow-privacy's query for a quantile of norms, with seeded noise on the count of norms below an estimate."""

    def __init__(self, *arguments: Any, seed: Any, generator: Generator = "philox", **named: Any):
        """Makes a query from tensorflow-privacy's arguments, the first state's seed, and the noise's generator."""
        self._seed = seed
        self._generator: Generator = generator
        super().__init__(*arguments, **named)

    def _construct_below_estimate_query(self, below_estimate_stddev, expected_num_records):
        # Counts are shifted by one half, which is then the most that one record can change.
        return tensorflow_privacy.NormalizedQuery(
            _SeededCountQuery(0.5, below_estimate_stddev, self._seed, self._generator), denominator=expected_num_records
        )


class _SeededCountQuery(SeededGaussianSumQuery):
    """A sum of scalars that are within the clip norm by themselves."""

    def initial_sample_state(self, template: Any = None) -> tf.Tensor:
        return tf.zeros([], tf.float64)

    def preprocess_record_impl(self, params: SumParams, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Whole steps, for a half is a power of two.
        return whole_steps_within(tf.cast(record, tf.float64), params.step), tf.abs(record)


class SeededAdaptiveClipSumQuery(tensorflow_privacy.QuantileAdaptiveClipSumQuery):
    """The sum of clipped records and noise, with a clip norm that follows a quantile of the records' norms.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.

    Guarantee: let s be the standard deviation of the noise on the count of norms below the clip norm. Sum and count
      together are the result of one Gaussian mechanism with noise multiplier z, where
      `z^-2 = noise_multiplier^-2 + (2 s)^-2`.
    Assumes: as in `SeededGaussianSumQuery`.
    """

    def __init__(
        self,
        initial_l2_norm_clip: float,
        noise_multiplier: float,
        target_unclipped_quantile: float,
        learning_rate: float,
        clipped_count_stddev: float,
        expected_num_records: float,
        seeds: tuple[Any, Any],
        generator: Generator = "philox",
    ):
        """Makes a query from tensorflow-privacy's arguments, seeds for sum and count, and the noise's generator."""
        of_quantile = target_unclipped_quantile, learning_rate, clipped_count_stddev, expected_num_records
        super().__init__(initial_l2_norm_clip, noise_multiplier, *of_quantile)
        self._quantile_estimator_query = SeededQuantileEstimatorQuery(
            initial_l2_norm_clip, *of_quantile, True, seed=seeds[1], generator=generator
        )
        self._sum_query = SeededGaussianSumQuery(
            initial_l2_norm_clip, noise_multiplier * initial_l2_norm_clip, seeds[0], generator
        )

    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple[Any, Any, Any]:
        """Returns the noised sum, the state with the next clip norm, and the event of the release."""
        result, state, event = super().get_noised_result(sample_state, global_state)
        # Many steps in one direction would leave the range of float32, and so lead to sums without noise.
        clip_norm = tf.clip_by_value(state.sum_state.l2_norm_clip, SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM)
        # The library makes the sum's state anew, from clip norm and noise alone.
        sum_state = global_state.sum_state
        renewed = sum_state._replace(
            l2_norm_clip=clip_norm, stddev=clip_norm * state.noise_multiplier, draws=sum_state.draws + 1
        )
        quantile_state = state.quantile_estimator_state._replace(current_estimate=clip_norm)
        return result, state._replace(sum_state=renewed, quantile_estimator_state=quantile_state), event


class TreeState(NamedTuple):
    """State of a `TreeSumQuery`.

    The fields of `SeededGaussianState` describe the noise on the tree's nodes. The tree has three more fields.

    Attributes:
      rounds: int32 scalar, number of completed rounds of the present tree.
      left: noise of the last complete left subtree of each height; float64 `[levels, values]`, in steps of the grid.
      before: noise in the running sum up to the last release; float64 `[values]`, in steps of the grid.
    """

    l2_norm_clip: Any
    stddev: Any
    seed: Any
    draws: Any
    rounds: Any
    left: Any
    before: Any


class TreeSumQuery(SeededGaussianSumQuery):
    """Sums of clipped records, whose running sum has the noise of a binary tree's nodes: tree aggregation.

    A complete subtree's sum is estimated twice: by its own node, and by its two halves. The two estimates are averaged.
    Their weights (`_OWN_WEIGHTS`) are near the best weights, but have few bits, so that all combinations of nodes are
    exact.

    Source: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling", ICML 2021; Honaker,
    "Efficient Use of Differentially Private Binary Trees", 2015, whose weights are 2/3, 4/7, 8/15, ...

    Guarantee: the sums of one tree's rounds are a function of one single-epoch tree aggregation with noise multiplier
      `stddev / l2_norm_clip`, under replacement of one record by zeros. Sums of nodes are whole steps, noise of nodes
      is rounded to the same grid, and the release combines both without rounding.
    Assumes: no user has more than one record in the rounds of a tree; otherwise as in `SeededGaussianSumQuery`.
    """

    def __init__(
        self,
        num_values: int,
        l2_norm_clip: Any,
        stddev: Any,
        seed: Any,
        rounds_per_tree: int,
        generator: Generator = "philox",
        in_steps: RecordInSteps = record_in_steps,
    ):
        """Makes a query for records of `num_values` values; a tree starts anew after `rounds_per_tree` rounds."""
        super().__init__(l2_norm_clip, stddev, seed, generator, in_steps)
        self._num_values, self._rounds_per_tree = num_values, rounds_per_tree

    def initial_global_state(self) -> TreeState:
        """Returns the state before the first sum."""
        return TreeState(
            *super().initial_global_state(),
            rounds=tf.constant(0),
            left=tf.zeros([self._rounds_per_tree.bit_length(), self._num_values], tf.float64),
            before=tf.zeros([self._num_values], tf.float64),
        )

    def get_noised_result(self, sample_state: tf.Tensor, global_state: TreeState) -> tuple[Any, Any, Any]:
        """Returns the noised float32 sum, the next state and an unsupported event, as plans charge whole trees."""
        state, step = global_state, self.derive_sample_params(global_state).step

        def node(draws: tf.Tensor) -> tf.Tensor:
            return self.noise(state, draws, sample_state.shape)

        # A subtree that is complete with this round ends another one of the same height on its left, and so on.
        def is_joined(level: tf.Tensor, *_: Any) -> tf.Tensor:
            return tf.bitwise.bitwise_and(tf.bitwise.right_shift(state.rounds, level), 1) > 0

        def join(level: tf.Tensor, draws: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            weight = tf.gather(tf.constant(_OWN_WEIGHTS, tf.float64), tf.minimum(level, len(_OWN_WEIGHTS) - 1))
            return level + 1, draws + 1, weight * node(draws) + (1.0 - weight) * (state.left[level] + noise)

        first = tf.constant(0), state.draws + 1, node(state.draws)
        level, draws, noise = tf.while_loop(is_joined, join, first)
        left = tf.tensor_scatter_nd_update(state.left, [[level]], [noise])
        levels, rounds = tf.range(tf.shape(left)[0]), state.rounds + 1
        is_part = tf.cast(tf.bitwise.bitwise_and(tf.bitwise.right_shift(rounds, levels), 1), tf.float64)
        running = tf.reduce_sum(left * is_part[:, tf.newaxis], axis=0)
        # In the graphs that TFF traces, `==` compares objects.
        is_last = tf.equal(rounds, self._rounds_per_tree)
        # Exact before the last addition, because noise has few digits; that addition may round, as the release does.
        result = tf.cast((sample_state + (running - state.before)) * step, tf.float32)
        after = state._replace(
            draws=draws,
            rounds=tf.where(is_last, 0, rounds),
            left=tf.where(is_last, tf.zeros_like(left), left),
            before=tf.where(is_last, tf.zeros_like(running), running),
        )
        return result, after, dp_accounting.UnsupportedDpEvent()


# By height of the subtree from one round up; the last for all higher subtrees. If children have variance v, the best
# weight is 2 v / (1 + 2 v); with these weights, variances are 0.672, 0.574, 0.537, ..., with the best 0.667, 0.571,
# 0.533, ...
_OWN_WEIGHTS = (0.625, 0.5625, 0.5)


def build_query(
    noise: UserNoise,
    num_values: int,
    mechanism: UserMechanism,
    seeds: Any,
    generator: Generator = "philox",
    in_steps: RecordInSteps = record_in_steps,
) -> tensorflow_privacy.DPQuery:
    """Builds a mechanism's query for records of `num_values` values; the secret `seeds` are int64 `[2, 2]`.

    A form of `record_in_steps` may be passed, which returns the same; queries with an adaptive clip do not use it.

    Raises:
      BudgetError: as in `AdaptiveClip.sum_noise_multiplier`.
    """
    # Not infinity times zero.
    stddev = mechanism.noise_multiplier * mechanism.clip_norm if mechanism.noise_multiplier else 0.0
    match noise:
        case FixedClip():
            return SeededGaussianSumQuery(mechanism.clip_norm, stddev, seeds[0], generator, in_steps)
        case TreeNoise():
            rounds = rounds_per_epoch(mechanism.sampling_rate)
            return TreeSumQuery(num_values, mechanism.clip_norm, stddev, seeds[0], rounds, generator, in_steps)
    return SeededAdaptiveClipSumQuery(
        mechanism.clip_norm,
        noise.sum_noise_multiplier(mechanism),
        noise.quantile,
        noise.learning_rate,
        noise.count_stddev * mechanism.expected_cohort if mechanism.noise_multiplier else 0.0,
        mechanism.expected_cohort,
        (seeds[0], seeds[1]),
        generator,
    )
