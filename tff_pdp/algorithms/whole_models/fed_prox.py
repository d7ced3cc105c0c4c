"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127, MLSys 2020).

FedProx is FedAvg whose local steps have a pull of strength mu (`prox_weight`) to the shared weights of the round. The
pull keeps clients with unlike data, or with many local steps, near each other. The pull is added after the clip and the
noise, so the pull costs no privacy and shrinks the noise of early steps. mu = 0 is FedAvg.
"""

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, HParam
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd


def build_fed_prox() -> Algorithm:
    """Builds FedProx. Server state: the shared weights. Client state: nothing. Released: the update, averaged."""

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        shared = broadcast["weights"]
        own = Trajectory(shared, anchor=shared, prox_weight=hparams["prox_weight"])
        weights = local_sgd(own, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        update = map_weights(lambda new, old: new - old, weights, shared)
        return ClientResult(state=client_state, released={"update": update})

    return Algorithm(
        name="fed_prox",
        title="FedProx",
        hparams={
            **LOCAL_TRAINING,
            "prox_weight": HParam(0.01, "strength of the pull to the shared weights", "μ", "loss per weight²"),
        },
        released={"update": "mean"},
        data_passes=1,
        init_client=lambda broadcast: {},
        client_update=client_update,
        personalise=lambda broadcast, client_state: broadcast["weights"],
    )
