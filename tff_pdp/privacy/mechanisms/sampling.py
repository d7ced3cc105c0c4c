"""Draws batches; a plan (`tff_pdp.privacy.plans.plan`) couples each sampler with the event that ledgers record."""

from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp.privacy.mechanisms.random_bits import gpu_is_visible

# Number of bits of a draw that are compared with the rate; rates are exact to 2**-RATE_BITS.
RATE_BITS = 23


class Batches(NamedTuple):
    """The examples that each step uses: for one client or, with a leading axis, for several clients.

    Attributes:
      indices: int32 `[steps, capacity]`, rows of the client's data; zeros beyond a step's size.
      sizes: int32 `[steps]`, at most the capacity.
    """

    indices: tf.Tensor
    sizes: tf.Tensor


def poisson_batches(
    bits: tf.Tensor, num_examples: tf.Tensor, sampling_rates: tf.Tensor, num_steps: tf.Tensor
) -> Batches:
    """Draws Poisson batches: in every step each example is included independently, with its client's sampling rate.

    Guarantee: this is the sampler that `dp_accounting.PoissonSampledDpEvent` describes, up to the generator of the
      bits. The size of a batch is random, may be zero, and is never truncated: the capacity is the size of the largest
      batch that this call draws. A rate is exact to 2**-23.
    Assumes: the bits are secret, and have no other use.

    Args:
      bits: uint32 `[clients, steps, examples]`, uniform.
      num_examples: int32 `[clients]`, number of examples of each client; the entries of `bits` beyond this number, on
        the last axis, are padding.
      sampling_rates: float32 `[clients]`, in `[0, 1]`.
      num_steps: int32 `[clients]`, number of steps of each client; steps beyond this number are empty.

    Returns:
      Batches with a leading axis of clients.
    """
    _, steps, examples = tf.unstack(tf.shape(bits))
    limits = tf.cast(sampling_rates * float(2**RATE_BITS), tf.uint32)
    sampled = tf.bitwise.right_shift(bits, tf.constant(32 - RATE_BITS, tf.uint32)) < limits[:, tf.newaxis, tf.newaxis]
    is_example = tf.range(examples) < num_examples[:, tf.newaxis]
    is_step = tf.range(steps) < num_steps[:, tf.newaxis]
    sampled &= is_example[:, tf.newaxis, :] & is_step[:, :, tf.newaxis]
    return _by_sorting(sampled) if gpu_is_visible() else _by_listing(sampled)


def _by_listing(sampled: tf.Tensor) -> Batches:
    """Returns the places of true values in each row of bool `[clients, steps, examples]`: the fastest way on a CPU."""
    num_clients, steps, examples = tf.unstack(tf.shape(sampled))
    chosen = tf.where(tf.reshape(sampled, [num_clients * steps, examples]))
    # The type stubs know no constructor of ragged tensors.
    batches: Any = tf.RaggedTensor.from_value_rowids(  # pyright: ignore[reportAttributeAccessIssue]
        tf.cast(chosen[:, 1], tf.int32), chosen[:, 0], nrows=tf.cast(num_clients * steps, tf.int64), validate=False
    )
    indices = batches.to_tensor()
    shape = [num_clients, steps]
    sizes = tf.reshape(tf.cast(batches.row_lengths(), tf.int32), shape)
    return Batches(tf.reshape(indices, [*shape, tf.shape(indices)[1]]), sizes)


def _by_sorting(sampled: tf.Tensor) -> Batches:
    """Returns the result of `_by_listing`, by operations that have kernels on a GPU, such as `top_k`.

    Numbers of examples are float32 here, because a GPU has no kernels for sums of int32; there are at most 2**24.
    """
    is_sampled = tf.cast(sampled, tf.float32)
    sizes = tf.reduce_sum(is_sampled, axis=2)
    num_examples = tf.shape(sampled)[2]
    # From the number of examples down to 1: a larger number is an earlier place, and zero is no place.
    from_end = tf.cast(num_examples - tf.range(num_examples), tf.float32)
    capacity = tf.cast(tf.reduce_max(tf.concat([[0.0], tf.reshape(sizes, [-1])], axis=0)), tf.int32)
    first, _ = tf.math.top_k(is_sampled * from_end, capacity)
    places = tf.where(first > 0, tf.cast(num_examples, tf.float32) - first, tf.zeros_like(first))
    return Batches(tf.cast(places, tf.int32), tf.cast(sizes, tf.int32))


def paper_shuffled_batches(
    bits: tf.Tensor, num_examples: tf.Tensor, batch_sizes: tf.Tensor, num_steps: tf.Tensor
) -> Batches:
    """Cuts each epoch's random permutation into disjoint batches of equal size, and leaves out the rest.

    The released code of the MR-MTL paper trains with these batches, but its accountant assumes Poisson batches. The
    event of Poisson sampling does not describe them: an example's batches are not independent, and epsilon is too small
    (`docs/privacy.md`). Use these batches only to compare; the claim of a plan with this sampler is `none`.

    Args:
      bits: uint32 `[clients, steps, examples]`, uniform.
      num_examples: int32 `[clients]`, number of examples of each client.
      batch_sizes: int32 `[clients]`, each at least 1 and at most the number of examples, if there are any.
      num_steps: int32 `[clients]`, number of steps of each client; steps beyond this number are empty.

    Returns:
      Batches with a leading axis of clients.
    """
    steps = tf.range(tf.shape(bits)[1])
    per_epoch = tf.maximum(num_examples // batch_sizes, 1)[:, tf.newaxis]
    epochs, positions = steps // per_epoch, steps % per_epoch
    # Padding comes last: real keys have 31 bits.
    is_example = (tf.range(tf.shape(bits)[2]) < num_examples[:, tf.newaxis])[:, tf.newaxis, :]
    keys = tf.where(is_example, tf.cast(tf.bitwise.right_shift(bits, tf.constant(1, tf.uint32)), tf.int64), 2**31)
    # One permutation for each epoch, of which there are at most as many as steps.
    order = tf.gather(tf.argsort(keys, axis=-1), epochs, batch_dims=1)
    places = positions[:, :, tf.newaxis] * batch_sizes[:, tf.newaxis, tf.newaxis] + tf.range(tf.reduce_max(batch_sizes))
    is_step = steps < num_steps[:, tf.newaxis]
    own = tf.minimum(batch_sizes, num_examples)[:, tf.newaxis]
    sizes = tf.where(is_step, tf.broadcast_to(own, tf.shape(is_step)), 0)
    last = tf.maximum(tf.shape(bits)[2] - 1, 0)
    return Batches(tf.gather(order, tf.minimum(places, last), batch_dims=2), sizes)
