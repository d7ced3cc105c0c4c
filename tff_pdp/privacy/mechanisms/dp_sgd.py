"""Builds example-level DP-SGD as a gradient estimator.

Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradientEstimator
from tff_pdp.generators import chacha20, philox
from tff_pdp.models.base import Model, Weights, at_least_one_row
from tff_pdp.models.dropout import RowDraws
from tff_pdp.privacy.facts import Generator
from tff_pdp.privacy.mechanisms.grid_noise import clip_norm_on_grid, grid_step, noise_in_steps, whole_steps
from tff_pdp.privacy.mechanisms.parameters import Sampler, SiloMechanism
from tff_pdp.privacy.mechanisms.per_example import ROWS_OF_A_BLOCK, clipped_sum, num_blocks
from tff_pdp.privacy.mechanisms.random_bits import (
    are_compiled,
    bits_for_gaussians,
    draw_bits_of_all,
    draw_gaussians,
    gaussians,
)
from tff_pdp.privacy.mechanisms.sampling import Batches, paper_shuffled_batches, poisson_batches

# Share of the clip norm that covers what float64 loses when the clip norm is shortened.
_MARGIN = 2.0**-40
# Up to this number of parameters the noise of all steps is drawn at once, which saves an operation per client and step;
# beyond, step by step, which saves memory.
_SMALL_MODEL = 4096
# 32-bit words of the key of a step's dropout masks.
_WORDS_OF_A_KEY = 4


class _Scales(NamedTuple):
    """Has the scalars by which a client's mechanism clips and noises its sums in a round: float64, all of them public.

    Attributes:
      clip_norm: bound on what one example adds to the unrounded sum, shorter than the mechanism's clip norm.
      stddev: standard deviation of the noise.
      step: step of the grid.
      most_examples: largest number of examples in a batch (`most_examples`).
    """

    clip_norm: tf.Tensor
    stddev: tf.Tensor
    step: tf.Tensor
    most_examples: tf.Tensor


class DpSgdDraws(NamedTuple):
    """Random draws of one client in one round, and numbers that all steps share.

    Attributes:
      batches: batches of every step; the capacity is a whole number of blocks (`per_example.ROWS_OF_A_BLOCK`).
      scales: numbers that follow from the mechanism alone.
      noise: for a small model, standard Gaussians, float64 `[steps, parameters]`; for a large model, the seed of the
        Gaussians, int64 `[2]`.
      keys: for a model with dropout, the key of each step's masks, int64 `[steps, 2]`; else an empty tuple.
    """

    batches: Batches
    scales: _Scales
    noise: tf.Tensor
    keys: tf.Tensor | tuple[()] = ()


def build_dp_sgd(model: Model, sampler: Sampler = "poisson", generator: Generator = "philox") -> GradientEstimator:
    """Builds the gradient estimator of DP-SGD with clip norm C and noise multiplier z.

    A gradient is `scale * (sum over a Poisson batch of clip(grad_i, C) + N(0, (z C)^2 I)) / expected batch size`.

    Guarantee: each gradient is a function of the result of one Poisson-subsampled Gaussian mechanism over all weights
      jointly. The mechanism's noise multiplier is z under add/remove of one example. Sum and noise are rounded to a
      public grid (module `grid_noise`), and `accounting.grid_distance` charges for the distance from ideal noise. The
      clip norm is reduced by as much as rounding may add. For the grid this is a fraction of at most
      `sqrt(parameters) max(1, z) 2**-18` of the clip norm, for the sum a fraction of `2 sum_error(most_examples)`
      (below a millionth for hundreds of examples).
    Assumes: `expected_batch_size` is public (it is never computed from the data here); a client's seed is secret and
      new in each round; each step's gradient is computed once; the generator's bits are indistinguishable from random
      bits; as in `per_example`, no bit of a model's results for an example depends on other rows of a batch or on their
      number; batches have at most `most_examples` examples (`accounting.grid_distance` charges for more).

    A model with dropout draws a mask for each example from the step's key, which has no other use, and from the
    example's place in the client's data. So masks are independent of the data and of each other. With an example added,
    the places of later examples move. Their masks, as a whole, have the same distribution before and after, and the
    guarantee holds for every fixed choice of masks, so it holds for random masks.

    The estimator's `mechanism` has the fields of `SiloMechanism`. With the sampler `paper_shuffled`, batches come from
    `sampling.paper_shuffled_batches`, and nothing is guaranteed.
    """
    num_parameters = model.num_parameters()
    is_small = num_parameters <= _SMALL_MODEL
    num_noise_words = bits_for_gaussians(num_parameters) if is_small else 0
    num_key_words = 0 if model.training_predict is None else _WORDS_OF_A_KEY
    row_words = chacha20.row_words if generator == "chacha20" else philox.row_words

    def draw(
        mechanism: Any, num_examples: tf.Tensor, max_examples: tf.Tensor, num_steps: tf.Tensor, seeds: tf.Tensor
    ) -> DpSgdDraws:
        shape = [tf.shape(seeds)[0], tf.reduce_max(num_steps), max_examples + num_noise_words + num_key_words]
        bits = tf.reshape(draw_bits_of_all(seeds, shape[1] * shape[2], generator), shape)
        # Not by `split`, which has no kernel for uint32 on a GPU.
        for_batches, others = bits[:, :, :max_examples], bits[:, :, max_examples:]
        others.set_shape([None, None, num_noise_words + num_key_words])
        for_noise, for_keys = others[:, :, :num_noise_words], others[:, :, num_noise_words:]
        if sampler == "poisson":
            batches = poisson_batches(for_batches, num_examples, mechanism["sampling_rate"], num_steps)
        else:
            batch_sizes = tf.maximum(tf.cast(tf.round(mechanism["expected_batch_size"]), tf.int32), 1)
            batches = paper_shuffled_batches(for_batches, num_examples, batch_sizes, num_steps)
        # Up to whole blocks, at least one: to add numbers of examples once is cheaper than to add examples in every
        # step.
        capacity = tf.shape(batches.indices)[2]
        missing = ROWS_OF_A_BLOCK * num_blocks(capacity) - capacity
        paddings: Any = [[0, 0], [0, 0], [0, missing]]
        batches = batches._replace(indices=tf.pad(batches.indices, paddings))
        scales = _Scales(*(tf.broadcast_to(scale, shape[:1]) for scale in scales_of(mechanism)))
        noise = gaussians(for_noise, num_parameters) if is_small else seeds
        if not num_key_words:
            return DpSgdDraws(batches, scales, noise)
        return DpSgdDraws(batches, scales, noise, tf.bitcast(tf.reshape(for_keys, [*shape[:2], 2, 2]), tf.int64))

    def scales_of(mechanism: Any) -> _Scales:
        # z = 0 means no noise, also where C is infinite and z * C would be NaN. A float64 holds the product of two
        # float32 numbers in full.
        clip_norm = tf.cast(mechanism["clip_norm"], tf.float64)
        stddev = tf.math.multiply_no_nan(clip_norm, tf.cast(mechanism["noise_multiplier"], tf.float64))
        step = grid_step(clip_norm, stddev)
        return _Scales(
            clip_norm_on_grid(clip_norm, step, num_parameters, _MARGIN),
            stddev,
            step,
            tf.cast(most_examples(mechanism["expected_batch_size"]), tf.float64),
        )

    def gradient(
        mechanism: Any,
        draws: DpSgdDraws,
        weights: Weights,
        data: ClientData,
        index: tf.Tensor,
        scale: tf.Tensor,
        pull: Weights | None = None,
        trainable: Sequence[str] | None = None,
    ) -> Weights:
        indices, size = draws.batches.indices[index], draws.batches.sizes[index]
        stddev, step = draws.scales.stddev, draws.scales.step
        total = clipped_sum(
            model,
            weights,
            # Places of a block that are not in a batch are filled with row 0.
            tf.gather(at_least_one_row(data.x), indices),
            tf.gather(at_least_one_row(data.y), indices),
            clip_norm=draws.scales.clip_norm,
            included=tf.cast(tf.range(tf.shape(indices)[0]) < size, tf.float32),
            pull=pull,
            most_examples=draws.scales.most_examples,
            is_in_blocks=True,
            draws=RowDraws(draws.keys[index], tf.cast(indices, tf.int64), row_words) if num_key_words else None,
        )
        # Place 0 has been used for the batches.
        noise = draws.noise[index] if is_small else draw_gaussians(draws.noise, num_parameters, index + 1, generator)
        factor = step * tf.cast(scale / mechanism["expected_batch_size"], tf.float64)
        noised = (_compiled_release if are_compiled(num_parameters) else _release)(total, noise, stddev, step, factor)
        # All weights were clipped and noised; weights that are not asked for are not used.
        return collections.OrderedDict((name, noised[name]) for name in trainable or noised)

    return GradientEstimator(
        mechanism=tuple(field.name for field in dataclasses.fields(SiloMechanism)), draw=draw, gradient=gradient
    )


def most_examples(expected_batch_size: Any) -> Any:
    """Bounds the size of a Poisson batch of expected size b; larger batches have probability at most exp(-80).

    By Bernstein's inequality, the probability of at least b + t examples is at most `exp(-t^2 / (2 (b + t / 3)))`.

    Args:
      expected_batch_size: b, positive; a number, or a float scalar.
    """
    return expected_batch_size + 13.0 * expected_batch_size**0.5 + 60.0


def _release(total: Weights, gaussians: tf.Tensor, stddev: tf.Tensor, step: tf.Tensor, factor: tf.Tensor) -> Weights:
    """Rounds a sum and its noise, which is flat, to whole steps, adds them up, and multiplies: float32."""
    parts = tf.split(noise_in_steps(gaussians, stddev, step), [math.prod(value.shape) for value in total.values()])
    return collections.OrderedDict(
        (name, tf.cast((whole_steps(value, step) + tf.reshape(part, value.shape)) * factor, tf.float32))
        for (name, value), part in zip(total.items(), parts, strict=True)
    )


_compiled_release = tf.function(_release, jit_compile=True, autograph=False)
