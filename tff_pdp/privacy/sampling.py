"""Sampling schemes, each tied to the accounting event that describes it (see `tff_pdp.privacy.plan`)."""

from typing import Any, NamedTuple

import tensorflow as tf

# Bits of a draw that decide; rates are honoured to 2**-RATE_BITS.
RATE_BITS = 23


class Batches(NamedTuple):
    """Which examples each step uses, of one client or, with a leading axis, of several.

    Attributes:
      indices: int32 `[steps, capacity]`, rows of the client's data; zeros beyond a step's size.
      sizes: int32 `[steps]`, at most the capacity.
    """

    indices: tf.Tensor
    sizes: tf.Tensor


def poisson_batches(
    bits: tf.Tensor, num_examples: tf.Tensor, sampling_rates: tf.Tensor, num_steps: tf.Tensor
) -> Batches:
    """Draws Poisson batches: in every step each example takes part with its client's rate, independently of all else.

    Guarantee: this is the sampler `dp_accounting.PoissonSampledDpEvent` describes, up to the generator of the bits. The
      size of a batch is random, may be zero, and is never truncated: the capacity is that of the largest batch drawn
      here. A rate is honoured to 2**-23.
    Assumes: the bits are secret, and used for nothing else.

    Args:
      bits: uint32 `[clients, steps, examples]`, uniform.
      num_examples: int32 `[clients]`; of the last axis of `bits`, only so many stand for examples.
      sampling_rates: float32 `[clients]`, in `[0, 1]`.
      num_steps: int32 `[clients]`; steps beyond a client's own are empty.

    Returns:
      Batches with a leading axis of clients.
    """
    num_clients, steps, examples = tf.unstack(tf.shape(bits))
    limits = tf.cast(sampling_rates * float(2**RATE_BITS), tf.uint32)
    sampled = tf.bitwise.right_shift(bits, tf.constant(32 - RATE_BITS, tf.uint32)) < limits[:, tf.newaxis, tf.newaxis]
    is_example = tf.range(examples) < num_examples[:, tf.newaxis]
    is_step = tf.range(steps) < num_steps[:, tf.newaxis]
    sampled &= is_example[:, tf.newaxis, :] & is_step[:, :, tf.newaxis]
    chosen = tf.where(tf.reshape(sampled, [num_clients * steps, examples]))
    # The type stubs know no constructor of ragged tensors.
    batches: Any = tf.RaggedTensor.from_value_rowids(  # pyright: ignore[reportAttributeAccessIssue]
        tf.cast(chosen[:, 1], tf.int32), chosen[:, 0], nrows=tf.cast(num_clients * steps, tf.int64), validate=False
    )
    indices = batches.to_tensor()
    shape = [num_clients, steps]
    sizes = tf.reshape(tf.cast(batches.row_lengths(), tf.int32), shape)
    return Batches(tf.reshape(indices, [*shape, tf.shape(indices)[1]]), sizes)
