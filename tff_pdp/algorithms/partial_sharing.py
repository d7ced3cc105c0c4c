"""Builds methods that share a model's body, and leave every client a head of its own.

The head is a client's state and never leaves it. The server keeps whole weights, of which it trains the body; its head
is the public initial one, which clients start from.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientData, ClientResult, GradFn, map_weights, merge, split
from tff_pdp.algorithms.hyper_parameters import (
    ADAPT_STEPS,
    HEAD_LEARNING_RATE,
    HEAD_STEPS,
    LEARNING_RATE,
    LOCAL_STEPS,
    HParam,
)
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.algorithms.server_optimizer import Momentum, ServerOptimizer
from tff_pdp.errors import ConfigError
from tff_pdp.models.base import Weights

# `(weights, client data, grad_fn, hparams) -> weights` after a client's round.
Train = Callable[[Weights, ClientData, GradFn, Mapping[str, Any]], Weights]


def build_partial_sharing(
    *,
    name: str,
    title: str,
    head: Sequence[str],
    hparams: Mapping[str, HParam],
    train: Train,
    optimizer: ServerOptimizer,
    release: Callable[[Weights, Weights], Weights] = lambda body, trained: map_weights(tf.subtract, trained, body),
    receive: Callable[[Weights, Weights], Weights] = lambda body, update: update,
) -> Algorithm:
    """Builds a method of a shared body. Server state: weights, optimizer. Client state: its head. Released: the body's
    update, averaged.

    Args:
      name: in the registry.
      title: for a reader.
      head: names of the head's weights.
      hparams: with `head_learning_rate`; `adapt_steps` are added.
      train: a client's round.
      optimizer: the server's.
      release: `(body before, body after the client's round) -> update`; by default their difference.
      receive: `(the server's body, mean update) -> update` that the server goes on with.

    Its `init_server` raises a ConfigError for a model that is all body or all head.
    """

    def init_server(weights):
        own, body = split(weights, head)
        if not own or not body:
            raise ConfigError(
                f"algorithms.{name} shares the body of a model and not its head, but of {', '.join(weights)} "
                f"{'none is' if body else 'all are'} of the head"
            )
        return {"weights": weights, "optimizer": optimizer.init(body)}

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        start = merge(broadcast["weights"], client_state["head"])
        trained = train(start, data, grad_fn, hparams)
        own, body = split(trained, head)
        update = release(split(start, head)[1], body)
        return ClientResult(state={"head": own}, released={"update": update})

    def server_update(state, aggregates):
        body = split(state["weights"], head)[1]
        moments, moved = optimizer.apply(state["optimizer"], body, receive(body, aggregates["update"]))
        return {"weights": merge(state["weights"], moved), "optimizer": moments}

    def adapt(broadcast, client_state, data, grad_fn, hparams):
        start = merge(broadcast["weights"], client_state["head"])
        return {"head": split(tune_head(start, data, grad_fn, hparams, head, "adapt_steps"), head)[0]}

    return Algorithm(
        name=name,
        title=title,
        hparams={**hparams, "adapt_steps": ADAPT_STEPS},
        released={"update": "mean"},
        data_passes=1,
        init_server=init_server,
        init_client=lambda broadcast: {"head": split(broadcast["weights"], head)[0]},
        client_update=client_update,
        server_update=server_update,
        adapt=adapt,
        personalise=lambda broadcast, client_state: merge(broadcast["weights"], client_state["head"]),
    )


def tune_head(
    weights: Weights,
    data: ClientData,
    grad_fn: GradFn,
    hparams: Mapping[str, Any],
    head: Sequence[str],
    steps: str,
) -> Weights:
    """The weights with their head trained, and the body as it is; asks for the first gradients.

    The hyper-parameters have `head_learning_rate`, and under the name `steps` the number of steps.
    """
    trajectory = Trajectory(weights, trainable=head)
    return local_sgd(trajectory, data, grad_fn, hparams["head_learning_rate"], hparams[steps])


# Of methods whose clients train by `head_then_body`.
HEAD_THEN_BODY = {
    "learning_rate": LEARNING_RATE,
    "head_learning_rate": HEAD_LEARNING_RATE,
    "head_steps": HEAD_STEPS,
    "local_steps": LOCAL_STEPS,
}


def head_then_body(
    head: Sequence[str],
    local_momentum: Momentum = 0.0,
    options: Callable[[Weights], Mapping[str, Any]] = lambda body: {},
) -> Train:
    """A client's round of head and body in turn: the head with the body frozen, then the body with the head frozen.

    Args:
      head: names of the head's weights.
      local_momentum: of the body's steps.
      options: of the body's trajectory, by the body's weights at the start of the round.
    """

    def train(weights: Weights, data: ClientData, grad_fn: GradFn, hparams: Mapping[str, Any]) -> Weights:
        body = split(weights, head)[1]
        trajectory = Trajectory(
            tune_head(weights, data, grad_fn, hparams, head, "head_steps"),
            trainable=list(body),
            momentum=tf.constant(local_momentum) if local_momentum else None,
            **options(body),
        )
        first = hparams["head_steps"].count
        return local_sgd(trajectory, data, grad_fn, hparams["learning_rate"], hparams["local_steps"], first)

    return train
