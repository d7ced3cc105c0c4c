"""Builds what clustered methods share: one model for each cluster, private selection among them, sums by cluster.

IFCA (Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020) and HypCluster (Mansour et
al., arXiv:2002.10619, 2020): in every round each client selects the cluster whose model fits its data best, trains that
model, and the server averages what the members of a cluster release. Here the selection is private (the exponential
mechanism, `tff_pdp.privacy.mechanisms.selection`), and may stop after the first rounds, each of which costs budget;
from then on a client stays in the cluster it is in ("preconditioning", Liu et al., NeurIPS 2022, algorithm 2).
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_pdp.algorithms.base import State, map_weights, put_in_place
from tff_pdp.models.base import Weights


def init_clusters(weights: Weights, num_clusters: int, init_stddev: float) -> State:
    """The server's first state: `centroids`, of shape `[num_clusters, ...]`, and `round`, of which there were none.

    The first cluster starts from the given weights, the others apart from them: clusters that are alike cannot be told
    apart by any client.

    Args:
      weights: initial weights; public.
      num_clusters: how many clusters.
      init_stddev: standard deviation of what is added, drawn from a public seed.
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
    """The state of a client that takes part for the first time: a `cluster` and `weights` of its own."""
    return {"weights": centroid_of(broadcast, tf.constant(0)), "cluster": tf.constant(0)}


def cluster_of(client_state: State, hparams: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The cluster just selected or, in rounds without selection, the one the client is in: int32 scalar."""
    selected = hparams["selected"]
    return tf.where(selected >= 0, selected, client_state["cluster"])


def centroid_of(broadcast: State, cluster: tf.Tensor) -> Weights:
    """The model of one cluster."""
    return map_weights(lambda stacked: tf.gather(stacked, cluster), broadcast["centroids"])


def release_to_cluster(movement: Weights, cluster: tf.Tensor, num_clusters: int) -> dict[str, Weights]:
    """A client's movement in its cluster's place and zeros in the others', and a one where it counts as a member.

    Which cluster a client is in is a function of its private selection, so its sum may be released like the movement.
    """
    place = tf.one_hot(cluster, num_clusters)
    return {"movement": put_in_place(movement, place), "members": {"count": place}}


def build_move_centroids(selection_rounds: int, init_stddev: float) -> Callable[[State, Mapping[str, Weights]], State]:
    """Builds the server's update: each cluster's model moves by the mean of its members' movements.

    A cluster without members keeps its model, but for the rounds in which clients select: there it starts again beside
    the largest, and both go on from where it is. Otherwise one that nobody fits at first is lost for good, and two
    groups of clients have to share another. Memberships are released, so nothing else is learnt from clients.

    Args:
      selection_rounds: how many rounds clients select their cluster in.
      init_stddev: standard deviation of what tells the two apart, drawn from a public seed.
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
    """The fields of an `Algorithm` that say what its server does, what is released to it, and when clients select."""
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
