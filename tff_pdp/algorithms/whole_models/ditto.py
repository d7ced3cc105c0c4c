"""Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021).

The shared model is trained by FedAvg, untouched by personalisation. Each client also trains weights of its own with a
pull of strength lambda (`prox_weight`) to the shared weights. Both sets of weights take local steps, so a client
touches its data twice as often as in MR-MTL: for an equal budget, every gradient has more noise.
"""

from tff_pdp.algorithms.base import Algorithm, ClientResult, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd


def build_ditto(*, prox_inside_clip: bool = False) -> Algorithm:
    """Builds Ditto. Server state: the shared weights. Client state: its own weights. Released: the shared update.

    Args:
      prox_inside_clip: add the pull to each example's gradient before the clip, as the MR-MTL paper's released code
        does; by default the pull is added after clip and noise.
    """

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        rate, steps = hparams["learning_rate"], hparams["local_steps"]
        shared = local_sgd(broadcast["weights"], data, grad_fn, rate, steps)
        own = Trajectory(
            client_state["weights"],
            anchor=broadcast["weights"],
            prox_weight=hparams["prox_weight"],
            prox_inside_clip=prox_inside_clip,
        )
        personal = local_sgd(own, data, grad_fn, rate, steps, first_index=steps.count)
        update = map_weights(lambda new, old: new - old, shared, broadcast["weights"])
        return ClientResult(state={"weights": personal}, released={"update": update})

    return Algorithm(
        name="ditto",
        title="Ditto",
        hparams={**LOCAL_TRAINING, "prox_weight": prox_weight(1.0)},
        released={"update": "mean"},
        data_passes=2,
        init_client=lambda broadcast: {"weights": broadcast["weights"]},
        client_update=client_update,
        personalise=lambda broadcast, client_state: client_state["weights"],
        # A client that comes late would start from the initial weights.
        needs_everyone=True,
    )
