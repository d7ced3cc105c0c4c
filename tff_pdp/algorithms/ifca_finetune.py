"""Fine-tuning from the models of clusters that IFCA forms in the first rounds (Liu et al., NeurIPS 2022)."""

from tff_pdp.algorithms.base import Algorithm, rounds_of
from tff_pdp.algorithms.clustered_fed_avg import build_clustered_fed_avg


def build_ifca_finetune(
    *,
    rounds: int,
    num_clusters: int = 4,
    selection_fraction: float = 0.1,
    federated_fraction: float = 0.5,
    init_stddev: float = 0.1,
) -> Algorithm:
    """Builds the method; states and releases as `build_clustered_fed_avg`.

    Args:
      rounds: of the whole training.
      num_clusters: how many clusters.
      selection_fraction: share of the rounds, from the first, in which clients select their cluster.
      federated_fraction: share of the rounds, these included, that train the clusters' models; then every client
        fine-tunes alone.
      init_stddev: how far the clusters' first models lie apart.
    """
    selection_rounds = rounds_of(selection_fraction, rounds)
    return build_clustered_fed_avg(
        name="ifca_finetune",
        title="IFCA, then fine-tuning",
        num_clusters=num_clusters,
        init_stddev=init_stddev,
        rounds=rounds,
        selection_rounds=selection_rounds,
        federated_rounds=max(selection_rounds, rounds_of(federated_fraction, rounds)),
    )
