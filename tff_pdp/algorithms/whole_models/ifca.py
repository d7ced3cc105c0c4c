"""IFCA, and four methods whose clusters IFCA forms in the first rounds.

IFCA (Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020) selects privately here.
Every client selects its cluster anew in every round. Selection reads all of a client's examples, so no sampling makes
it cheaper: over a whole training it can cost more than the gradients.

The methods named `ifca_...` select in the first rounds only, and train a cluster's model as IFCA does (Liu et al.,
NeurIPS 2022, section 4, algorithm 2 and appendix C). From then on they go on with FedAvg in each cluster
(`ifca_fed_avg`), or every client alone from its cluster's model: by local training (`ifca_local`) or fine-tuning
(`ifca_finetune`).

With `ifca_mr_mtl` each client has weights of its own after the first rounds, trained with a pull to the mean of its
cluster. (Algorithm 2 releases the difference to the cluster's mean all along; for the mean to stay the mean of its
members it has to be the difference to a client's own weights in the second part, as in MR-MTL.)
"""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, choose, map_weights, rounds_of
from tff_pdp.algorithms.clustering import (
    build_clustered_fed_avg,
    build_move_centroids,
    centroid_of,
    cluster_of,
    init_clusters,
    init_member,
    release_to_cluster,
)
from tff_pdp.algorithms.hyper_parameters import LEARNING_RATE, LOCAL_STEPS, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.settings import Count, Fraction, NotNegative


def build_ifca(*, rounds: int, num_clusters: Count = 4, init_stddev: NotNegative = 0.1) -> Algorithm:
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


def build_ifca_fed_avg(
    *, rounds: int, num_clusters: Count = 4, selection_fraction: Fraction = 0.1, init_stddev: NotNegative = 0.1
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


def build_ifca_finetune(
    *,
    rounds: int,
    num_clusters: Count = 4,
    selection_fraction: Fraction = 0.1,
    federated_fraction: Fraction = 0.5,
    init_stddev: NotNegative = 0.1,
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


def build_ifca_local(
    *, rounds: int, num_clusters: Count = 4, selection_fraction: Fraction = 0.1, init_stddev: NotNegative = 0.1
) -> Algorithm:
    """Builds the method; states and releases as `build_clustered_fed_avg`.

    Args:
      rounds: of the whole training.
      num_clusters: how many clusters.
      selection_fraction: share of the rounds, from the first, in which clients select and train clusters.
      init_stddev: how far the clusters' first models lie apart.
    """
    selection_rounds = rounds_of(selection_fraction, rounds)
    return build_clustered_fed_avg(
        name="ifca_local",
        title="IFCA, then local",
        num_clusters=num_clusters,
        init_stddev=init_stddev,
        rounds=rounds,
        selection_rounds=selection_rounds,
        federated_rounds=selection_rounds,
    )


def build_ifca_mr_mtl(
    *,
    rounds: int,
    num_clusters: Count = 4,
    selection_fraction: Fraction = 0.1,
    init_stddev: NotNegative = 0.1,
    prox_inside_clip: bool = False,
) -> Algorithm:
    """Builds the method. Server state: each cluster's mean, the round. Client state: its cluster and its weights.

    Released: the movement and the membership, each in the place of the client's cluster, as sums.

    Args:
      rounds: of the whole training.
      num_clusters: how many clusters.
      selection_fraction: share of the rounds, from the first, in which clients select their cluster.
      init_stddev: how far the clusters' first models lie apart.
      prox_inside_clip: as the paper's released code; see `Trajectory`.
    """
    selection_rounds = rounds_of(selection_fraction, rounds)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        cluster = cluster_of(client_state, hparams)
        centroid = centroid_of(broadcast, cluster)
        is_clustering = broadcast["round"] < selection_rounds
        start = choose(is_clustering, centroid, client_state["weights"])
        weights = local_sgd(
            Trajectory(
                start,
                anchor=centroid,
                prox_weight=tf.where(is_clustering, 0.0, hparams["prox_weight"]),
                prox_inside_clip=prox_inside_clip,
            ),
            data,
            grad_fn,
            learning_rate=hparams["learning_rate"],
            local_steps=hparams["local_steps"],
        )
        return ClientResult(
            state={"weights": weights, "cluster": cluster},
            released=release_to_cluster(map_weights(tf.subtract, weights, start), cluster, num_clusters),
        )

    return Algorithm(
        name="ifca_mr_mtl",
        title="IFCA, then MR-MTL",
        hparams={
            "learning_rate": LEARNING_RATE,
            "local_steps": LOCAL_STEPS,
            "prox_weight": prox_weight(1.0, "the cluster's mean"),
        },
        released={"movement": "sum", "members": "sum"},
        data_passes=1,
        init_server=lambda weights: init_clusters(weights, num_clusters, init_stddev),
        broadcast=lambda state: {"centroids": state["centroids"], "round": state["round"]},
        init_client=init_member,
        client_update=client_update,
        server_update=build_move_centroids(selection_rounds, init_stddev),
        personalise=lambda broadcast, client_state: client_state["weights"],
        global_model=None,
        candidates=lambda broadcast: broadcast["centroids"],
        selection_rounds=selection_rounds,
    )
