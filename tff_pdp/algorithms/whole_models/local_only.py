"""Local training: every client trains alone and nothing leaves it.

The baseline that personalisation has to beat: no bias from other clients, all of the variance of little data.
"""

from tff_pdp.algorithms.base import Algorithm, ClientResult
from tff_pdp.algorithms.hyper_parameters import LEARNING_RATE, LOCAL_STEPS
from tff_pdp.algorithms.local_sgd import local_sgd


def build_local_only() -> Algorithm:
    """Builds local training. Server state: the initial weights, never updated. Client state: the client's weights."""

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        del broadcast
        weights = local_sgd(
            client_state["weights"],
            data,
            grad_fn,
            learning_rate=hparams["learning_rate"],
            local_steps=hparams["local_steps"],
        )
        return ClientResult(state={"weights": weights}, released={})

    return Algorithm(
        name="local_only",
        title="Local only",
        hparams={"learning_rate": LEARNING_RATE, "local_steps": LOCAL_STEPS},
        released={},
        data_passes=1,
        init_server=lambda weights: {"weights": weights},
        broadcast=lambda state: {"weights": state["weights"]},
        init_client=lambda broadcast: {"weights": broadcast["weights"]},
        client_update=client_update,
        server_update=lambda state, aggregates: state,
        personalise=lambda broadcast, client_state: client_state["weights"],
        global_model=None,
    )
