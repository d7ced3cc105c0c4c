"""IFCA, and four methods whose clusters IFCA forms in the first rounds.

In IFCA (Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020) every client selects its
cluster anew in every round, here privately. Selection reads all of a client's examples, so no subsampling lowers the
privacy cost: over a whole training, selections can cost more than the gradients.

The methods named `ifca_...` select in the first rounds only, and train a cluster's model as IFCA does (Liu et al.,
NeurIPS 2022, section 4, algorithm 2 and appendix C). Afterwards `ifca_fed_avg` trains each cluster's model by FedAvg;
with `ifca_local` each client trains alone from its cluster's model; with `ifca_finetune` each client trains alone after
some rounds of FedAvg.

With `ifca_mr_mtl` each client has weights of its own after the first rounds, trained with a pull to its cluster's mean.
(In Algorithm 2 a client always releases the difference to the cluster's mean. Here, after the first rounds, a client
releases the movement of its own weights, as in MR-MTL, so that the mean stays the mean of the members.)
"""

import dataclasses

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, Export, choose, map_weights, rounds_of
from tff_pdp.algorithms.clustering import (
    centroid_of,
    cluster_of,
    clusters,
    init_member,
    release_to_cluster,
)
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING, prox_weight
from tff_pdp.algorithms.local_sgd import Trajectory, local_sgd
from tff_pdp.settings import Count, Fraction, NotNegative


def build_ifca(*, rounds: int, num_clusters: Count = 4, init_stddev: NotNegative = 0.1) -> Algorithm:
    """Builds IFCA, with the states and releases of `ifca_finetune`.

    Args:
      rounds: number of rounds of the whole training.
      num_clusters: number of clusters.
      init_stddev: standard deviation of the noise that sets the clusters' first models apart.
    """
    clustered = build_ifca_fed_avg(
        rounds=rounds, num_clusters=num_clusters, selection_fraction=1.0, init_stddev=init_stddev
    )
    return dataclasses.replace(clustered, name="ifca", title="IFCA")


def build_ifca_fed_avg(
    *, rounds: int, num_clusters: Count = 4, selection_fraction: Fraction = 0.1, init_stddev: NotNegative = 0.1
) -> Algorithm:
    """Builds IFCA followed by FedAvg in clusters, with the states and releases of `ifca_finetune`.

    Args:
      rounds: number of rounds of the whole training.
      num_clusters: number of clusters.
      selection_fraction: share of the rounds, from the first, in which clients select their cluster.
      init_stddev: standard deviation of the noise that sets the clusters' first models apart.
    """
    clustered = build_ifca_finetune(
        rounds=rounds,
        num_clusters=num_clusters,
        selection_fraction=selection_fraction,
        federated_fraction=1.0,
        init_stddev=init_stddev,
    )
    return dataclasses.replace(clustered, name="ifca_fed_avg", title="IFCA, then FedAvg")


def build_ifca_local(
    *, rounds: int, num_clusters: Count = 4, selection_fraction: Fraction = 0.1, init_stddev: NotNegative = 0.1
) -> Algorithm:
    """Builds IFCA followed by local training, with the states and releases of `ifca_finetune`.

    Args:
      rounds: number of rounds of the whole training.
      num_clusters: number of clusters.
      selection_fraction: share of the rounds, from the first, in which clients select and train clusters' models.
      init_stddev: standard deviation of the noise that sets the clusters' first models apart.
    """
    clustered = build_ifca_finetune(
        rounds=rounds,
        num_clusters=num_clusters,
        selection_fraction=selection_fraction,
        federated_fraction=0.0,
        init_stddev=init_stddev,
    )
    return dataclasses.replace(clustered, name="ifca_local", title="IFCA, then local")


