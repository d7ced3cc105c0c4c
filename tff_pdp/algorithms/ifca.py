"""IFCA (Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020), selecting privately.

Every client selects its cluster anew in every round. Selection reads all of a client's examples, so no sampling makes
it cheaper: over a whole training it can cost more than the gradients. The methods named `ifca_...` select in the first
rounds only.
"""

from tff_pdp.algorithms.base import Algorithm
from tff_pdp.algorithms.clustered_fed_avg import build_clustered_fed_avg


def build_ifca(*, rounds: int, num_clusters: int = 4, init_stddev: float = 0.1) -> Algorithm:
    """Builds IFCA; states and releases as `build_clustered_fed_avg`.

    Args:
      rounds: of the whole training.
      num_clusters: how many clusters.
      init_stddev: how far the clusters' first models lie apart.
    """
    return build_clustered_fed_avg(
        name="ifca",
        title="IFCA",
        num_clusters=num_clusters,
        init_stddev=init_stddev,
        rounds=rounds,
        selection_rounds=rounds,
        federated_rounds=rounds,
    )
