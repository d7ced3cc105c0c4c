"""FedPer: a shared body and a head per client, trained together (Arivazhagan et al., "Federated Learning with
Personalization Layers", arXiv:1912.00818, 2019).
"""

from collections.abc import Sequence

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.hyper_parameters import HEAD_LEARNING_RATE, LEARNING_RATE, LOCAL_STEPS
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.algorithms.partial_sharing import build_partial_sharing
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.settings import Positive


def build_fed_per(
    *,
    head: Sequence[str],
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds FedPer. Server state: weights, optimizer. Client state: its head. Released: the body's update, averaged.

    Args:
      head: names of the weights that stay at each client.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """

    def train(weights, data, grad_fn, hparams):
        return local_sgd(weights, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])

    return build_partial_sharing(
        name="fed_per",
        title="FedPer",
        head=head,
        hparams={
            "learning_rate": LEARNING_RATE,
            "head_learning_rate": HEAD_LEARNING_RATE,
            "local_steps": LOCAL_STEPS,
        },
        train=train,
        optimizer=build_server_optimizer(server_optimizer, server_learning_rate, server_momentum),
    )
