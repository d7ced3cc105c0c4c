"""The local solver of every method: gradient steps on one client's data, with an optional pull to an anchor."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradFn, map_weights, merge, split
from tff_pdp.algorithms.hyper_parameters import LocalSteps
from tff_pdp.models.base import Weights


class View(NamedTuple):
    """The map from trained weights to a model's weights.

    Attributes:
      apply: `weights -> the model's weights`; with several trajectories, one argument of weights for each.
      spread: `(gradient w.r.t. the model's weights, weights) -> gradient w.r.t. the trained weights`, or a substitute
        for this gradient.
      trainable: names of the model's weights to differentiate by; all by default.
    """

    apply: Callable[..., Weights]
    spread: Callable[[Weights, Weights], Weights]
    trainable: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Weights that a client trains, with the options of their training.

    Attributes:
      start: weights before the first step.
      trainable: names of the weights to train; all by default.
      momentum: float32 scalar, factor in `velocity = momentum * velocity + movement` (at first 0); None for plain SGD.
      anchor: weights that the trained weights are pulled to; None for no pull.
      prox_weight: float32 scalar, strength of the pull.
      prox_inside_clip: whether to add the pull to each example's gradient before the clip, as the MR-MTL paper's
        released code does; by default the pull is added after clip and noise. The privacy cost is the same; a strong
        pull before the clip leaves little of the data's gradient.
      view: map from trained to model weights; by default the identity. Cannot be used with `prox_inside_clip`.
      penalty: `trained weights -> gradient` of a further loss term, which does not depend on the data.
      keeps_path: whether the result has the weights before each step, too.
    """

    start: Weights
    trainable: Sequence[str] | None = None
    momentum: tf.Tensor | None = None
    anchor: Weights | None = None
    prox_weight: tf.Tensor | float = 0.0
    prox_inside_clip: bool = False
    view: View | None = None
    penalty: Callable[[Weights], Weights] | None = None
    keeps_path: bool = False


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
    costs no privacy and is not distorted by the clip. Several trajectories take their steps together; each gradient may
    depend on the weights that all trajectories have before the step. With two trajectories, step t takes gradients 2t
    and 2t + 1.

    Args:
      start: weights to train; a trajectory, for weights with options; or a tuple of several trajectories.
      data: the client's examples.
      grad_fn: scaled gradient of the loss on the data, already private if the privacy plan requires it.
      learning_rate: float32 scalar.
      local_steps: number of steps; steps from `count` to `bound` leave the weights unchanged.
      first_index: index, in the round, of the first gradient.

    Returns:
      The trained weights, `Weights`; for several trajectories a tuple with the weights of each. A trajectory that
      keeps its path has a pair in place of the weights: all weights after the last step, and the trained weights before
      each step, with a first axis of `local_steps.bound` steps.
    """
    several = start if isinstance(start, tuple) else (start if isinstance(start, Trajectory) else Trajectory(start),)

    def movement_of(
        one: Trajectory, own: Weights, whole: Weights, wholes: Sequence[Weights], number: tf.Tensor, rate: tf.Tensor
    ) -> Weights:
        """Returns a trajectory's movement, without momentum; `own` has the trained weights, `whole` all weights."""
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

    # A function of its own: in the cyclic graph that TensorFlow otherwise makes of a loop, it does not find oneDNN's
    # kernel for the gradient of a max pooling, which is several times as fast as the default kernel.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def step(
        index: tf.Tensor, current: tuple[Weights, ...], velocities: tuple[Weights, ...], paths: tuple[Weights, ...]
    ) -> tuple:
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
        longer = tuple(
            {name: tf.tensor_scatter_nd_update(path[name], [[index]], own[name][tf.newaxis]) for name in path}
            for path, own in zip(paths, current, strict=True)
        )
        return index + 1, tuple(moved), tuple(kept), longer

    all_fixed = [map_weights(tf.convert_to_tensor, one.start) for one in several]
    trained = tuple(
        fixed if one.trainable is None else split(fixed, one.trainable)[0]
        for one, fixed in zip(several, all_fixed, strict=True)
    )
    velocities = tuple(
        {} if one.momentum is None else map_weights(tf.zeros_like, own)
        for one, own in zip(several, trained, strict=True)
    )
    paths = tuple(
        map_weights(lambda w: tf.zeros([local_steps.bound, *w.shape]), own) if one.keeps_path else {}
        for one, own in zip(several, trained, strict=True)
    )
    # The first step is outside of the loop: clients that are computed together from the same weights share one matrix
    # product there. In the loop each client has weights of its own.
    first = step(tf.constant(0), trained, velocities, paths)
    _, trained, _, paths = tf.while_loop(
        lambda index, *_: index < local_steps.bound,
        step,
        first,
        # Each step reads the weights that the step before wrote, so nothing can run in parallel.
        parallel_iterations=1,
    )
    merged = tuple(merge(fixed, own) for fixed, own in zip(all_fixed, trained, strict=True))
    results = tuple(
        (one, path) if trajectory.keeps_path else one
        for trajectory, one, path in zip(several, merged, paths, strict=True)
    )
    return results if isinstance(start, tuple) else results[0]


def _with_momentum(momentum: tf.Tensor, velocity: Weights, movement: Weights, is_own: tf.Tensor) -> Weights:
    return map_weights(lambda v, m: tf.where(is_own, momentum * v + m, 0.0), velocity, movement)


def _number(
    first_index: tf.Tensor | int, index: tf.Tensor, steps: LocalSteps, place: int, num_trajectories: int
) -> tf.Tensor:
    """Returns the number, in the round, of the gradient that a trajectory takes in a step."""
    if isinstance(first_index, int) and first_index == 0:
        # All clients of a stack share this number, so all that depends on the number is faster.
        return index if num_trajectories == 1 else num_trajectories * index + place
    # Steps after a client's own would ask for more gradients than there are.
    own = tf.minimum(index, steps.count - 1)
    return first_index + (own if num_trajectories == 1 else num_trajectories * own + place)
