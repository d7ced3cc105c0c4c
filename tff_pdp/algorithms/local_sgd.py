"""The local solver every method shares: gradient steps on one client's data, with an optional pull to an anchor."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradFn, map_weights, merge, split
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.models.base import Weights


class View(NamedTuple):
    """How the weights of a model come from the weights that are trained.

    Attributes:
      apply: `weights -> the model's weights`; of several trajectories the weights of all, in their order.
      spread: `(gradient by the model's weights, weights) -> gradient by the trainable weights`, or what stands for it.
      trainable: names of the model's weights that a gradient is asked for; all by default.
    """

    apply: Callable[..., Weights]
    spread: Callable[[Weights, Weights], Weights]
    trainable: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Weights that a client trains, and how.

    Attributes:
      start: the weights to start from.
      trainable: names of the weights to train; all by default.
      momentum: float32 scalar: the velocity is so much of itself and the new movement, from zero; none for plain SGD.
      anchor: weights to be pulled towards; none for plain SGD.
      prox_weight: float32 scalar, the strength of the pull.
      prox_inside_clip: add the proximal term to each example's gradient before the clip instead, as the released code
        of the MR-MTL paper does. It costs the same privacy; a strong pull then takes all the room under the clip.
      view: how the model's weights come from these; by default they are the same. Not with `prox_inside_clip`.
      penalty: gradient of a further term that does not depend on the data, of the trainable weights.
    """

    start: Weights
    trainable: Sequence[str] | None = None
    momentum: tf.Tensor | None = None
    anchor: Weights | None = None
    prox_weight: tf.Tensor | float = 0.0
    prox_inside_clip: bool = False
    view: View | None = None
    penalty: Callable[[Weights], Weights] | None = None


def local_sgd(
    start: Weights | Trajectory | tuple[Trajectory, ...],
    data: ClientData,
    grad_fn: GradFn,
    learning_rate: tf.Tensor,
    local_steps: LocalSteps,
    first_index: tf.Tensor | int = 0,
) -> Any:
    """Runs `local_steps.count` steps `w <- w - learning_rate * (grad_fn(w) + prox_weight * (w - anchor))`.

    The proximal term does not depend on the data, so it is added after the gradient has been clipped and noised: it
    costs no privacy and is not distorted by the clip. Several trajectories take their steps at the same time, each from
    where all of them are, and each with a gradient of its own: of two, step t asks for the gradients 2t and 2t + 1.

    Args:
      start: what is trained: weights or, with options, a trajectory, or several of them.
      data: the client's examples.
      grad_fn: scaled gradient of the data term, already private where the plan asks for it.
      learning_rate: float32 scalar.
      local_steps: how many; steps from there to the bound leave the weights as they are.
      first_index: of the round's gradients, the number of the first that is asked for here.

    Returns:
      The trained weights, `Weights`; a tuple of several trajectories' weights.
    """
    several = start if isinstance(start, tuple) else (start if isinstance(start, Trajectory) else Trajectory(start),)

    def movement_of(
        one: Trajectory, own: Weights, whole: Weights, wholes: Sequence[Weights], number: tf.Tensor, rate: tf.Tensor
    ) -> Weights:
        """How far a step moves the weights `own` that a trajectory trains, of the `whole`, before momentum."""
        pulling = {} if one.anchor is None else split(one.anchor, list(own))[0]
        pull = map_weights(lambda w, a: one.prox_weight * (w - a), own, pulling) if one.prox_inside_clip else None
        if one.view is None:
            movement = grad_fn(whole, data, number, rate, pull, one.trainable)
        else:
            gradient = grad_fn(one.view.apply(*wholes), data, number, rate, pull, one.view.trainable)
            movement = one.view.spread(gradient, whole)
        if one.anchor is not None and not one.prox_inside_clip:
            movement = map_weights(lambda m, w, a: m + rate * one.prox_weight * (w - a), movement, own, pulling)
        if one.penalty is not None:
            movement = map_weights(lambda m, p: m + rate * p, movement, one.penalty(own))
        return movement

    # A function of its own: in the cyclic graph that TensorFlow otherwise makes of a loop it does not find oneDNN's
    # kernel for the gradient of a max pooling, which is several times as fast as the other one.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def step(index: tf.Tensor, current: tuple[Weights, ...], velocities: tuple[Weights, ...]) -> tuple:
        is_own = index < local_steps.count
        rate = tf.where(is_own, learning_rate, 0.0)
        wholes = [merge(fixed, own) for fixed, own in zip(all_fixed, current, strict=True)]
        moved, kept = [], []
        for place, (one, own, velocity) in enumerate(zip(several, current, velocities, strict=True)):
            number = _number(first_index, index, local_steps, place, len(several))
            movement = movement_of(one, own, wholes[place], wholes, number, rate)
            if one.momentum is not None:
                movement = velocity = _with_momentum(one.momentum, velocity, movement, is_own)
            moved.append(map_weights(tf.subtract, own, movement))
            kept.append(velocity)
        return index + 1, tuple(moved), tuple(kept)

    all_fixed = [map_weights(tf.convert_to_tensor, one.start) for one in several]
    trained = tuple(
        fixed if one.trainable is None else split(fixed, one.trainable)[0]
        for one, fixed in zip(several, all_fixed, strict=True)
    )
    velocities = tuple(
        {} if one.momentum is None else map_weights(tf.zeros_like, own)
        for one, own in zip(several, trained, strict=True)
    )
    # The first step is outside of the loop. Clients that start from the same weights, computed together, take it with
    # one matrix product for all of them; in the loop everyone has weights of their own.
    first = step(tf.constant(0), trained, velocities)
    _, trained, _ = tf.while_loop(
        lambda index, *_: index < local_steps.bound,
        step,
        first,
        # One step reads the weights the step before wrote: nothing to run in parallel.
        parallel_iterations=1,
    )
    merged = tuple(merge(fixed, own) for fixed, own in zip(all_fixed, trained, strict=True))
    return merged if isinstance(start, tuple) else merged[0]


def _with_momentum(momentum: tf.Tensor, velocity: Weights, movement: Weights, is_own: tf.Tensor) -> Weights:
    return map_weights(lambda v, m: tf.where(is_own, momentum * v + m, 0.0), velocity, movement)


def _number(
    first_index: tf.Tensor | int, index: tf.Tensor, steps: LocalSteps, place: int, num_trajectories: int
) -> tf.Tensor:
    """The number of a step's gradient, the one of a trajectory, among the round's."""
    if isinstance(first_index, int) and first_index == 0:
        # A stack of clients shares it, which makes all that depends on it faster.
        return index if num_trajectories == 1 else num_trajectories * index + place
    # Steps after a client's own would ask for more gradients than there are.
    own = tf.minimum(index, steps.count - 1)
    return first_index + (own if num_trajectories == 1 else num_trajectories * own + place)
