"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

Each client starts from the shared weights, takes local steps and releases the difference; the server adds the uniform
mean of the differences. Every client's model is the shared model. Weighting clients by numbers of examples would make
the mean depend on private counts.
"""

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING
from tff_pdp.algorithms.local_sgd import local_sgd


def build_fed_avg() -> Algorithm:
    """Builds FedAvg. Server state: the shared weights. Client state: nothing. Released: the update, averaged."""

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        weights = local_sgd(broadcast["weights"], data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        update = map_weights(lambda new, old: new - old, weights, broadcast["weights"])
        return ClientResult(state=client_state, released={"update": update})

    return Algorithm(
        name="fed_avg",
        title="FedAvg",
        hparams=LOCAL_TRAINING,
        released={"update": "mean"},
        data_passes=1,
        init_client=lambda broadcast: {},
        client_update=client_update,
        personalise=lambda broadcast, client_state: broadcast["weights"],
    )
