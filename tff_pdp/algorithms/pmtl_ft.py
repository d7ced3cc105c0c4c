"""PMTL-FT: private multi-task learning by a pull to the shared model, then fine-tuned heads (Hu et al., "Private
Multi-Task Learning: Formulation and Applications to Federated Learning", TMLR 2023).

A client minimises its loss plus `lambda |w - w_t|^2` around the shared weights `w_t` and releases how far it moved;
before its model is used it tunes the head.
"""

import dataclasses
from collections.abc import Sequence

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.shared_parts.dp_fed_avg_ft import build_dp_fed_avg_ft


def build_pmtl_ft(
    *,
    head: Sequence[str],
    server_optimizer: str = "sgd",
    server_learning_rate: float = 1.0,
    server_momentum: float = 0.9,
) -> Algorithm:
    """Builds it: `build_dp_fed_avg_ft` with `prox_weight`, which is twice lambda; the published code has lambda = 1."""
    tuned = build_dp_fed_avg_ft(
        head=head,
        server_optimizer=server_optimizer,
        server_learning_rate=server_learning_rate,
        server_momentum=server_momentum,
    )
    return dataclasses.replace(
        tuned, name="pmtl_ft", title="PMTL, tuned heads", hparams={**tuned.hparams, "prox_weight": 2.0}
    )
