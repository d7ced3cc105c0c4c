"""The update that a client releases in meta-learning: a step of the shared start towards a better start.

From a start theta_0, K local steps `theta_(k+1) = theta_k - eta g_k(theta_k)` lead to the client's model theta_K. The
meta-objective of a client is the loss of theta_K on other batches, the query, as a function of theta_0. Three orders:

* `second` (MAML: Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", arXiv:1703.03400,
  ICML 2017) is the gradient of the meta-objective. The gradient v at theta_K goes back through the steps:
  `v <- v - eta H_k v` for k from K - 1 to 0, where H_k is the Hessian of the loss of batch k at theta_k. The product
  H_k v is one more derivative of a gradient, so no Hessian is computed.
* `first` (first-order MAML) leaves out the Hessians: the update is the gradient at theta_K.
* `reptile` (Nichol et al., "On First-Order Meta-Learning Algorithms", arXiv:1803.02999) needs no query: the update is
  the movement of the steps.
"""

from collections.abc import Mapping
from typing import Any, Literal

import tensorflow as tf

from tff_pdp.algorithms.base import ClientData, GradFn, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, HParam, LocalSteps, Steps
from tff_pdp.algorithms.local_sgd import Trajectory, View, local_sgd
from tff_pdp.models.base import Weights

Order = Literal["first", "second", "reptile"]


def hparams_of(order: Order) -> Mapping[str, HParam]:
    """Returns the hyper-parameters of a client's round."""
    query = {"query_steps": Steps(1, "size of the mean of gradients at the adapted weights", "τ_q", "batches")}
    return LOCAL_TRAINING if order == "reptile" else {**LOCAL_TRAINING, **query}


def adapt_and_query(
    order: Order, start: Weights, shared: Weights, data: ClientData, grad_fn: GradFn, hparams: Mapping[str, Any]
) -> tuple[Weights, Weights]:
    """Computes a client's adapted weights, and its update of the shared weights.

    Args:
      order: the kind of update; see the docstring of the module. The order `second` needs plain gradients.
      start: weights before the local steps. Updates of `first` and `second` are gradients with respect to the start.
      shared: the shared weights, which the movement of `reptile` is measured from.
      data: the client's examples.
      grad_fn: scaled gradient of the loss on the data.
      hparams: the values of `hparams_of(order)`.

    Returns:
      The adapted weights, and the update: a direction of descent, with the shapes of the weights.
    """
    rate, steps = hparams["learning_rate"], hparams["local_steps"]
    if order != "second":
        adapted = local_sgd(start, data, grad_fn, rate, steps)
        if order == "reptile":
            return adapted, map_weights(tf.subtract, adapted, shared)
        return adapted, _descent(adapted, data, grad_fn, hparams["query_steps"], steps.count)
    adapted, path = local_sgd(Trajectory(start, keeps_path=True), data, grad_fn, rate, steps)
    descent = _descent(adapted, data, grad_fn, hparams["query_steps"], steps.count)
    return adapted, _through_steps(descent, path, data, grad_fn, rate, steps)


def _descent(adapted: Weights, data: ClientData, grad_fn: GradFn, steps: LocalSteps, first_index: tf.Tensor) -> Weights:
    """Returns the negative mean of gradients at fixed weights: the movement of a trajectory that starts at zero."""
    at_adapted = View(lambda moved: adapted, lambda gradient, moved: gradient)
    nothing = Trajectory(map_weights(tf.zeros_like, adapted), view=at_adapted)
    return local_sgd(nothing, data, grad_fn, 1.0 / tf.cast(steps.count, tf.float32), steps, first_index)


def _through_steps(
    vector: Weights, path: Weights, data: ClientData, grad_fn: GradFn, rate: tf.Tensor, steps: LocalSteps
) -> Weights:
    """Multiplies a gradient at the end of local steps by the derivatives of the steps, from the last to the first.

    Args:
      vector: gradient with respect to the weights after the steps.
      path: weights before each step, with a first axis of `steps.bound` steps.
      data: the client's examples.
      grad_fn: the function that the steps took their gradients from; each gradient is computed once more.
      rate: learning rate of the steps, float32 scalar.
      steps: number of steps; steps from `count` to `bound` leave the vector unchanged.

    Returns:
      The gradient with respect to the weights before the first step.
    """

    # A function of its own for the same reason as in `local_sgd`.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def step_back(index: tf.Tensor, after: Weights) -> tuple[tf.Tensor, Weights]:
        before = map_weights(lambda values: tf.gather(values, index), path)
        with tf.GradientTape() as tape:
            tape.watch(list(before.values()))
            movement = grad_fn(before, data, index, tf.where(index < steps.count, rate, 0.0))
        curved = tape.gradient(
            [movement[name] for name in before],
            list(before.values()),
            output_gradients=[after[name] for name in before],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        products = dict(zip(before, curved, strict=True))
        return index - 1, map_weights(tf.subtract, after, products)

    _, vector = tf.while_loop(
        lambda index, after: index >= 0, step_back, (steps.bound - 1, vector), parallel_iterations=1
    )
    return vector
