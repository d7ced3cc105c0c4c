"""Adds up users' updates at a server: tensorflow-privacy's queries, with noise that follows from a secret seed.

The library's own Gaussian draws come from TensorFlow's global generator, and the seeds of its trees from the clock: a
run could not be repeated, and a seed that is a time can be guessed. Here every draw is a function of a seed in the
query's state, made by the generator of `tff_pdp.privacy.mechanisms.random_bits`, whose tails are longer, too.

A record is one flat tensor, float32 `[values]`: all that one user releases in a round. The state of a query holds every
number that decides privacy, so one compiled computation serves any clip norm and noise.
"""

import math
from typing import Any, NamedTuple

import dp_accounting
import tensorflow as tf
import tensorflow_privacy
from tensorflow_privacy.privacy.dp_query import restart_query, tree_aggregation

from tff_pdp.privacy.mechanisms.random_bits import bits_for_gaussians, draw_bits, gaussians

# Clip norms that float32 represents in full, and noise and squares of such lengths as well.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 1e-20, 1e20
# More than what float32 may add to a record's norm when the record is scaled.
_ROUNDING_MARGIN = 1.0 - 2.0**-20


def clip_record(record: tf.Tensor, clip_norm: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Scales a record down to the clip norm where it is longer.

    Guarantee: the result's L2 norm is at most `clip_norm`, rounding included. A record with a value that is not finite
      becomes zero, unless the clip norm is infinite.

    Args:
      record: float32 `[values]`.
      clip_norm: float32 scalar, positive; infinite leaves every record as it is.

    Returns:
      The clipped record, and the norm it had: float32 scalar, infinite where a value was not finite.
    """
    # Squares of float32 values fit into float64.
    exact = tf.cast(record, tf.float64)
    norm = tf.sqrt(tf.reduce_sum(tf.square(exact)))
    is_finite = tf.math.is_finite(norm)
    bound = _ROUNDING_MARGIN * tf.cast(clip_norm, tf.float64)
    factor = tf.where(norm > bound, bound / norm, 1.0)
    # Of the longest records the factor is no number that float32 has to full precision.
    scaled = tf.where(is_finite, tf.cast(exact * factor, tf.float32), 0.0)
    clipped = tf.where(tf.math.is_inf(clip_norm), record, scaled)
    return clipped, tf.where(is_finite, tf.cast(norm, tf.float32), math.inf)


class SeededGaussianState(NamedTuple):
    """State of a `SeededGaussianSumQuery`.

    Attributes:
      l2_norm_clip: float32 scalar.
      stddev: float32 scalar, of the noise on every value of the sum.
      seed: int64 `[2]`, secret.
      draws: int32 scalar, how often noise has been drawn from the seed.
    """

    l2_norm_clip: Any
    stddev: Any
    seed: Any
    draws: Any


class SeededGaussianSumQuery(tensorflow_privacy.GaussianSumQuery):
    """The sum of clipped records and Gaussian noise.

    Guarantee: one Gaussian mechanism of noise multiplier `stddev / l2_norm_clip` under adding or removing one record.
    Assumes: the seed is secret and new in each run; the generator (Philox, float32) stands in for real Gaussian noise.
    """

    def __init__(self, l2_norm_clip: Any, stddev: Any, seed: Any):
        """Makes a query; the arguments are those of its first state."""
        super().__init__(l2_norm_clip, stddev)
        self._seed = seed

    def initial_global_state(self) -> SeededGaussianState:
        """The state before the first sum."""
        return SeededGaussianState(
            tf.cast(self._l2_norm_clip, tf.float32),
            tf.cast(self._stddev, tf.float32),
            tf.cast(self._seed, tf.int64),
            tf.constant(0),
        )

    def preprocess_record_impl(self, params: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Clips a record, by the clip norm; returns it and the norm it had."""
        return clip_record(record, params)

    def get_noised_result(self, sample_state: tf.Tensor, global_state: SeededGaussianState) -> tuple[Any, Any, Any]:
        """The noised sum, the state after it, and the event of the release."""
        event = dp_accounting.GaussianDpEvent(global_state.stddev / global_state.l2_norm_clip)
        noise = seeded_noise(global_state.seed, global_state.draws, sample_state.shape, global_state.stddev)
        return sample_state + noise, global_state._replace(draws=global_state.draws + 1), event


def seeded_noise(seed: tf.Tensor, place: tf.Tensor, shape: tf.TensorShape, stddev: tf.Tensor) -> tf.Tensor:
    """Gaussians of one place of a seed; zeros, whatever the seed, where the standard deviation is zero."""
    size = max(shape.num_elements() or 1, 1)
    noise = gaussians(draw_bits(seed, bits_for_gaussians(size), place), size, stddev)
    return tf.reshape(noise, shape)


class SeededQuantileEstimatorQuery(tensorflow_privacy.QuantileEstimatorQuery):
    """The library's estimate of a quantile of norms, with seeded noise on the count below it."""

    def __init__(self, *arguments: Any, seed: Any, **named: Any):
        """Makes a query; arguments as the library's, and the seed of its first state."""
        self._seed = seed
        super().__init__(*arguments, **named)

    def _construct_below_estimate_query(self, below_estimate_stddev, expected_num_records):
        # Counts are shifted by one half, which is then the most that one record can change.
        return tensorflow_privacy.NormalizedQuery(
            _SeededCountQuery(0.5, below_estimate_stddev, self._seed), denominator=expected_num_records
        )


class _SeededCountQuery(SeededGaussianSumQuery):
    """A sum of scalars that are within the clip norm by themselves."""

    def preprocess_record_impl(self, params: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return record, tf.abs(record)


class SeededAdaptiveClipSumQuery(tensorflow_privacy.QuantileAdaptiveClipSumQuery):
    """The sum of clipped records and noise, with a clip norm that follows a quantile of the records' norms.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.

    Guarantee: one Gaussian mechanism of the noise multiplier z with `z^-2 = noise_multiplier^-2 + (2 s)^-2`, where s is
      the standard deviation of the noise on the count of records below the clip norm.
    Assumes: as `SeededGaussianSumQuery`.
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
    ):
        """Makes a query; arguments as the library's, and seeds for the sum and for the count."""
        super().__init__(
            initial_l2_norm_clip,
            noise_multiplier,
            target_unclipped_quantile,
            learning_rate,
            clipped_count_stddev,
            expected_num_records,
        )
        self._quantile_estimator_query = SeededQuantileEstimatorQuery(
            initial_l2_norm_clip,
            target_unclipped_quantile,
            learning_rate,
            clipped_count_stddev,
            expected_num_records,
            True,
            seed=seeds[1],
        )
        self._sum_query = SeededGaussianSumQuery(
            initial_l2_norm_clip, noise_multiplier * initial_l2_norm_clip, seeds[0]
        )

    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple[Any, Any, Any]:
        """The noised sum, the state with the next clip norm, and the event of the release."""
        result, state, event = super().get_noised_result(sample_state, global_state)
        # In the end, steps of one direction would lead out of float32, and so to sums without noise.
        clip_norm = tf.clip_by_value(state.sum_state.l2_norm_clip, SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM)
        # The library makes the sum's state anew, of clip norm and noise alone.
        sum_state = global_state.sum_state
        renewed = sum_state._replace(
            l2_norm_clip=clip_norm, stddev=clip_norm * state.noise_multiplier, draws=sum_state.draws + 1
        )
        quantile_state = state.quantile_estimator_state._replace(current_estimate=clip_norm)
        return result, state._replace(sum_state=renewed, quantile_estimator_state=quantile_state), event


class SeededNoiseGenerator(tree_aggregation.GaussianNoiseGenerator):
    """Noise of a tree's nodes, from a secret seed; its state is that of the library's generator.

    The first of the state's two `seeds` goes up by one with each draw.
    """

    def next(self, state: Any) -> tuple[tf.Tensor, Any]:
        """Draws the noise of one node, and returns the state after it."""
        spec: Any = self._specs
        shape = spec.shape
        noise = seeded_noise(state.seeds, tf.constant(0), shape, state.stddev)
        return noise, state._replace(seeds=state.seeds + tf.constant([1, 0], tf.int64))


def build_tree_query(
    num_values: int, clip_norm: float, stddev: float, seed: Any, rounds_per_tree: int
) -> tensorflow_privacy.RestartQuery:
    """Builds tree aggregation for DP-FTRL: noise whose running sum is that of a binary tree's nodes.

    Source: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling", ICML 2021, with
    Honaker's more efficient estimates, and a new tree after so many rounds.

    Guarantee: the sums of one tree's rounds are one single-epoch tree aggregation of noise multiplier
      `stddev / clip_norm`, for one record replaced by zero.
    Assumes: no user has more than one record in the rounds of a tree; otherwise as `SeededGaussianSumQuery`.

    Args:
      num_values: of a record.
      clip_norm: of a record.
      stddev: of every node's noise.
      seed: int64 `[2]`, secret.
      rounds_per_tree: after which the tree starts anew.
    """
    # The library says collection, and takes any nest.
    spec: Any = tf.TensorSpec([num_values], tf.float32)
    query = tensorflow_privacy.TreeResidualSumQuery(
        record_specs=spec,
        noise_generator=SeededNoiseGenerator(stddev, spec, seed),
        clip_fn=_clip_only,
        clip_value=clip_norm,
    )
    return tensorflow_privacy.RestartQuery(query, restart_query.PeriodicRoundRestartIndicator(rounds_per_tree))


def _clip_only(records: list[tf.Tensor], clip_norm: tf.Tensor) -> list[tf.Tensor]:
    return [clip_record(record, clip_norm)[0] for record in records]
