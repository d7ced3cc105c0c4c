"""PPPFL (Tran et al., "Personalized Privacy-Preserving Framework for Cross-Silo Federated Learning", arXiv:2302.11020).

In meta-learning, PPPFL is FedMeta (`fed_meta`) with two stabilisers:

* *An exponential moving average of a client's parameters.* A client's local steps start from
  `theta + rho (theta_m - theta)`, where theta are the shared weights and theta_m is the client's own model of the last
  round; in a client's first round theta_m is theta. The paper's text only says that parameters are averaged with those
  of the last round, and the released code has no average: this reading is ours. rho = 0 is FedMeta.
* *Cosine cycles of the server's learning rate.* In round t of T the rate is
  `beta / 2 (cos(pi ((t - 1) mod L) / L) + 1)` with `L = ceil(T / cycles)`, as in snapshot ensembles (Huang et al.,
  arXiv:1704.00109).

The paper also weights clients by a softmax of their budgets: `training.weighting: budget_softmax`. In the paper the
rounds are on synthetic data of the silos, so gradients there need neither clip nor noise. With the orders `first` and
`reptile` the method is also one like any other, whose gradients may be clipped and noised.
"""

import dataclasses
import math

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import HParam
from tff_pdp.algorithms.meta_learning.fed_meta import build_fed_meta
from tff_pdp.algorithms.meta_learning.meta_gradient import Order, adapt_and_query
from tff_pdp.algorithms.server_optimizer import AdamKind, Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.settings import CountOrZero, NotNegative, Positive

_AVERAGE = HParam(
    0.5, "share of the client's own model of the last round in the start of its local steps", symbol="ρ", high=1.0
)


def build_pppfl(
    *,
    rounds: int,
    order: Order = "first",
    cycles: CountOrZero = 3,
    server_optimizer: OptimizerKind = "adam",
    server_learning_rate: Positive = 0.03,
    server_momentum: Momentum = 0.9,
    server_adam: AdamKind = "kingma_ba",
    weight_decay: NotNegative = 1e-6,
) -> Algorithm:
    """Builds PPPFL. Server state: the shared weights, optimizer, number of rounds. Client state: the weights that it
    adapted in its last round. Released: the update, averaged.

    Args:
      rounds: T, number of rounds of the whole training.
      order: the update that a client releases, as for `fed_meta`; `second` is only without clip and noise.
      cycles: number of cosine cycles of the server's learning rate in the whole training; 0 for a constant rate.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: beta, largest learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
      server_adam: form of `adam`: `kingma_ba` (1e-8 beside the root, decay 0.999 of squares, first rounds corrected) or
        `reddi` (1e-3, 0.99, no correction), as in other methods.
      weight_decay: factor of the shared weights that is subtracted from the mean update, before the optimizer.
    """
    fed_meta = build_fed_meta(order=order)
    optimizer = build_server_optimizer(server_optimizer, server_learning_rate, server_momentum, server_adam)
    length = math.ceil(rounds / cycles) if cycles else 1

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        shared, share = broadcast["weights"], hparams["moving_average"]
        # In this form an average of equal weights, or with share 0, has the bits of the shared weights.
        start = map_weights(lambda w, own: w + share * (own - w), shared, client_state["weights"])
        adapted, update = adapt_and_query(order, start, shared, data, grad_fn, hparams)
        return ClientResult(state={"weights": adapted}, released={"update": update})

    def server_update(state, aggregates):
        weights, update = state["weights"], aggregates["update"]
        if weight_decay:
            update = map_weights(lambda u, w: u - weight_decay * w, update, weights)
        place = tf.cast(state["round"] % length, tf.float32) / length
        rate = server_learning_rate * (0.5 * (tf.cos(math.pi * place) + 1.0))
        after, moved = optimizer.apply(state["optimizer"], weights, update, rate)
        return {"weights": moved, "optimizer": after, "round": state["round"] + 1}

    return dataclasses.replace(
        fed_meta,
        name="pppfl",
        title="PPPFL",
        hparams={**fed_meta.hparams, "moving_average": _AVERAGE},
        init_server=lambda weights: {
            "weights": weights,
            "optimizer": optimizer.init(weights),
            "round": tf.constant(0),
        },
        client_update=client_update,
        server_update=server_update,
    )
