"""FedRep: a shared body, and a head of every client's own (Collins et al., "Exploiting Shared Representations for
Personalized Federated Learning", ICML 2021). With user-level privacy it is CENTAUR, whose steps it shares.
"""

import dataclasses
from collections.abc import Sequence

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.shared_parts.centaur import build_centaur


def build_fed_rep(*, head: Sequence[str], local_momentum: float = 0.0) -> Algorithm:
    """Builds FedRep: `build_centaur` with a server that adds the mean update as it is."""
    return dataclasses.replace(build_centaur(head=head, local_momentum=local_momentum), name="fed_rep", title="FedRep")
