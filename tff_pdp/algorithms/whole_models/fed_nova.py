"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
arXiv:2007.07481, NeurIPS 2020).

FedAvg moves towards clients that take many local steps. Here each client releases a direction: its update divided by
its number of steps tau. The server moves by the mean direction times the mean tau. A client has the same weight in both
means. This is the paper's method for local steps without momentum or pull.
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING
from tff_pdp.algorithms.local_sgd import local_sgd


def build_fed_nova() -> Algorithm:
    """Builds FedNova. Server state: the shared weights. Client state: nothing. Released: the update divided by the
    number of steps, averaged. Public: the number of steps.
    """

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        steps = hparams["local_steps"]
        weights = local_sgd(broadcast["weights"], data, grad_fn, hparams["learning_rate"], steps)
        count = tf.cast(steps.count, tf.float32)
        direction = map_weights(lambda new, old: (new - old) / count, weights, broadcast["weights"])
        return ClientResult(state=client_state, released={"direction": direction})

    def server_update(state, aggregates):
        steps = aggregates["steps"]
        return {"weights": map_weights(lambda w, d: w + steps * d, state["weights"], aggregates["direction"])}

    return Algorithm(
        name="fed_nova",
        title="FedNova",
        hparams=LOCAL_TRAINING,
        released={"direction": "mean"},
        public={"steps": "weighted_mean"},
        public_values=lambda hparams: {"steps": tf.cast(hparams["local_steps"].count, tf.float32)},
        data_passes=1,
        init_client=lambda broadcast: {},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: broadcast["weights"],
    )
