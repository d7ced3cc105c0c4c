"""Builds methods in which clients share a model's body, and each client has a head of its own.

The head is a client's state and never leaves the client. The server keeps the weights of a whole model and trains the
body; the server's head keeps its public initial value, from which clients' heads start.
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

# A client's round: `(weights, client data, grad_fn, hparams) -> trained weights`.
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
    """Builds a method with a shared body. Server state: weights, optimizer. Client state: its head. Released: the
    body's update, averaged.

    Args:
      name: name of the method in `algorithms`.
      title: name of the method in reports.
      head: names of the head's weights.
      hparams: hyper-parameters, `head_learning_rate` among them; `adapt_steps` is added.
      train: a client's round: `(weights, client data, grad_fn, hparams) -> trained weights`.
      optimizer: the server's optimizer.
      release: `(body before, body after the client's round) -> update`; by default the difference.
      receive: `(the server's body, mean update) -> update for the optimizer`; by default the mean update.

    The method's `init_server` raises a ConfigError for a model that is all body or all head.
    """

    def init_server(weights):
        own, body = split(weights, head)
        if not own or not body:
            raise ConfigError(
                f"algorithms.{name} shares the body of a model and not the head, but {'none' if body else 'all'} of "
                f"the model's weights ({', '.join(weights)}) belong to the head"
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
    """Returns the weights with a trained head and an unchanged body; gradient indices start from 0.

    `head_learning_rate` is the learning rate; `steps` is the name of the hyper-parameter with the number of steps.
    """
    trajectory = Trajectory(weights, trainable=head)
    return local_sgd(trajectory, data, grad_fn, hparams["head_learning_rate"], hparams[steps])


# Hyper-parameters of methods whose clients train by `head_then_body`.
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
    """Builds a client's round that trains the head with the body frozen, then the body with the head frozen.

    Args:
      head: names of the head's weights.
      local_momentum: momentum of the steps on the body.
      options: `body at the start of the round -> further arguments of the body's Trajectory`.
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