def build_ifca_finetune(
    *,
    rounds: int,
    num_clusters: Count = 4,
    selection_fraction: Fraction = 0.1,
    federated_fraction: Fraction = 0.5,
    init_stddev: NotNegative = 0.1,
) -> Algorithm:
    """Builds IFCA followed by fine-tuning. Server state: each cluster's model, the round. Client state: its cluster,
    its weights, and whether it trains alone. Released: movement and membership, summed by cluster; zeros once clients
    train alone.

    Args:
      rounds: number of rounds of the whole training.
      num_clusters: number of clusters.
      selection_fraction: share of the rounds, from the first, in which clients select their cluster.
      federated_fraction: share of the rounds, selection rounds included, in which the clusters' models are trained;
        afterwards every client fine-tunes alone.
      init_stddev: standard deviation of the noise that sets the clusters' first models apart.
    """
    selection_rounds = rounds_of(selection_fraction, rounds)
    federated_rounds = max(selection_rounds, rounds_of(federated_fraction, rounds))

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        cluster = cluster_of(client_state, hparams)
        start = choose(client_state["is_own"], client_state["weights"], centroid_of(broadcast, cluster))
        weights = local_sgd(start, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        is_federated = broadcast["round"] < federated_rounds
        released = release_to_cluster(map_weights(tf.subtract, weights, start), cluster, num_clusters)
        released = {
            key: map_weights(lambda value: tf.where(is_federated, value, 0.0), nest) for key, nest in released.items()
        }
        state = {"weights": weights, "cluster": cluster, "is_own": tf.logical_not(is_federated)}
        return ClientResult(state=state, released=released)

    def personalise(broadcast, client_state):
        # A client that has not trained alone (because it left before) has its cluster's model.
        shared = centroid_of(broadcast, client_state["cluster"])
        return choose(client_state["is_own"], client_state["weights"], shared)

    return Algorithm(
        name="ifca_finetune",
        title="IFCA, then fine-tuning",
        hparams=LOCAL_TRAINING,
        init_client=lambda broadcast: {**init_member(broadcast), "is_own": tf.constant(False)},
        client_update=client_update,
        personalise=personalise,
        export=Export(serves_candidates=federated_rounds >= rounds),
        **clusters(num_clusters, init_stddev, selection_rounds),
    )


def build_ifca_mr_mtl(
    *,
    rounds: int,
    num_clusters: Count = 4,
    selection_fraction: Fraction = 0.1,
    init_stddev: NotNegative = 0.1,
    prox_inside_clip: bool = False,
) -> Algorithm:
    """Builds IFCA followed by MR-MTL. Server state: each cluster's mean, the round. Client state: its cluster and its
    weights. Released: movement and membership, summed by cluster.

    Args:
      rounds: number of rounds of the whole training.
      num_clusters: number of clusters.
      selection_fraction: share of the rounds, from the first, in which clients select their cluster.
      init_stddev: standard deviation of the noise that sets the clusters' first models apart.
      prox_inside_clip: add the pull to each example's gradient before the clip, as the MR-MTL paper's released code
        does; by default the pull is added after clip and noise.
    """
    selection_rounds = rounds_of(selection_fraction, rounds)

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        cluster = cluster_of(client_state, hparams)
        centroid = centroid_of(broadcast, cluster)
        is_clustering = broadcast["round"] < selection_rounds
        start = choose(is_clustering, centroid, client_state["weights"])
        trajectory = Trajectory(
            start,
            anchor=centroid,
            prox_weight=tf.where(is_clustering, 0.0, hparams["prox_weight"]),
            prox_inside_clip=prox_inside_clip,
        )
        weights = local_sgd(trajectory, data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        return ClientResult(
            state={"weights": weights, "cluster": cluster},
            released=release_to_cluster(map_weights(tf.subtract, weights, start), cluster, num_clusters),
        )

    return Algorithm(
        name="ifca_mr_mtl",
        title="IFCA, then MR-MTL",
        hparams={**LOCAL_TRAINING, "prox_weight": prox_weight(1.0, "the cluster's mean")},
        init_client=init_member,
        client_update=client_update,
        personalise=lambda broadcast, client_state: client_state["weights"],
        **clusters(num_clusters, init_stddev, selection_rounds),
    )
