"""CENTAUR and FedRep: a shared body, and a head per client.

In a round a client first trains its head with the body frozen, then the body with the head frozen, and releases the
body's movement. Under user-level privacy the method is CENTAUR (Shen et al., "Share Your Representation Only:
Guaranteed Improvement of the Privacy-Utility Tradeoff in Federated Learning", ICLR 2023); without privacy it is FedRep
(Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021).
"""

import dataclasses
from collections.abc import Sequence

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.partial_sharing import HEAD_THEN_BODY, build_partial_sharing, head_then_body
from tff_pdp.algorithms.server_optimizer import Momentum, OptimizerKind, build_server_optimizer
from tff_pdp.settings import Positive


def build_centaur(
    *,
    head: Sequence[str],
    local_momentum: Momentum = 0.0,
    server_optimizer: OptimizerKind = "sgd",
    server_learning_rate: Positive = 1.0,
    server_momentum: Momentum = 0.9,
) -> Algorithm:
    """Builds CENTAUR. Server state: weights, optimizer. Client state: its head. Released: the body's update, averaged.

    Args:
      head: names of the weights that stay at each client.
      local_momentum: momentum of a client's steps on the body; the paper's code has 0.9.
      server_optimizer: optimizer at the server: `sgd`, `momentum` or `adam`.
      server_learning_rate: learning rate of the server's optimizer.
      server_momentum: momentum of the server's optimizer, for `momentum` and `adam`.
    """
    return build_partial_sharing(
        name="centaur",
        title="CENTAUR",
        head=head,
        hparams=HEAD_THEN_BODY,
        train=head_then_body(head, local_momentum),
        optimizer=build_server_optimizer(server_optimizer, server_learning_rate, server_momentum),
    )


def build_fed_rep(*, head: Sequence[str], local_momentum: Momentum = 0.0) -> Algorithm:
    """Builds FedRep: `centaur` with a server that adds the mean update.

    Args:
      head: names of the weights that stay at each client.
      local_momentum: momentum of a client's steps on the body.
    """
    return dataclasses.replace(build_centaur(head=head, local_momentum=local_momentum), name="fed_rep", title="FedRep")
