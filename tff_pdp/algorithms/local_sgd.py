"""The local solver every method shares: gradient steps on one client's data, with an optional pull to an anchor."""

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradFn, LocalSteps, map_weights
from tff_pdp.models.base import Weights


def local_sgd(
    weights: Weights,
    data: ClientData,
    grad_fn: GradFn,
    *,
    learning_rate: tf.Tensor,
    local_steps: LocalSteps,
    data_pass: int = 0,
    anchor: Weights | None = None,
    prox_weight: tf.Tensor | float = 0.0,
    prox_inside_clip: bool = False,
) -> Weights:
    """Runs `local_steps.count` steps `w <- w - learning_rate * (grad_fn(w) + prox_weight * (w - anchor))`.

    The proximal term does not depend on the data, so it is added after the gradient has been clipped and noised: it
    costs no privacy and is not distorted by the clip.

    Args:
      weights: where to start.
      data: the client's examples.
      grad_fn: scaled gradient of the data term, already private where the plan asks for it.
      learning_rate: float32 scalar.
      local_steps: how many; steps from there to the bound leave the weights as they are.
      data_pass: which of the algorithm's passes over the data this is, counted from 0.
      anchor: weights to be pulled towards; none for plain SGD.
      prox_weight: float32 scalar, the strength of the pull.
      prox_inside_clip: add the proximal term to each example's gradient before the clip instead, as the released code
        of the MR-MTL paper does. It costs the same privacy; a strong pull then takes all the room under the clip.
    """

    # A function of its own: in the cyclic graph that TensorFlow otherwise makes of a loop it does not find oneDNN's
    # kernel for the gradient of a max pooling, which is several times as fast as the other one.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def step(index: tf.Tensor, current: Weights) -> tuple[tf.Tensor, Weights]:
        rate = tf.where(index < local_steps.count, learning_rate, 0.0)
        # The first pass has an index that a stack of clients shares, which makes all that depends on it faster.
        number = data_pass * local_steps.count + index if data_pass else index
        if anchor is None:
            movement = grad_fn(current, data, number, rate)
        elif prox_inside_clip:
            pull = map_weights(lambda w, a: prox_weight * (w - a), current, anchor)
            movement = grad_fn(current, data, number, rate, pull)
        else:
            movement = grad_fn(current, data, number, rate)
            movement = map_weights(lambda m, w, a: m + rate * prox_weight * (w - a), movement, current, anchor)
        return index + 1, map_weights(tf.subtract, current, movement)

    # The first step is outside of the loop. Clients that start from the same weights, computed together, take it with
    # one matrix product for all of them; in the loop everyone has weights of their own.
    first = step(tf.constant(0), map_weights(tf.convert_to_tensor, weights))
    _, trained = tf.while_loop(
        lambda index, _: index < local_steps.bound,
        step,
        first,
        # One step reads the weights the step before wrote: nothing to run in parallel.
        parallel_iterations=1,
    )
    return trained
