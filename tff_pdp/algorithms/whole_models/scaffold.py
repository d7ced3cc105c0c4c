"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv:1910.06378,
ICML 2020), with option II of the paper's Algorithm 1.

Clients with unlike data drift to their own optima in local steps. Each client keeps a control c_m, the mean gradient of
its last round, and the server keeps the mean c of all controls. A local step moves by `-eta (g - c_m + c)`, that is, as
far as the mean client would. After tau steps from w_t to w_m the new control is `c_m - c + (w_t - w_m) / (tau eta)`.

The paper's server adds to c the mean change of controls, times the share of clients that take part in the round. Here c
becomes the mean of the new controls. Both are equal while all clients take part. Once a client has left, the paper's c
would hold the client's last gradient for ever, and would pull the others away from their own optimum.

The correction is added after the clip and the noise. A control is a mean of noised gradients, so corrections have
noise, too. The corrections of all clients have mean zero: with equal rates and steps, no noise of corrections enters
the mean update.
"""

import dataclasses

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LEARNING_RATE, LOCAL_TRAINING
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.settings import Positive


def build_scaffold(*, server_rate: Positive = 1.0) -> Algorithm:
    """Builds SCAFFOLD. Server state: the shared weights, and the mean control. Client state: its control. Released: the
    update and the new control, averaged.

    Args:
      server_rate: eta_g, factor of the mean update at the server.
    """

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        shared, rate, steps = broadcast["weights"], hparams["learning_rate"], hparams["local_steps"]
        correction = map_weights(lambda c, own: c - own, broadcast["control"], client_state["control"])
        own = Trajectory(shared, penalty=lambda weights: correction)
        weights = local_sgd(own, data, grad_fn, rate, steps)
        update = map_weights(lambda new, old: new - old, weights, shared)
        length = tf.cast(steps.count, tf.float32) * rate
        control = map_weights(lambda extra, moved: -extra - moved / length, correction, update)
        return ClientResult(state={"control": control}, released={"update": update, "control": control})

    def no_control(weights):
        return map_weights(tf.zeros_like, weights)

    return Algorithm(
        name="scaffold",
        title="SCAFFOLD",
        # A control is a movement divided by the rate.
        hparams={**LOCAL_TRAINING, "learning_rate": dataclasses.replace(LEARNING_RATE, low=1e-6)},
        released={"update": "mean", "control": "mean"},
        data_passes=1,
        init_server=lambda weights: {"weights": weights, "control": no_control(weights)},
        broadcast=lambda state: {"weights": state["weights"], "control": state["control"]},
        init_client=lambda broadcast: {"control": no_control(broadcast["weights"])},
        client_update=client_update,
        server_update=lambda state, aggregates: {
            "weights": map_weights(lambda w, u: w + server_rate * u, state["weights"], aggregates["update"]),
            "control": aggregates["control"],
        },
        personalise=lambda broadcast, client_state: broadcast["weights"],
        # The mean of a few clients' controls would be far from the mean gradient of all.
        needs_everyone=True,
    )
