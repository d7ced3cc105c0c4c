"""Applies the mean of clients' updates at the server: by SGD, by SGD with momentum, or by Adam.

Under user-level privacy the mean is noised before it arrives, so the optimizer is post-processing.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tensorflow as tf
from msgspec import Meta

from tff_pdp.algorithms.base import State, map_weights
from tff_pdp.models.base import Weights

OptimizerKind = Literal["sgd", "momentum", "adam"]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
AdamKind = Literal["reddi", "kingma_ba"]


@dataclasses.dataclass(frozen=True)
class _Adam:
    """Constants of Adam.

    Attributes:
      second_moment: factor by which earlier squares of updates decay in each round.
      epsilon: number added to the root of the mean square.
      is_corrected: whether means are divided by the sum of their factors, so that first rounds are not too small.
    """

    second_moment: float
    epsilon: float
    is_corrected: bool


_ADAM = {"reddi": _Adam(0.99, 1e-3, False), "kingma_ba": _Adam(0.999, 1e-8, True)}


@dataclasses.dataclass(frozen=True)
class ServerOptimizer:
    """The server's optimizer, as pure functions.

    Attributes:
      init: `weights -> state`.
      apply: `(state, weights, mean update) -> (state, weights)`. A fourth argument, a float32 scalar, replaces the
        learning rate.
    """

    init: Callable[[Weights], State]
    apply: Callable[..., tuple[State, Weights]]


def build_server_optimizer(
    kind: OptimizerKind, learning_rate: float, momentum: float = 0.9, adam: AdamKind = "reddi"
) -> ServerOptimizer:
    """Builds a server optimizer (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).

    Args:
      kind: rule for the step added to the weights: `sgd`, the update; `momentum`, the decaying sum of updates; `adam`,
        the decaying mean of updates, divided by the root of the decaying mean of squared updates.
      learning_rate: positive factor of the step.
      momentum: factor by which earlier updates decay in each round.
      adam: form of Adam: `reddi`, with decay 0.99 of squares, 1e-3 added to the root, and no correction of the first
        rounds; or `kingma_ba`, with 0.999, 1e-8 and the correction (Kingma and Ba, "Adam: A Method for Stochastic
        Optimization", arXiv:1412.6980, ICLR 2015).
    """
    constants = _ADAM[adam]
    decay = constants.second_moment

    def init(weights: Weights) -> State:
        zeros = map_weights(tf.zeros_like, weights)
        rounds = {"rounds": tf.constant(0)} if constants.is_corrected else {}
        return {"sgd": {}, "momentum": {"first": zeros}, "adam": {"first": zeros, "second": zeros, **rounds}}[kind]

    def sum_of_factors(decay: float, rounds: tf.Tensor) -> tf.Tensor:
        # `1 - decay^rounds`, without the cancellation that the difference has for a decay near 1.
        return -tf.math.expm1(tf.cast(rounds, tf.float32) * math.log(decay)) if decay else tf.constant(1.0)

    def apply(state: Any, weights: Weights, update: Weights, rate: Any = learning_rate) -> tuple[State, Weights]:
        if kind == "sgd":
            return state, map_weights(lambda w, u: w + rate * u, weights, update)
        if kind == "momentum":
            first = map_weights(lambda m, u: momentum * m + u, state["first"], update)
            return {"first": first}, map_weights(lambda w, m: w + rate * m, weights, first)
        first = map_weights(lambda m, u: momentum * m + (1 - momentum) * u, state["first"], update)
        second = map_weights(lambda v, u: decay * v + (1 - decay) * tf.square(u), state["second"], update)
        if not constants.is_corrected:
            moved = map_weights(lambda w, m, v: w + rate * m / (tf.sqrt(v) + constants.epsilon), weights, first, second)
            return {"first": first, "second": second}, moved
        rounds = state["rounds"] + 1
        of_first, of_second = sum_of_factors(momentum, rounds), sum_of_factors(decay, rounds)
        moved = map_weights(
            lambda w, m, v: w + rate * (m / of_first) / (tf.sqrt(v / of_second) + constants.epsilon),
            weights,
            first,
            second,
        )
        return {"first": first, "second": second, "rounds": rounds}, moved

    return ServerOptimizer(init, apply)
