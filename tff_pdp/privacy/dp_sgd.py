"""Example-level DP-SGD as a gradient function (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016).

Two passes: the first finds each example's gradient norm, the second one backward pass of the loss weighted by the clip
factors. No per-example gradient is summed by hand, and with clip = infinity and noise = 0 the second pass is, to the
bit, the gradient of the plain loss.
"""

import collections
from typing import Any

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradFn
from tff_pdp.models.base import Model, Weights
from tff_pdp.privacy.sampling import poisson_mask


def build_dp_sgd_grad_fn(
    model: Model,
    *,
    clip_norm: tf.Tensor,
    noise_multiplier: tf.Tensor,
    sampling_rate: tf.Tensor,
    expected_batch_size: tf.Tensor,
    seed: tf.Tensor,
) -> GradFn:
    """Builds `(sum over a Poisson batch of clip(grad_i, C) + N(0, (z C)^2 I)) / expected batch size`.

    Guarantee: each call is one Poisson-subsampled Gaussian mechanism with noise multiplier z under add/remove of one
      example, over all of the model's weights jointly.
    Assumes: `expected_batch_size` is public (it is never computed from the data here); each `(seed, step)` is used
      once; the generator (Philox, float32) stands in for real Gaussian noise.

    Args:
      model: gives the loss of each example.
      clip_norm: float32 scalar C, may be infinite; L2, over all weights jointly.
      noise_multiplier: float32 scalar z, standard deviation over C.
      sampling_rate: float32 scalar q.
      expected_batch_size: float32 scalar, q times the public number of examples.
      seed: int64 `[2]`, secret, fresh for each client and round.
    """

    def grad_fn(weights: Weights, data: ClientData, step: tf.Tensor) -> Weights:
        # The type stubs know only Python integers here.
        step_seed: Any = tf.random.fold_in(seed, tf.cast(step, seed.dtype))  # pyright: ignore[reportArgumentType]
        batch_seed, noise_seed = tf.unstack(tf.random.split(step_seed, 2))
        sampled = poisson_mask(batch_seed, tf.shape(data.y)[0], sampling_rate)
        x, y = tf.boolean_mask(data.x, sampled), tf.boolean_mask(data.y, sampled)
        factors = clip_factors(per_example_norms(model, weights, x, y), clip_norm)
        clipped_sum = _weighted_gradient(model, weights, x, y, factors)
        # z = 0 means no noise, also where C is infinite and z * C would be NaN.
        stddev = tf.math.multiply_no_nan(clip_norm, noise_multiplier)
        noise_seeds = tf.unstack(tf.random.split(noise_seed, len(clipped_sum)))
        return collections.OrderedDict(
            (name, (total + stddev * gaussian(tf.shape(total), tensor_seed)) / expected_batch_size)
            for (name, total), tensor_seed in zip(clipped_sum.items(), noise_seeds, strict=True)
        )

    return grad_fn


def gaussian(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws float32 standard Gaussians.

    TensorFlow's own draws never exceed 5.68 standard deviations, and a bounded noise cannot hide all that an unbounded
    one does. The mean of four, scaled to unit variance, is bounded at 11.3, beyond which lies a probability of 1e-29;
    and it takes more than the low-order bits of one draw to tell what the noise was.

    Args:
      shape: int32 vector.
      seed: int64 `[2]`, used for nothing else.
    """
    draws = tf.random.stateless_normal(tf.concat([[4], shape], axis=0), seed)
    return tf.reduce_sum(draws, axis=0) / 2.0


def clip_factors(norms: tf.Tensor, clip_norm: tf.Tensor) -> tf.Tensor:
    """Returns `min(1, clip_norm / norm)` for each example, exactly 1 where the clip is infinite."""
    return tf.minimum(1.0, clip_norm / tf.maximum(norms, 1e-12))


def per_example_norms(model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the L2 norm over all weights of each example's gradient: float32 `[batch]`."""

    def squared_norm(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        example_x, example_y = example
        gradient = _weighted_gradient(model, weights, example_x[tf.newaxis], example_y[tf.newaxis], tf.ones([1]))
        return tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradient.values()])

    return tf.sqrt(tf.vectorized_map(squared_norm, (x, y)))


def _weighted_gradient(model: Model, weights: Weights, x: tf.Tensor, y: tf.Tensor, factors: tf.Tensor) -> Weights:
    """Gradient of `sum_i factors_i * loss_i`; zero for weights the loss does not reach."""
    # Not an argument of the tape: the factors are data to the second pass, and must not be differentiated.
    factors = tf.stop_gradient(factors)
    with tf.GradientTape() as tape:
        tape.watch(list(weights.values()))
        total = tf.reduce_sum(factors * model.loss(weights, x, y))
    gradients = tape.gradient(total, list(weights.values()), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return collections.OrderedDict(zip(weights, gradients, strict=True))
