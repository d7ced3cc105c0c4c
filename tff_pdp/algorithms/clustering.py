"""Builds the parts that clustered methods share: a model per cluster, private selection of a cluster, sums by cluster.

IFCA (Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020) and HypCluster (Mansour et
al., arXiv:2002.10619, 2020) work as follows. In every round each client selects the cluster whose model fits its data
best and trains that model; the server averages the releases of a cluster's members. Here the selection is private (the
exponential mechanism, `tff_pdp.privacy.mechanisms.selection`) and costs budget in each round. Selection may stop after
the first rounds; each client then stays in its cluster ("preconditioning", Liu et al., NeurIPS 2022, algorithm 2).
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_pdp.algorithms.base import State, map_weights, put_in_place
from tff_pdp.models.base import Weights


def init_clusters(weights: Weights, num_clusters: int, init_stddev: float) -> State:
    """Returns the server's first state: `centroids`, of shape `[num_clusters, ...]`, and `round`, the number 0.

    The first cluster starts from the given weights, each other cluster from these weights plus noise, since no client
    could choose between equal clusters.

    Args:
      weights: initial weights; public.
      num_clusters: number of clusters.
      init_stddev: standard deviation of the added Gaussian noise, drawn from a public seed.
    """

    def stack(position: int, value: tf.Tensor) -> tf.Tensor:
        shape = [num_clusters - 1, *value.shape.as_list()]
        others = tf.random.stateless_normal(shape, seed=(position, num_clusters), stddev=init_stddev)
        return tf.concat([value[tf.newaxis], value[tf.newaxis] + others], axis=0)

    centroids = collections.OrderedDict(
        (name, stack(position, tf.convert_to_tensor(value))) for position, (name, value) in enumerate(weights.items())
    )
    return {"centroids": centroids, "round": tf.constant(0)}


def init_member(broadcast: State) -> State:
    """Returns the state of a client that takes part for the first time: the first `cluster`, and its `weights`."""
    return {"weights": centroid_of(broadcast, tf.constant(0)), "cluster": tf.constant(0)}


def cluster_of(client_state: State, hparams: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns the index of the cluster just selected or, without selection, of the client's last cluster: int32."""
    selected = hparams["selected"]
    return tf.where(selected >= 0, selected, client_state["cluster"])


def centroid_of(broadcast: State, cluster: tf.Tensor) -> Weights:
    """Returns the weights of one cluster's model."""
    return map_weights(lambda stacked: tf.gather(stacked, cluster), broadcast["centroids"])


def release_to_cluster(movement: Weights, cluster: tf.Tensor, num_clusters: int) -> dict[str, Weights]:
    """Returns a client's movement and membership (the number 1) at its cluster's index, and zeros at all other indices.

    Membership is a function of a private selection, so sums of memberships may be released, like sums of movements.
    """
    place = tf.one_hot(cluster, num_clusters)
    return {"movement": put_in_place(movement, place), "members": {"count": place}}


def build_move_centroids(selection_rounds: int, init_stddev: float) -> Callable[[State, Mapping[str, Weights]], State]:
    """Builds the server's update: each cluster's model moves by the mean of its members' movements.

    A cluster without members keeps its model, except in rounds in which clients select: the cluster then restarts from
    the model of the largest cluster plus noise. Without restarts, a cluster that fits no client at first would be lost
    for good, and two groups of clients would have to share one cluster. The update reads only released values.

    Args:
      selection_rounds: number of rounds in which clients select their cluster.
      init_stddev: standard deviation of the noise at a restart, drawn from a public seed.
    """

    def move_centroids(state: State, aggregates: Mapping[str, Weights]) -> State:
        members = aggregates["members"]["count"]
        largest = tf.argmax(members)
        is_clustering = tf.logical_and(state["round"] < selection_rounds, members[largest] > 0)
        is_lost = tf.logical_and(is_clustering, members <= 0)

        def move(position: int, centroids: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
            each = [-1] + [1] * (centroids.shape.rank - 1)
            # Members may have weights below one.
            moved = centroids + tf.math.divide_no_nan(total, tf.reshape(members, each))
            seed = tf.stack([position, state["round"]])
            beside = tf.random.stateless_normal(tf.shape(centroids), seed, stddev=init_stddev)
            return tf.where(tf.reshape(is_lost, each), tf.gather(moved, largest) + beside, moved)

        centroids = collections.OrderedDict(
            (name, move(position, state["centroids"][name], aggregates["movement"][name]))
            for position, name in enumerate(state["centroids"])
        )
        return {"centroids": centroids, "round": state["round"] + 1}

    return move_centroids


def clusters(num_clusters: int, init_stddev: float, selection_rounds: int) -> dict[str, Any]:
    """Returns, by name, the `Algorithm` fields that concern the server, the releases and the selections."""
    return {
        "released": {"movement": "sum", "members": "sum"},
        "data_passes": 1,
        "init_server": lambda weights: init_clusters(weights, num_clusters, init_stddev),
        "broadcast": lambda state: {"centroids": state["centroids"], "round": state["round"]},
        "server_update": build_move_centroids(selection_rounds, init_stddev),
        "global_model": None,
        "candidates": lambda broadcast: broadcast["centroids"],
        "selection_rounds": selection_rounds,
    }
