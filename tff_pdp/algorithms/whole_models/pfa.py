"""PFA and PFA+ (Liu et al., "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2021).

Liberal silos have large budgets and upload updates with little noise. All other silos are strict, and their updates are
mostly noise. The server keeps only that part of the strict silos' mean update which lies in the subspace of the liberal
updates. This helps where strict updates drown in noise and all silos have the same kind of data. With a few liberal
silos and skewed labels, the model learns the liberal silos' labels only: `public_only`, which leaves strict silos out,
is the control to compare with.

The partition by norms of updates is that of Liu and Xiong, "Personalized Differentially Private Federated Learning
without Exposing Privacy Budgets", CIKM 2023.
"""

from typing import Literal

import numpy as np
import tensorflow as tf

from tff_pdp.algorithms.base import Algorithm, ClientResult, Traffic, choose, map_weights
from tff_pdp.algorithms.hyper_parameters import LOCAL_TRAINING
from tff_pdp.algorithms.local_sgd import local_sgd
from tff_pdp.algorithms.projection.groups import Groups, Partition
from tff_pdp.algorithms.projection.subspaces import (
    Subspaces,
    coordinates,
    dims_of,
    joined,
    lifted,
    mean_of_rows,
    no_subspaces,
    parted,
    subspaces_of,
)
from tff_pdp.errors import ConfigError
from tff_pdp.settings import Count, Positive, Share


