"""DP-FedAvg and PMTL with fine-tuned heads: one shared model, whose head each client tunes before use.

DP-FedAvg-FT trains the shared model by FedAvg, under user-level privacy by DP-FedAvg (McMahan et al., "Learning
Differentially Private Recurrent Language Models", ICLR 2018). Tuning the head is the baseline `DP-FedAvg-fb` of the
literature on partial sharing; the tuned head never leaves the client.

PMTL-FT is private multi-task learning by a pull to the shared model (Hu et al., "Private Multi-Task Learning:
Formulation and Applications to Federated Learning", TMLR 2023). A client minimises its loss plus `lambda |w - w_t|^2`
around the shared weights `w_t` and releases its movement; it tunes the head before its model is used.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights, merge, split
from tff_pdp.algorithms.hyper_parameters import ADAPT_STEPS, HEAD_LEARNING_RATE, LOCAL_TRAINING, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.algorithms.partial_sharing import tune_head
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.settings import Positive


def build_dp_fed_avg_ft(
    *,
    head: Sequence[str],
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds DP-FedAvg with fine-tuned heads. Server state: weights, optimizer. Client state: nothing. Released: the
    update, averaged.

    Args:
      head: names of the weights that clients tune.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """
    optimizer = build_server_optimizer(server_optimizer, server_learning_rate, server_momentum)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        shared = broadcast["weights"]
        anchor, pull = (shared, hparams["prox_weight"]) if "prox_weight" in hparams else (None, 0.0)
        trajectory = Trajectory(shared, anchor=anchor, prox_weight=pull)
        weights = local_sgd(trajectory, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        update = map_weights(tf.subtract, weights, shared)
        return ClientResult(state=client_state, released={"update": update})

    def server_update(state, aggregates):
        moments, weights = optimizer.apply(state["optimizer"], state["weights"], aggregates["update"])
        return {"weights": weights, "optimizer": moments}

    def adapt(broadcast, client_state, data, grad_fn, hparams):
        return {"head": split(tune_head(broadcast["weights"], data, grad_fn, hparams, head, "adapt_steps"), head)[0]}

    return Algorithm(
        name="dp_fed_avg_ft",
        title="DP-FedAvg, tuned heads",
        hparams={**LOCAL_TRAINING, "head_learning_rate": HEAD_LEARNING_RATE, "adapt_steps": ADAPT_STEPS},
        released={"update": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights, "optimizer": optimizer.init(weights)},
        init_client=lambda broadcast: {},
        client_update=client_update,
        server_update=server_update,
        adapt=adapt,
        personalise=lambda broadcast, adapted: merge(broadcast["weights"], adapted["head"]),
    )


def build_pmtl_ft(
    *,
    head: Sequence[str],
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds PMTL-FT: `dp_fed_avg_ft` with a pull to the shared weights. `prox_weight` is twice the lambda of the PMTL
    paper, whose published code has lambda = 1.

    Args:
      head: names of the weights that clients tune.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """
    tuned = build_dp_fed_avg_ft(
        head=head,
        server_optimizer=server_optimizer,
        server_learning_rate=server_learning_rate,
        server_momentum=server_momentum,
    )
    return dataclasses.replace(
        tuned, name="pmtl_ft", title="PMTL, tuned heads", hparams={**tuned.hparams, "prox_weight": prox_weight(2.0)}
    )
