"""A hypernetwork without privacy: pFedHN (Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML
2021). With user-level privacy it is UDP-Alg, whose steps it shares.
"""

import dataclasses
from collections.abc import Sequence

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.shared_parts.udp_hypernet import build_udp_hypernet


def build_hypernet(
    *, descriptor_size: int = 8, hidden_units: Sequence[int] = (100, 100, 100), head_scale: float = 0.1
) -> Algorithm:
    """Builds it: `build_udp_hypernet` with a server that adds the mean update as it is."""
    return dataclasses.replace(
        build_udp_hypernet(descriptor_size=descriptor_size, hidden_units=hidden_units, head_scale=head_scale),
        name="hypernet",
        title="Hypernetwork",
    )
