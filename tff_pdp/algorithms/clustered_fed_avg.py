"""FedAvg within clusters, followed or not by local training: what the IFCA methods other than MR-MTL have in common."""

import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, choose, map_weights
from tff_pdp.algorithms.clustering import (
    build_move_centroids,
    centroid_of,
    cluster_of,
    init_clusters,
    init_member,
    release_to_cluster,
)
from tff_pdp.algorithms.local_sgd import local_sgd


def build_clustered_fed_avg(
    *,
    name: str,
    title: str,
    num_clusters: int,
    init_stddev: float,
    rounds: int,
    selection_rounds: int,
    federated_rounds: int,
) -> Algorithm:
    """Builds the method. Server state: a model for each cluster, the round. Client state: its cluster,
    its weights, and whether it has begun to train them alone.

    Released: the movement and the membership, each in the place of the client's cluster, as sums; zeros once the
    federated rounds are over.

    Args:
      name: its name in the registry.
      title: its name for a reader.
      num_clusters: how many clusters.
      init_stddev: how far the clusters' first models lie apart.
      rounds: of the whole training.
      selection_rounds: how many rounds clients select their cluster in.
      federated_rounds: how many rounds train the clusters' models, at least as many; in the others every client goes on
        alone, from its cluster's model.
    """

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        cluster = cluster_of(client_state, hparams)
        start = choose(client_state["is_own"], client_state["weights"], centroid_of(broadcast, cluster))
        weights = local_sgd(
            start, data, grad_fn, learning_rate=hparams["learning_rate"], local_steps=hparams["local_steps"]
        )
        is_federated = broadcast["round"] < federated_rounds
        released = release_to_cluster(map_weights(tf.subtract, weights, start), cluster, num_clusters)
        released = {
            key: map_weights(lambda value: tf.where(is_federated, value, 0.0), nest) for key, nest in released.items()
        }
        state = {"weights": weights, "cluster": cluster, "is_own": tf.logical_not(is_federated)}
        return ClientResult(state=state, released=released)

    def personalise(broadcast, client_state):
        # A client that has not trained alone, as one that left before, has its cluster's model.
        shared = centroid_of(broadcast, client_state["cluster"])
        return choose(client_state["is_own"], client_state["weights"], shared)

    return Algorithm(
        name=name,
        title=title,
        hparams={"learning_rate": 0.1, "local_steps": 1},
        released={"movement": "sum", "members": "sum"},
        data_passes=1,
        init_server=lambda weights: init_clusters(weights, num_clusters, init_stddev),
        broadcast=lambda state: {"centroids": state["centroids"], "round": state["round"]},
        init_client=lambda broadcast: {**init_member(broadcast), "is_own": tf.constant(False)},
        client_update=client_update,
        server_update=build_move_centroids(selection_rounds, init_stddev),
        personalise=personalise,
        global_model=None,
        candidates=lambda broadcast: broadcast["centroids"],
        selection_rounds=selection_rounds,
        serves_candidates=federated_rounds >= rounds,
    )
