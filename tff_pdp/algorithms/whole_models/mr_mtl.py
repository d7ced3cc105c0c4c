"""MR-MTL: mean-regularised multi-task learning (Liu et al., "On Privacy and Personalization in Cross-Silo Federated
Learning", NeurIPS 2022).

Each client keeps its own weights and trains them with a pull of strength lambda (`prox_weight`) to the mean of all
clients' weights; it releases its weights' movement, and the server adds the average movement to the mean. lambda = 0 is
local training; a large lambda approaches FedAvg. Between the two, a client's DP noise is averaged away in the mean
while its own data still shapes its own model.
"""

from tff_pdp.algorithms.auto_prox.lambdas import AutoProx
from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd


def build_mr_mtl(*, prox_inside_clip: bool = False) -> Algorithm:
    """Builds MR-MTL. Server state: the mean. Client state: its weights. Released: the client's movement, averaged.

    Args:
      prox_inside_clip: add the pull to each example's gradient before the clip, as the paper's released code does; by
        default the pull is added after clip and noise.
    """

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        own = Trajectory(
            client_state["weights"],
            anchor=broadcast["mean"],
            prox_weight=hparams["prox_weight"],
            prox_inside_clip=prox_inside_clip,
        )
        weights = local_sgd(own, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        movement = map_weights(lambda new, old: new - old, weights, client_state["weights"])
        return ClientResult(state={"weights": weights}, released={"movement": movement})

    return Algorithm(
        name="mr_mtl",
        title="MR-MTL",
        hparams={
            **LOCAL_TRAINING,
            "prox_weight": prox_weight(
                1.0,
                "the mean",
                is_auto=not prox_inside_clip,
                not_auto="with prox_inside_clip the clip shortens the pull by an unknown factor",
            ),
        },
        released={"movement": "mean"},
        data_passes=1,
        init_server=lambda weights: {"mean": weights},
        broadcast=lambda state: {"mean": state["mean"]},
        # Every client starts at the mean, so that the server's running mean is the mean of the clients' weights.
        init_client=lambda broadcast: {"weights": broadcast["mean"]},
        client_update=client_update,
        server_update=lambda state, aggregates: {
            "mean": map_weights(lambda mean, moved: mean + moved, state["mean"], aggregates["movement"])
        },
        personalise=lambda broadcast, client_state: client_state["weights"],
        global_model=lambda state: state["mean"],
        # The server's mean moves by the mean movement: it stays the mean of all weights only if all clients move.
        needs_everyone=True,
        hook=AutoProx,
    )