def build_pfa(
    *,
    num_clients: int,
    num_weights: int = 0,
    plus: bool = False,
    projection_dims: Count = 1,
    centre: bool = True,
    joint: bool = False,
    partition: Partition = "by_norm",
    liberal_share: Share = 0.1,
    liberal_epsilon: Positive | None = None,
    first_round: Literal["everyone", "liberal_only"] = "everyone",
    paper_raw_norms: bool = False,
) -> Algorithm:
    """Builds PFA or PFA+. Server state: the shared weights, the number of rounds, and the liberal silos; for PFA+ also
    the subspaces of the last round. Client state: nothing. Released, as rows: the update; for PFA+ also the strict
    silos' coordinates; for `known` also the epsilon, for `declared` a bit.

    Args:
      num_clients: number M of silos, each with a `client_index` of its own.
      num_weights: number d of the model's weights, which `projection_dims` must not exceed; 0 for no check.
      plus: whether to build PFA+, in which strict silos, from the second round that moves the model, no longer upload
        an update. Instead they upload, for each tensor, k coordinates in the last round's subspace.
      projection_dims: dimension k of the subspace of each tensor; lower where liberal updates span less.
      centre: whether the subspace goes through the mean of the liberal updates, as in the paper's released code, or
        through zero, as in the paper's Algorithm 3.
      joint: whether all weights have one subspace together, instead of one for each tensor.
      partition: rule that says which silos are liberal. `by_norm` looks at the norms of the updates in the first round,
        a warm start: all silos upload, the model does not move, and the round is charged like any other. `known` looks
        at epsilons that the server knows, `declared` at a bit that each silo uploads.
      liberal_share: fraction of the silos that is liberal (the silos with the largest epsilons); only for `known`.
      liberal_epsilon: least epsilon of a liberal silo; for `declared`, and for `known` in place of `liberal_share`.
      first_round: silos that upload an update in the first round that moves the model: `everyone`, or `liberal_only`.
        `liberal_only` is not allowed with `by_norm`, whose warm start needs everyone's update.
      paper_raw_norms: make two groups by raw norms, as the paper describes; with three different budgets these groups
        are often wrong.

    Raises:
      ConfigError: `projection_dims` is above d, or two settings do not suit each other.
    """
    groups = Groups(num_clients, partition, liberal_share, liberal_epsilon, paper_raw_norms)
    if num_weights and projection_dims > num_weights:
        raise ConfigError(f"projection_dims must be at most {num_weights}, the model's weights, not {projection_dims}")
    is_liberal_first = first_round == "liberal_only"
    if is_liberal_first and groups.has_warm_start:
        raise ConfigError("first_round liberal_only needs partition known or declared: a warm start needs everyone")

    def in_space(weights, leading=0):
        return joined(weights, leading=leading) if joint else weights

    def out_of_space(weights, shaped_as):
        return parted(weights, shaped_as) if joint else weights

    def init_server(weights):
        state = {"weights": weights, "round": tf.constant(0), "is_liberal": tf.zeros([num_clients])}
        if plus:
            none = no_subspaces(in_space(weights), projection_dims, num_clients)
            state |= {"basis": none.basis, "centre": none.centre, "has_subspace": tf.constant(0.0)}
        return state

    def broadcast(state):
        return {name: state[name] for name in state if name != "round"} if plus else {"weights": state["weights"]}

    def client_update(broadcast, client_state, data, grad_fn, hparams):
        weights = local_sgd(broadcast["weights"], data, grad_fn, hparams["learning_rate"], hparams["local_steps"])
        update = map_weights(lambda new, old: new - old, weights, broadcast["weights"])
        released = {"update": update, **groups.release(hparams)}
        if plus:
            is_strict = tf.gather(broadcast["is_liberal"], hparams["client_index"]) < 0.5
            sends_few = tf.logical_and(is_strict, broadcast["has_subspace"] > 0)
            few = coordinates(Subspaces(broadcast["basis"], broadcast["centre"]), in_space(update))
            released["update"] = choose(sends_few, map_weights(tf.zeros_like, update), update)
            released["coordinates"] = choose(sends_few, few, map_weights(tf.zeros_like, few))
        return ClientResult(state=client_state, released=released)

    def server_update(state, aggregates):
        present = aggregates["update"]["present"]
        rows = in_space(aggregates["update"]["rows"], leading=1)
        is_first = tf.equal(state["round"], 0)
        is_liberal = tf.where(is_first, groups.decide(aggregates), state["is_liberal"])
        liberal, strict = present * is_liberal, present * (1.0 - is_liberal)
        some_liberal = tf.reduce_sum(liberal) > 0
        if is_liberal_first:
            strict = tf.where(tf.logical_and(is_first, some_liberal), tf.zeros_like(strict), strict)
        subspaces = subspaces_of(rows, liberal, projection_dims, centred=centre)
        strict_mean, liberal_mean = mean_of_rows(rows, strict), mean_of_rows(rows, liberal)
        used, few, has_subspace = subspaces, coordinates(subspaces, strict_mean), some_liberal
        if plus:
            is_old = state["has_subspace"] > 0
            old = Subspaces(state["basis"], state["centre"])
            used = Subspaces(*(choose(is_old, one, other) for one, other in zip(old, subspaces, strict=True)))
            few = choose(is_old, mean_of_rows(aggregates["coordinates"]["rows"], strict), few)
            has_subspace = tf.logical_or(some_liberal, is_old)
        # Without a liberal silo there is no subspace: the plain mean.
        projected = choose(has_subspace, lifted(used, few, strict_mean), strict_mean)
        sizes = tf.reduce_sum(strict), tf.reduce_sum(liberal)
        total = tf.maximum(sizes[0] + sizes[1], 1.0)
        movement = out_of_space(
            map_weights(lambda s, p: (sizes[0] * s + sizes[1] * p) / total, projected, liberal_mean), state["weights"]
        )
        moves = state["round"] + 1 >= groups.first_moving_round
        weights = map_weights(lambda w, u: tf.where(moves, w + u, w), state["weights"], movement)
        after = {"weights": weights, "round": state["round"] + 1, "is_liberal": is_liberal}
        if plus:
            is_new = tf.cast(tf.logical_and(moves, some_liberal), tf.float32)
            after |= {"basis": subspaces.basis, "centre": subspaces.centre, "has_subspace": is_new}
        return after

    def traffic(state, round_number):
        # As long as a liberal silo takes part: without one, strict silos would upload whole updates again.
        sizes = [np.size(value) for value in state["weights"].values()]
        sizes = [sum(sizes)] if joint else sizes
        everything, strict = float(sum(sizes)), np.asarray(state["is_liberal"]) < 0.5
        uplink, downlink = np.full(num_clients, everything), np.full(num_clients, everything)
        if strict.all():
            return Traffic(uplink, downlink)
        if plus and round_number > groups.first_moving_round:
            dims = [dims_of(size, projection_dims, num_clients) for size in sizes]
            uplink[strict] = sum(dims)
            downlink[strict] += sum((k + 1) * size for k, size in zip(dims, sizes, strict=True))
        if is_liberal_first and round_number == 1:
            uplink[strict] = 0.0
        return Traffic(uplink, downlink)

    return Algorithm(
        name="pfa",
        title="PFA+" if plus else "PFA",
        hparams={**LOCAL_TRAINING, **groups.hparams},
        released={"update": "rows", **groups.released, **({"coordinates": "rows"} if plus else {})},
        num_clients=num_clients,
        data_passes=1,
        init_server=init_server,
        broadcast=broadcast,
        init_client=lambda broadcast: {},
        client_update=client_update,
        server_update=server_update,
        personalise=lambda broadcast, client_state: broadcast["weights"],
        needs_everyone=True,
        traffic=traffic,
        warning=groups.warning,
    )
