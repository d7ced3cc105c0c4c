"""Applies the mean of clients' updates at the server: by SGD, by SGD with momentum, or by Adam.

Under user-level privacy the mean is noised before it arrives, so the optimizer is post-processing.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tensorflow as tf
from msgspec import Meta

from tff_pdp.algorithms.base import State, map_weights
from tff_pdp.models.base import Weights

OptimizerKind = Literal["sgd", "momentum", "adam"]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
# Adam's constants, as in Reddi et al.
_SECOND_MOMENT = 0.99
_EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class ServerOptimizer:
    """The server's optimizer, as pure functions.

    Attributes:
      init: `weights -> state`.
      apply: `(state, weights, mean update) -> (state, weights)`.
    """

    init: Callable[[Weights], State]
    apply: Callable[[State, Weights, Weights], tuple[State, Weights]]


def build_server_optimizer(kind: OptimizerKind, learning_rate: float, momentum: float = 0.9) -> ServerOptimizer:
    """Builds a server optimizer (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).

    Args:
      kind: rule for the step added to the weights: `sgd`, the update; `momentum`, the decaying sum of updates; `adam`,
        the decaying mean of updates, divided by the root of the decaying mean of squared updates.
      learning_rate: positive factor of the step.
      momentum: factor by which earlier updates decay in each round.
    """

    def init(weights: Weights) -> State:
        zeros = map_weights(tf.zeros_like, weights)
        return {"sgd": {}, "momentum": {"first": zeros}, "adam": {"first": zeros, "second": zeros}}[kind]

    def apply(state: Any, weights: Weights, update: Weights) -> tuple[State, Weights]:
        if kind == "sgd":
            return state, map_weights(lambda w, u: w + learning_rate * u, weights, update)
        if kind == "momentum":
            first = map_weights(lambda m, u: momentum * m + u, state["first"], update)
            return {"first": first}, map_weights(lambda w, m: w + learning_rate * m, weights, first)
        first = map_weights(lambda m, u: momentum * m + (1 - momentum) * u, state["first"], update)
        second = map_weights(
            lambda v, u: _SECOND_MOMENT * v + (1 - _SECOND_MOMENT) * tf.square(u), state["second"], update
        )
        moved = map_weights(lambda w, m, v: w + learning_rate * m / (tf.sqrt(v) + _EPSILON), weights, first, second)
        return {"first": first, "second": second}, moved

    return ServerOptimizer(init, apply)
