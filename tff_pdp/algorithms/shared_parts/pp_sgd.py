"""PP-SGD: a shared model, and a personal addition to its head per client (Bietti et al., "Personalization Improves
Privacy-Accuracy Tradeoffs in Federated Learning", ICML 2022).

A client predicts with the head `w_h + theta_u`. Each step takes one joint gradient w.r.t. the shared weights w and the
client's own part theta_u; only the movement of w is released.
"""

import collections
from collections.abc import Sequence

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights, merge, split
from tff_pdp.algorithms.hyper_parameters import ADAPT_STEPS, HEAD_LEARNING_RATE, LOCAL_TRAINING, HParam
from tff_pdp.algorithms.local_sgd import Trajectory, View, local_sgd
from tff_pdp.algorithms.partial_sharing import tune_head
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.models.base import Weights
from tff_pdp.settings import Positive

_OWN = "own/"


def build_pp_sgd(
    *,
    head: Sequence[str],
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds PP-SGD. Server state: weights, optimizer. Client state: its own part of the head. Released: the shared
    weights' update, averaged. With a `personal_rate` of 0 the method is DP-FedAvg.

    Args:
      head: names of the weights to which clients add a part of their own.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """
    optimizer = build_server_optimizer(server_optimizer, server_learning_rate, server_momentum)

    def with_own(weights: Weights, own: Weights) -> Weights:
        return merge(weights, {name: weights[name] + own[name] for name in head})

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        def model_weights(joint: Weights) -> Weights:
            shared = map_weights(lambda _, value: value, broadcast["weights"], joint)
            return with_own(shared, {name: joint[_OWN + name] for name in head})

        def for_both(gradient: Weights, joint: Weights) -> Weights:
            own = {_OWN + name: hparams["personal_rate"] * gradient[name] for name in head}
            return collections.OrderedDict({**gradient, **own})

        start = collections.OrderedDict(broadcast["weights"])
        start.update((_OWN + name, client_state["own"][name]) for name in head)
        trajectory = Trajectory(start, view=View(model_weights, for_both))
        trained = local_sgd(trajectory, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        update = map_weights(lambda old, new: new - old, broadcast["weights"], trained)
        own = collections.OrderedDict((name, trained[_OWN + name]) for name in client_state["own"])
        return ClientResult(state={"own": own}, released={"update": update})

    def server_update(state, aggregates):
        moments, weights = optimizer.apply(state["optimizer"], state["weights"], aggregates["update"])
        return {"weights": weights, "optimizer": moments}

    def adapt(broadcast, client_state, data, grad_fn, hparams):
        start = with_own(broadcast["weights"], client_state["own"])
        tuned = tune_head(start, data, grad_fn, hparams, head, "adapt_steps")
        return {"own": map_weights(lambda shared, whole: whole - shared, split(broadcast["weights"], head)[0], tuned)}

    return Algorithm(
        name="pp_sgd",
        title="PP-SGD",
        hparams={
            **LOCAL_TRAINING,
            "personal_rate": HParam(1.0, "learning rate of a client's own part, divided by `learning_rate`", "α"),
            "head_learning_rate": HEAD_LEARNING_RATE,
            "adapt_steps": ADAPT_STEPS,
        },
        released={"update": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights, "optimizer": optimizer.init(weights)},
        init_client=lambda broadcast: {"own": map_weights(tf.zeros_like, split(broadcast["weights"], head)[0])},
        client_update=client_update,
        server_update=server_update,
        adapt=adapt,
        personalise=lambda broadcast, adapted: with_own(broadcast["weights"], adapted["own"]),
    )
