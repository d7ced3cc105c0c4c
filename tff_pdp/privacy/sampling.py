"""Sampling schemes, each tied to the accounting event that describes it (see `tff_pdp.privacy.plan`)."""

import tensorflow as tf


def poisson_mask(seed: tf.Tensor, num_examples: tf.Tensor, sampling_rate: tf.Tensor) -> tf.Tensor:
    """Draws a Poisson sample: each example is in it with probability `sampling_rate`, independently of the others.

    Guarantee: this is the sampler `dp_accounting.PoissonSampledDpEvent` describes; the size of the sample is random,
      may be zero, and is never truncated. The rate is honoured to float32's 2**-23.
    Assumes: `seed` is secret, and used for nothing else.

    Args:
      seed: int64 `[2]`.
      num_examples: int32 scalar.
      sampling_rate: float32 scalar in `[0, 1]`.

    Returns:
      bool `[num_examples]`.
    """
    return tf.random.stateless_uniform(tf.reshape(num_examples, [1]), seed) < sampling_rate
