"""FedMeta (Chen et al., "Federated Meta-Learning with Fast Convergence and Efficient Communication", arXiv:1802.07876),
MAML of second order, and Reptile.

The shared weights theta are trained to be a good start. From theta, a client's own local steps lead to theta_m, the
client's model. A client releases an update of theta (`meta_gradient`), and the server's optimizer takes a step by the
mean of the updates. In first-order FedMeta the update is the negative gradient at theta_m, on the batches that follow
those of the steps: other batches, if steps and query together are at most one epoch. Second order needs the derivative
of the steps, so their gradients must have neither clip nor noise.
"""

from tff_pdp.algorithms.base import Algorithm, ClientResult
from tff_pdp.algorithms.meta_learning.meta_gradient import Order, adapt_and_query, hparams_of
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.settings import Positive

_TITLES = {"first": "FedMeta", "second": "MAML", "reptile": "Reptile"}


def build_fed_meta(
    *,
    order: Order = "first",
    server_optimizer: OptimizerKind = "adam",
    server_learning_rate: Positive = 0.03,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds FedMeta, MAML or Reptile. Server state: the shared weights, optimizer. Client state: the weights that it
    adapted in its last round. Released: the update, averaged.

    Args:
      order: `first`: the update is the negative gradient at the adapted weights, a mean over `query_steps` batches.
        `second` (MAML): the update is the negative gradient, with respect to the shared weights, of the loss that the
        adapted weights have on these batches; only without clip and noise. `reptile`: the update is the movement of the
        local steps.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """
    optimizer = build_server_optimizer(server_optimizer, server_learning_rate, server_momentum)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        shared = broadcast["weights"]
        adapted, update = adapt_and_query(order, shared, shared, data, grad_fn, hparams)
        return ClientResult(state={"weights": adapted}, released={"update": update})

    def server_update(state, aggregates):
        after, weights = optimizer.apply(state["optimizer"], state["weights"], aggregates["update"])
        return {"weights": weights, "optimizer": after}

    return Algorithm(
        name="fed_meta",
        title=_TITLES[order],
        hparams=hparams_of(order),
        released={"update": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights, "optimizer": optimizer.init(weights)},
        # Until a client has trained, its model is the shared one.
        init_client=lambda broadcast: {"weights": broadcast["weights"]},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: client_state["weights"],
        # The shared weights are made to be a good start; a client's own are already adapted, to synthetic data.
        adaptation_start=lambda broadcast, client_state: broadcast["weights"],
        # A client that takes part now and then would keep weights adapted from an old start.
        needs_everyone=True,
        needs_plain_gradients=order == "second",
    )
