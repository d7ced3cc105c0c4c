"""FedMeta (Chen et al., "Federated Meta-Learning with Fast Convergence and Efficient Communication", arXiv:1802.07876)
and Reptile (Nichol et al., "On First-Order Meta-Learning Algorithms", arXiv:1803.02999).

The shared weights theta are trained to be a good start. From theta, a client's own local steps lead to theta_m, the
client's model. In first-order FedMeta (first-order MAML) a client releases the negative gradient at theta_m, on other
batches than those of the steps. In Reptile a client releases the movement from theta to theta_m. The server's optimizer
takes a step by the mean of the releases. MAML of second order would need the derivative of the steps, whose gradients
are clipped and noised.
"""

from typing import Literal

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, Steps
from tff_pdp.algorithms.local_sgd import Trajectory, View, local_sgd
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.settings import Positive


def build_fed_meta(
    *,
    order: Literal["first", "reptile"] = "first",
    server_optimizer: OptimizerKind = "adam",
    server_learning_rate: Positive = 0.03,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds FedMeta or Reptile. Server state: the shared weights, optimizer. Client state: the weights that it adapted
    in its last round. Released: the update, averaged.

    Args:
      order: `first`: the update is the negative gradient at the adapted weights, a mean over `query_steps` batches.
        `reptile`: the update is the movement of the local steps.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """
    is_reptile = order == "reptile"
    optimizer = build_server_optimizer(server_optimizer, server_learning_rate, server_momentum)

    def descent(adapted, data, grad_fn, steps, first_index):
        """Returns the negative mean of gradients at fixed weights: the movement of a trajectory that starts at zero."""
        at_adapted = View(lambda moved: adapted, lambda gradient, moved: gradient)
        nothing = Trajectory(map_weights(tf.zeros_like, adapted), view=at_adapted)
        return local_sgd(nothing, data, grad_fn, 1.0 / tf.cast(steps.count, tf.float32), steps, first_index)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        shared, steps = broadcast["weights"], hparams["local_steps"]
        adapted = local_sgd(shared, data, grad_fn, hparams["learning_rate"], steps)
        if is_reptile:
            update = map_weights(lambda new, old: new - old, adapted, shared)
        else:
            update = descent(adapted, data, grad_fn, hparams["query_steps"], steps.count)
        return ClientResult(state={"weights": adapted}, released={"update": update})

    def server_update(state, aggregates):
        after, weights = optimizer.apply(state["optimizer"], state["weights"], aggregates["update"])
        return {"weights": weights, "optimizer": after}

    query = {"query_steps": Steps(1, "size of the mean of gradients at the adapted weights", "τ_q", "batches")}
    return Algorithm(
        name="fed_meta",
        title="Reptile" if is_reptile else "FedMeta",
        hparams=dict(LOCAL_TRAINING) if is_reptile else {**LOCAL_TRAINING, **query},
        released={"update": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights, "optimizer": optimizer.init(weights)},
        # Until a client has trained, its model is the shared one.
        init_client=lambda broadcast: {"weights": broadcast["weights"]},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: client_state["weights"],
        # A client that takes part now and then would keep weights adapted from an old start.
        needs_everyone=True,
    )
