"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

Each client starts from the shared weights, takes local steps and releases the difference; the server adds the uniform
mean of the differences. One model for all: the personal model is the shared one. The mean is not weighted by the
number of examples, which would make it depend on private counts.
"""

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LEARNING_RATE, LOCAL_STEPS
from tff_pdp.algorithms.local_sgd import local_sgd


def build_fed_avg() -> Algorithm:
    """Builds FedAvg. Server state: the shared weights. Client state: nothing. Released: the update, averaged."""

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        weights = local_sgd(
            broadcast["weights"],
            data,
            grad_fn,
            learning_rate=hparams["learning_rate"],
            local_steps=hparams["local_steps"],
        )
        update = map_weights(lambda new, old: new - old, weights, broadcast["weights"])
        return ClientResult(state=client_state, released={"update": update})

    return Algorithm(
        name="fed_avg",
        title="FedAvg",
        hparams={"learning_rate": LEARNING_RATE, "local_steps": LOCAL_STEPS},
        released={"update": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights},
        broadcast=lambda state: {"weights": state["weights"]},
        init_client=lambda broadcast: {},
        client_update=client_update,
        server_update=lambda state, aggregates: {
            "weights": map_weights(lambda w, u: w + u, state["weights"], aggregates["update"])
        },
        personalise=lambda broadcast, client_state: broadcast["weights"],
        global_model=lambda state: state["weights"],
    )
