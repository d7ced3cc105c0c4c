"""Local training, and fine-tuning: FedAvg first, then every client continues alone from the shared weights.

Local training is the baseline that personalisation has to beat: it has no bias from other clients, but the full
variance of little data. Fine-tuning (Wang et al., "Federated Evaluation of On-device Personalization",
arXiv:1910.10252) is the second baseline: once a client fine-tunes, it releases nothing more.
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, choose, map_weights, rounds_of
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.settings import Fraction


def build_local_only() -> Algorithm:
    """Builds local training. Server state: the initial weights, never updated. Client state: its weights."""

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        weights = local_sgd(client_state["weights"], data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        return ClientResult(state={"weights": weights}, released={})

    return Algorithm(
        name="local_only",
        title="Local only",
        hparams=LOCAL_TRAINING,
        released={},
        data_passes=1,
        init_client=lambda broadcast: {"weights": broadcast["weights"]},
        client_update=client_update,
        server_update=lambda state, aggregates: state,
        personalise=lambda broadcast, client_state: client_state["weights"],
        global_model=None,
    )


def build_finetune(*, rounds: int, federated_fraction: Fraction = 0.5) -> Algorithm:
    """Builds fine-tuning. Server state: the shared weights and the number of rounds so far. Client state: its weights,
    and whether it fine-tunes already. Released: the update, averaged; zeros once clients fine-tune.

    Args:
      rounds: number of rounds of the whole training.
      federated_fraction: share of the rounds, from the first, that train the shared model; then clients fine-tune.
    """
    federated_rounds = rounds_of(federated_fraction, rounds)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        start = choose(client_state["is_own"], client_state["weights"], broadcast["weights"])
        weights = local_sgd(start, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        is_federated = broadcast["round"] < federated_rounds
        update = map_weights(lambda new, old: tf.where(is_federated, new - old, 0.0), weights, start)
        state = {"weights": weights, "is_own": tf.logical_not(is_federated)}
        return ClientResult(state=state, released={"update": update})

    return Algorithm(
        name="finetune",
        title="Fine-tuning",
        hparams=LOCAL_TRAINING,
        released={"update": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights, "round": tf.constant(0)},
        broadcast=lambda state: {"weights": state["weights"], "round": state["round"]},
        init_client=lambda broadcast: {"weights": broadcast["weights"], "is_own": tf.constant(False)},
        client_update=client_update,
        server_update=lambda state, aggregates: {
            "weights": map_weights(lambda w, u: w + u, state["weights"], aggregates["update"]),
            "round": state["round"] + 1,
        },
        # A client that has not fine-tuned (because it left before) has the shared model.
        personalise=lambda broadcast, client_state: choose(
            client_state["is_own"], client_state["weights"], broadcast["weights"]
        ),
        # Clients that take no part in the last rounds would never fine-tune.
        needs_everyone=True,
    )
