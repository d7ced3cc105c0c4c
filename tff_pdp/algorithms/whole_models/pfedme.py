"""pFedMe (Dinh et al., "Personalized Federated Learning with Moreau Envelopes", arXiv:2006.08848, NeurIPS 2020).

In each of R local steps a client first takes K gradient steps of its own model theta, with a pull of strength lambda to
w, its local copy of the shared model. Then it moves w by `-eta lambda (w - theta)`, which is a gradient step on the
Moreau envelope of its loss. In the paper the K steps share a batch. Here each of the R times K gradients of a round is
a release of its own, with a batch of its own. As in the released code, each local step starts from the previous step's
theta.
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import HParam, Steps, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.settings import Positive


def build_pfedme(*, server_rate: Positive = 1.0) -> Algorithm:
    """Builds pFedMe. Server state: the shared weights. Client state: its own weights. Released: the shared update,
    averaged.

    Args:
      server_rate: beta, factor of the mean update at the server.
    """

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        outer, inner, pull = hparams["local_steps"], hparams["inner_steps"], hparams["prox_weight"]

        def step(index, shared, own):
            is_own = index < outer.count
            rate = tf.where(is_own, hparams["learning_rate"], 0.0)
            # Steps after a client's own would ask for more gradients than there are.
            first = tf.minimum(index, outer.count - 1) * inner.count
            own = local_sgd(Trajectory(own, anchor=shared, prox_weight=pull), data, grad_fn, rate, inner, first)
            rate = tf.where(is_own, hparams["outer_learning_rate"] * pull, 0.0)
            return index + 1, map_weights(lambda w, theta: w - rate * (w - theta), shared, own), own

        start = map_weights(tf.convert_to_tensor, broadcast["weights"])
        _, shared, own = tf.while_loop(
            lambda index, *_: index < outer.bound, step, (tf.constant(0), start, start), parallel_iterations=1
        )
        return ClientResult(state={"weights": own}, released={"update": map_weights(tf.subtract, shared, start)})

    return Algorithm(
        name="pfedme",
        title="pFedMe",
        hparams={
            "learning_rate": HParam(0.1, "learning rate of a client's own weights", "η_θ", "weight² per loss"),
            "outer_learning_rate": HParam(0.5, "learning rate of the shared weights", "η", "weight² per loss"),
            "local_steps": Steps(1, "steps of the shared weights in a client's round", "R", factors=("inner_steps",)),
            "inner_steps": Steps(5, "steps of a client's own weights in each local step", "K"),
            "prox_weight": prox_weight(1.0),
        },
        released={"update": "mean"},
        data_passes=1,
        init_client=lambda broadcast: {"weights": broadcast["weights"]},
        client_update=client_update,
        server_update=lambda state, aggregates: {
            "weights": map_weights(lambda w, u: w + server_rate * u, state["weights"], aggregates["update"])
        },
        personalise=lambda broadcast, client_state: client_state["weights"],
        # A client that never takes part would keep the initial weights.
        needs_everyone=True,
    )
