"""The local solver every method shares: gradient steps on one client's data, with an optional pull to an anchor."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradFn, map_weights, merge, split
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.models.base import Weights


class View(NamedTuple):
    """How the weights of a model come from the weights that are trained.

    Attributes:
      apply: `weights -> the model's weights`.
      spread: `(gradient by the model's weights, weights) -> gradient by the trainable weights`, or what stands for it.
      trainable: names of the model's weights that a gradient is asked for; all by default.
    """

    apply: Callable[[Weights], Weights]
    spread: Callable[[Weights, Weights], Weights]
    trainable: Sequence[str] | None = None


def local_sgd(
    weights: Weights,
    data: ClientData,
    grad_fn: GradFn,
    *,
    learning_rate: tf.Tensor,
    local_steps: LocalSteps,
    first_index: tf.Tensor | int = 0,
    trainable: Sequence[str] | None = None,
    momentum: tf.Tensor | None = None,
    anchor: Weights | None = None,
    prox_weight: tf.Tensor | float = 0.0,
    prox_inside_clip: bool = False,
    view: View | None = None,
    penalty: Callable[[Weights], Weights] | None = None,
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
      first_index: of the round's gradients, the number of the first that is asked for here.
      trainable: names of the weights to train; all by default.
      momentum: float32 scalar: the velocity is so much of itself and the new movement, from zero; none for plain SGD.
      anchor: weights to be pulled towards; none for plain SGD.
      prox_weight: float32 scalar, the strength of the pull.
      prox_inside_clip: add the proximal term to each example's gradient before the clip instead, as the released code
        of the MR-MTL paper does. It costs the same privacy; a strong pull then takes all the room under the clip.
      view: how the model's weights come from these; by default they are the same. Not with `prox_inside_clip`.
      penalty: gradient of a further term that does not depend on the data, of the trainable weights.
    """

    # A function of its own: in the cyclic graph that TensorFlow otherwise makes of a loop it does not find oneDNN's
    # kernel for the gradient of a max pooling, which is several times as fast as the other one.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def step(index: tf.Tensor, current: Weights, velocity: Weights) -> tuple[tf.Tensor, Weights, Weights]:
        is_own = index < local_steps.count
        rate = tf.where(is_own, learning_rate, 0.0)
        pull = map_weights(lambda w, a: prox_weight * (w - a), current, pulling) if prox_inside_clip else None
        number = _number(first_index, index, local_steps)
        whole = merge(fixed, current)
        if view is None:
            movement = grad_fn(whole, data, number, rate, pull, trainable)
        else:
            movement = view.spread(grad_fn(view.apply(whole), data, number, rate, pull, view.trainable), whole)
        if anchor is not None and not prox_inside_clip:
            movement = map_weights(lambda m, w, a: m + rate * prox_weight * (w - a), movement, current, pulling)
        if penalty is not None:
            movement = map_weights(lambda m, p: m + rate * p, movement, penalty(current))
        if momentum is not None:
            movement = map_weights(lambda v, m: tf.where(is_own, momentum * v + m, 0.0), velocity, movement)
            velocity = movement
        return index + 1, map_weights(tf.subtract, current, movement), velocity

    fixed = map_weights(tf.convert_to_tensor, weights)
    trained = fixed if trainable is None else split(fixed, trainable)[0]
    pulling = {} if anchor is None else split(anchor, list(trained))[0]
    velocity = {} if momentum is None else map_weights(tf.zeros_like, trained)
    # The first step is outside of the loop. Clients that start from the same weights, computed together, take it with
    # one matrix product for all of them; in the loop everyone has weights of their own.
    first = step(tf.constant(0), trained, velocity)
    _, trained, _ = tf.while_loop(
        lambda index, *_: index < local_steps.bound,
        step,
        first,
        # One step reads the weights the step before wrote: nothing to run in parallel.
        parallel_iterations=1,
    )
    return merge(fixed, trained)


def _number(first_index: tf.Tensor | int, index: tf.Tensor, steps: LocalSteps) -> tf.Tensor:
    """The number of a step's gradient among the round's."""
    if isinstance(first_index, int) and first_index == 0:
        # A stack of clients shares it, which makes all that depends on it faster.
        return index
    # Steps after a client's own would ask for more gradients than there are.
    return first_index + tf.minimum(index, steps.count - 1)
