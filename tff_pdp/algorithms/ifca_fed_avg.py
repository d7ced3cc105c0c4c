"""FedAvg within clusters that IFCA forms in the first rounds (Liu et al., NeurIPS 2022, section 4 and appendix C)."""

from tff_pdp.algorithms.base import Algorithm, rounds_of
from tff_pdp.algorithms.clustered_fed_avg import build_clustered_fed_avg


def build_ifca_fed_avg(
    *, rounds: int, num_clusters: int = 4, selection_fraction: float = 0.1, init_stddev: float = 0.1
) -> Algorithm:
    """Builds the method; states and releases as `build_clustered_fed_avg`.

    Args:
      rounds: of the whole training.
      num_clusters: how many clusters.
      selection_fraction: share of the rounds, from the first, in which clients select their cluster.
      init_stddev: how far the clusters' first models lie apart.
    """
    return build_clustered_fed_avg(
        name="ifca_fed_avg",
        title="IFCA, then FedAvg",
        num_clusters=num_clusters,
        init_stddev=init_stddev,
        rounds=rounds,
        selection_rounds=rounds_of(selection_fraction, rounds),
        federated_rounds=rounds,
    )
