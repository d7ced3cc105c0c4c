"""APFL (Deng et al., "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020), with a given mixture.

The shared model w is trained by FedAvg. Each client also trains weights v of its own, by the gradient at the client's
model, the mixture `alpha v + (1 - alpha) w`. Both v and w take local steps, so a client touches its data twice as often
as in FedAvg. The paper takes both gradients of a step on one batch; here each gradient is a separate release, on a
separate batch. The paper also has a form that learns alpha; here alpha is fixed.
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, HParam
from tff_pdp.algorithms.local_sgd import Trajectory, View, local_sgd


def build_apfl() -> Algorithm:
    """Builds APFL. Server state: the shared weights. Client state: its own weights, and alpha. Released: the shared
    update, averaged.
    """

    def mix(share, own, shared):
        return map_weights(lambda v, w: share * v + (1.0 - share) * w, own, shared)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        share = hparams["mixture"]
        mixture = View(
            lambda shared, own: mix(share, own, shared),
            # By the chain rule.
            lambda gradient, own: map_weights(lambda value: share * value, gradient),
        )
        shared, own = local_sgd(
            (Trajectory(broadcast["weights"]), Trajectory(client_state["weights"], view=mixture)),
            data,
            grad_fn,
            hparams["learning_rate"],
            hparams["local_steps"],
        )
        update = map_weights(lambda new, old: new - old, shared, broadcast["weights"])
        return ClientResult(state={"weights": own, "share": share}, released={"update": update})

    return Algorithm(
        name="apfl",
        title="APFL",
        hparams={
            **LOCAL_TRAINING,
            "mixture": HParam(0.5, "share of a client's own weights in its model", symbol="α", high=1.0),
        },
        released={"update": "mean"},
        data_passes=2,
        # Before a client trains, its model is the shared one.
        init_client=lambda broadcast: {"weights": broadcast["weights"], "share": tf.constant(0.0)},
        client_update=client_update,
        personalise=lambda broadcast, client_state: mix(
            client_state["share"], client_state["weights"], broadcast["weights"]
        ),
        # A client that comes late would start from the initial weights.
        needs_everyone=True,
    )
